"""A job in which nothing happens: what ``HORO_LOG_LEVEL`` shows, what is kept, and that nothing wakes."""

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import run_python
from rank_pool import RankPool, on_own

import horo.torch as hvd
from horo import __version__

HEAD = "import os\nos.environ.update({extra!r}.get(os.environ.get('HOROVOD_RANK'), {{}}))\n"
TRAIN = """
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
job = start(threads=1)
job.context.finish(job.context.submit(RequestBuffer.of(OPS["barrier"], "barrier")))
job.close()
"""
"""What says the lines is the same with torch, and here much sooner."""
START = (
    rf"horo \[0\] info: horo {re.escape(__version__)} \(core {re.escape(__version__)}\+abi\d+, \w+\): "
    r"{size}, started by {launcher}; {data}"
)


def lines_of(folder: Path, level: str, size: int, extra: dict[str, dict[str, str]] | None = None) -> list[str]:
    script = folder / "train.py"
    script.write_text(HEAD.format(extra=extra or {}) + TRAIN)
    place = ["-m", "horo.runner", "-np", str(size), "--oversubscribe", "--no-prefix", sys.executable] if size else []
    done = run_python(*place, str(script), check=True, environment={"HORO_LOG_LEVEL": level})
    assert done.stdout == ""
    return sorted(done.stderr.splitlines())


def test_a_job_in_order_says_nothing(tmp_path: Path) -> None:
    assert lines_of(tmp_path, "warning", 2) == []


@pytest.mark.parametrize(("overlap", "when"), [("always", "during"), ("never", "after")])
def test_at_info_rank_0_says_what_has_started(tmp_path: Path, overlap: str, when: str) -> None:
    (line,) = lines_of(tmp_path, "info", 2, {rank: {"HORO_OVERLAP": overlap} for rank in "01"})
    data = f"data in shared memory, gradients {when} backward"
    assert re.fullmatch(START.format(size=r"2 ranks on 1 host \(localhost: 2\)", launcher="hororun", data=data), line)


def test_at_info_a_rank_alone_says_that_no_data_travels(tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path, "info", 0)
    assert re.fullmatch(START.format(size="1 rank", launcher="nobody", data="no data travels"), line)


def test_at_info_hosts_and_the_transport_between_them_are_named(tmp_path: Path) -> None:
    other = {"1": {"HORO_HOST_ID": "other", "HORO_HOSTNAME": "h2"}}
    (line,) = lines_of(tmp_path, "info", 3, other)
    data = "data in shared memory on a host, by TCP between hosts, gradients during backward"
    size = r"3 ranks on 2 hosts \(localhost: 2, h2: 1\)"
    assert re.fullmatch(START.format(size=size, launcher="hororun", data=data), line)


def test_at_debug_every_rank_says_where_it_is(tmp_path: Path) -> None:
    first, start, second = lines_of(tmp_path, "debug", 2)
    assert start.startswith("horo [0] info: horo ")
    for rank, line in enumerate((first, second)):
        pattern = (
            rf"horo \[{rank}\] debug: rank {rank} of 2 on localhost, process \d+: local rank {rank} of 2, "
            r"cross rank 0 of 1, \d+ cores? of this host, segments of 256 KiB, joined in \d+ ms"
        )
        assert re.fullmatch(pattern, line), line


def ones() -> torch.Tensor:
    return torch.ones(1 << 18)


FORMS: dict[str, Callable[[str | None], object]] = {
    "allreduce": lambda name: hvd.allreduce(ones(), name=name),
    "allreduce_async": lambda name: hvd.synchronize(hvd.allreduce_async(ones(), name=name)),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce([ones(), ones()], name=name),
    "broadcast_": lambda name: hvd.broadcast_(ones(), 0, name=name),
    "allgather, repeated": lambda name: (ones(), [hvd.allgather(ones()[: 1 << 16], name=name) for _ in range(2)]),
    "reducescatter": lambda name: hvd.reducescatter(ones(), name=name),
    "alltoall": lambda name: hvd.alltoall(ones(), name=name),
}


@on_own(2)
def test_a_name_costs_no_tensor() -> None:
    """1 MiB kept for each of 64 names would be eight times what is allowed."""

    def dirty_kib() -> int:
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

    for form, call in FORMS.items():
        for name in (*[None] * 10, "x"):
            call(name)
        before = dirty_kib()
        for number in range(64):  # names so short that what is kept of one fits into what malloc leaves behind a tensor
            call(f"{number}")
        assert dirty_kib() - before <= 8 << 10, form


BENCHMARKS = str(Path(__file__).resolve().parent.parent.parent / "benchmarks")
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
    sys.path.insert(0, BENCHMARKS)
    from resting import activity_of  # noqa: PLC0415

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
