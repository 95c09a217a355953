"""Threads that synchronize one handle at once: each gets the result, or the error with its sentence."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch
from rank_pool import on

import horo.torch as hvd
from horo.core import context
from horo.torch.engine.request import Request


def _synchronize_in_threads(handle: int, count: int) -> list[Any]:
    """What ``count`` threads and this one get; the other ranks submit the operation when all threads wait."""
    got: list[Any] = []

    def body() -> None:
        try:
            got.append(hvd.synchronize(handle))
        except Exception as error:
            got.append(error)

    def waits(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not Request.wait.__code__:
            frame = frame.f_back
        return frame is not None

    threads = [threading.Thread(target=body, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not all(map(waits, threads)):
        assert time.monotonic() < deadline
    hvd.barrier()
    try:
        got.append(hvd.synchronize(handle))
    except ValueError as error:  # it may have come too late
        got += [] if "cleared" in str(error) else [error]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return got


@pytest.mark.parametrize("check_ms", [100, 1])
@on("ranks2")
def test_each_gets_the_result(check_ms: int) -> None:
    """Short waits end between two calls of the core, where another thread may release the request."""
    usual, context._SIGNAL_CHECK_MS = context._SIGNAL_CHECK_MS, check_ms
    mine = torch.arange(4.0).reshape(2, 2) + 10 * hvd.rank()
    calls = {
        "allreduce": (lambda name: hvd.allreduce_async(mine, name=name, op=hvd.Sum), [[10.0, 12.0], [14.0, 16.0]]),
        "in place": (
            lambda name: hvd.allreduce_async_(mine.clone(), name=name, op=hvd.Max),
            [[10.0, 11.0], [12.0, 13.0]],
        ),
        "allgather": (
            lambda name: hvd.allgather_async(mine, name=name),
            [[0.0, 1.0], [2.0, 3.0], [10.0, 11.0], [12.0, 13.0]],
        ),
    }
    try:
        for turn in range(3):
            for what, (call, wanted) in calls.items():
                name = f"{what} {turn % 2}"
                if hvd.rank() == 0:
                    got = _synchronize_in_threads(call(name), 3)
                    assert len(got) >= 3
                else:
                    hvd.barrier()
                    got = [hvd.synchronize(call(name))]
                for result in got:
                    assert isinstance(result, torch.Tensor), result
                    assert result.tolist() == wanted
    finally:
        context._SIGNAL_CHECK_MS = usual


@pytest.mark.parametrize("check_ms", [100, 1])
@on("ranks2")
def test_each_gets_the_error(check_ms: int) -> None:
    usual, context._SIGNAL_CHECK_MS = context._SIGNAL_CHECK_MS, check_ms
    try:
        for turn in range(3):
            if hvd.rank() == 0:
                got = _synchronize_in_threads(hvd.allreduce_async(torch.ones(2), name=f"x{turn}"), 3)
            else:
                hvd.barrier()
                with pytest.raises(hvd.MismatchError):
                    hvd.allreduce(torch.ones(3), name=f"x{turn}")
                got = []
            for error in got:
                assert isinstance(error, hvd.MismatchError), repr(error)
                assert "[2]" in str(error) and "[3]" in str(error)
    finally:
        context._SIGNAL_CHECK_MS = usual
