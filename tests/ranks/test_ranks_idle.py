"""A job of which nothing is asked does nothing: no thread wakes, no core works, no packet travels."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool

import horo.torch as hvd

BENCHMARKS = str(Path(__file__).resolve().parent.parent.parent / "benchmarks")
sys.path.insert(0, BENCHMARKS)
from resting import activity_of  # noqa: E402  (benchmarks/resting.py)

LOOK_S = 1.0
DEADLINE_S = 30.0


def begin() -> int:
    """Works a little; returns the process."""
    for step in range(3):
        handles = [hvd.allreduce_async_(torch.ones(1000), op=hvd.Sum, name=f"{step % 2}.{i}") for i in range(10)]
        assert all((hvd.synchronize(handle) == hvd.size()).all() for handle in handles)
    return os.getpid()


def count_packets(benchmarks: str) -> tuple[int, int]:
    sys.path.insert(0, benchmarks)
    from resting import own_packets  # noqa: PLC0415

    return own_packets()


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host per rank"])
def test_an_idle_job_is_silent(apart: bool) -> None:
    with RankPool(2, ranks_per_host=1 if apart else 2) as pool:
        processes = pool.run(begin)
        deadline = time.monotonic() + DEADLINE_S
        while True:  # what a start leaves behind ends; what comes again and again never does
            before = pool.run(count_packets, BENCHMARKS)
            threading.Event().wait(0.1)
            resting = activity_of(processes)
            threading.Event().wait(LOOK_S)
            did = activity_of(processes).since(resting)
            after = pool.run(count_packets, BENCHMARKS)
            if (did.wake_ups, did.cpu_ns, after) == (0, 0, before):
                break
            assert time.monotonic() < deadline, f"in {LOOK_S:g} s: {did}, packets and connections {before} to {after}"
        assert all((connections > 0) == apart for _, connections in after)
