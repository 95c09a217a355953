"""Waits beside programs that compute sleep, since yields would cost slices of time, and yield again after a while."""

from __future__ import annotations

import threading
import time
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Group, Rank, context_of, wait_for

MS = 1_000_000
SHORT, SLICE, LONG = 10_000, 3 * MS, 12 * MS  # one that takes long is enough by itself


def sleeping_until(
    native: ModuleType, yields: list[tuple[int, int]], begin_until: int = 0, begin_while: int = 0
) -> list[int]:
    """Until when waits sleep, after each yield: of how many ns, at which time."""
    until = native.ffi.new("int64_t[]", len(yields))
    took, now = ([each[i] for each in yields] for i in (0, 1))
    native.lib.shim_contention_note(begin_until, begin_while, took, now, len(yields), until)
    return list(until)


def test_yields_to_ranks_that_wait_change_nothing(native: ModuleType) -> None:
    assert sleeping_until(native, [(SHORT, i * MS) for i in range(1, 100)]) == [0] * 99


def test_a_slice_now_and_then_changes_nothing(native: ModuleType) -> None:
    """A rank has something to compute, or the machine had."""
    assert sleeping_until(native, [(SLICE, i * 30 * MS) for i in range(1, 100)]) == [0] * 99


def test_slices_that_follow_one_another_add_up(native: ModuleType) -> None:
    yields = [(SLICE, 1000 * MS), (SHORT, 1001 * MS), (SLICE, 1010 * MS), (SLICE, 1020 * MS), (SLICE, 1030 * MS)]
    assert sleeping_until(native, yields) == [0, 0, 0, 0, 1130 * MS]


def test_what_is_lost_lets_waits_sleep_each_time_longer(native: ModuleType) -> None:
    now, yields, expected = MS, [], []
    for while_ms in (100, 200, 400, 800, 1000, 1000):
        yields.append((LONG, now))
        now += while_ms * MS
        expected.append(now)
    assert sleeping_until(native, yields) == expected


def test_what_was_long_ago_is_forgotten(native: ModuleType) -> None:
    begin, still, again = (LONG, MS), (SHORT, 200 * MS), (LONG, 201 * MS)
    assert sleeping_until(native, [begin, still, again])[-1] == (201 + 200) * MS
    assert sleeping_until(native, [begin, (SHORT, 201 * MS), (LONG, 202 * MS)])[-1] == (202 + 100) * MS


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(INT64, INT64, st.integers(0, 2**62))
def test_whatever_stands_in_the_hosts_memory_lets_waits_sleep_for_a_second_at_most(
    native: ModuleType, begin_until: int, begin_while: int, now: int
) -> None:
    is_on = native.lib.shim_contention_is_on
    assert is_on(begin_until, now) == (0 < begin_until - now <= 1000 * MS)
    for took in (SHORT, LONG):
        (until,) = sleeping_until(native, [(took, now)], begin_until, begin_while)
        assert until == begin_until or 100 * MS <= until - now <= 1000 * MS
    assert is_on(until, now)


@pytest.mark.parametrize("is_heeded", [True, False])
def test_a_wait_sleeps_where_others_want_the_cores(native: ModuleType, is_heeded: bool) -> None:
    """Else it would spin for twenty seconds."""
    waits = threading.Event()
    before: dict[int, int] = {}

    def note(rank: Rank) -> None:
        native.lib.shim_contention_yielded(context_of(native, rank), LONG)

    def body(rank: Rank) -> int:
        rank.run("barrier", "first", [])
        before[rank.rank] = rank.context.counters()["sleeps"]
        note(rank)
        if rank.rank == 0:
            waits.set()
        else:
            assert waits.wait(60)
            until = time.monotonic() + 0.2

            def is_over() -> bool:
                note(rank)  # it lasts
                slept = group.contexts[0].counters()["sleeps"] > before[0]
                return slept if is_heeded else time.monotonic() > until

            wait_for(is_over)
        rank.run("barrier", "second", [])
        return rank.context.counters()["sleeps"] - before[rank.rank]

    with Group([2], spin_us=20_000_000, sleeps_under_contention=is_heeded) as group:
        sleeps = group.run(body)
    assert (sleeps[0] > 0) == is_heeded
