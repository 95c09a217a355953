"""The background thread stays awake between requests that follow one another closely, and only then."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
from ranks import Group, Rank, context_of

from horo import _core

FOREVER_US = 20_000_000
SUM = _core.REDUCE_OPS["sum"]


def submit_and_poll(rank: Rank) -> None:
    """An allreduce that the background thread drives, since nobody waits for it."""
    array = np.ones(4, np.float32)
    handle = rank.submit("allreduce", "x", [array], reduce_op=SUM)
    end = time.monotonic() + 20
    while not rank.context.poll(handle):
        assert time.monotonic() < end
    rank.finish(handle)
    assert np.all(array == rank.size)


def wakes(rank: Rank) -> int:
    return rank.context.counters()["wakes"]


def submit_until_woken(rank: Rank, times: int, before_each: Callable[[], object] = lambda: None) -> None:
    """Ends when the thread has been found parked so often."""
    before, end = wakes(rank), time.monotonic() + 20
    while wakes(rank) < before + times:
        assert time.monotonic() < end
        before_each()
        submit_and_poll(rank)


def test_a_stream_of_requests_wakes_the_thread_once() -> None:
    def body(rank: Rank) -> None:
        submit_until_woken(rank, 1)
        before = wakes(rank)
        for _ in range(50):
            submit_and_poll(rank)
        assert wakes(rank) == before

    with Group([1], spin_us=FOREVER_US, sleeps_under_contention=False) as group:
        group.run(body)


def test_a_caller_that_waits_drives_while_the_thread_lingers() -> None:
    def body(rank: Rank) -> None:
        submit_until_woken(rank, 1)
        before = wakes(rank)
        for _ in range(50):
            array = np.ones(4, np.float32)
            rank.run("allreduce", "y", [array], reduce_op=SUM)
            assert np.all(array == rank.size)
            submit_and_poll(rank)
        assert wakes(rank) == before

    with Group([1], spin_us=FOREVER_US, sleeps_under_contention=False) as group:
        group.run(body)


def test_without_spinning_the_thread_parks_every_time() -> None:
    with Group([1], spin_us=0) as group:
        group.run(lambda rank: submit_until_woken(rank, 20))


def test_where_other_programs_want_the_cores_the_thread_parks_every_time(native: ModuleType) -> None:
    """A yield of one that lingers would give them a slice of time, in which no request is looked at."""
    slices_ns = 12_000_000

    def body(rank: Rank) -> None:
        context = context_of(native, rank)
        submit_until_woken(rank, 20, lambda: native.lib.shim_contention_yielded(context, slices_ns))

    with Group([1], spin_us=FOREVER_US) as group:
        group.run(body)


def test_the_thread_parks_beside_a_stream_of_calls_that_drive() -> None:
    """Lingering ends when its time is over, whoever drives meanwhile; then the next request has to wake the thread."""
    thread_spin_s = 0.001

    def wakes_after_calls(rank: Rank, seconds: float) -> int:
        submit_and_poll(rank)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            rank.run("barrier", "y", [])
        before = wakes(rank)
        submit_and_poll(rank)
        return wakes(rank) - before

    def body(rank: Rank) -> None:
        for _ in range(5):
            submit_until_woken(rank, 1)
            # On a busy machine it takes the thread a while to come to its end.
            assert any(wakes_after_calls(rank, factor * 50 * thread_spin_s) == 1 for factor in (1, 2, 4, 8, 16, 32))

    with Group([1], spin_us=round(20 * thread_spin_s * 1e6)) as group:
        group.run(body)
