"""Ranks that share a core beside one that is free: who moves, where to, and that nobody does unasked."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Group, Rank

CORES = sorted(os.sched_getaffinity(0))
ASLEEP = -1


def choose(native: ModuleType, core_of: list[int], me: int, allowed: list[int]) -> int:
    return int(native.lib.shim_core_choose(core_of, len(core_of), me, allowed, len(allowed)))


@pytest.mark.parametrize(
    ("core_of", "me", "allowed", "expected"),
    [
        ([0, 0], 1, [0, 1], 1),
        ([0, 0], 0, [0, 1], -1),  # the last one moves
        ([0, 1], 1, [0, 1], -1),  # nobody is crowded
        ([0, 0], 1, [0], -1),  # nowhere to go
        ([5, 5], 1, [1, 5], 1),  # behind the last comes the first
        ([5, 5], 1, [1, 5, 7], 7),
        ([0, 0, 0, 1], 2, [0, 1], 1),  # three and one become two and two
        ([0, 0, 1], 1, [0, 1], -1),  # two and one would become one and two
        ([0, 0, 0, 1], 1, [0, 1], -1),  # not the last of its core
        ([0, 0, 1, ASLEEP], 1, [0, 1, 2], 2),
        ([0, ASLEEP, ASLEEP], 0, [0, 1], -1),  # who sleeps needs no core
        ([3, 3], 1, [0, 1], 0),  # it may be on a core that it is no longer allowed
        ([1023, 1023], 1, [0, 1023], 0),
    ],
)
def test_the_last_rank_on_a_crowded_core_goes_where_fewer_are(
    native: ModuleType, core_of: list[int], me: int, allowed: list[int], expected: int
) -> None:
    assert choose(native, core_of, me, allowed) == expected


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.sets(st.integers(0, 7), min_size=1))
def test_moving_all_at_once_and_again_ends_with_ranks_spread_evenly(
    native: ModuleType, core_of: list[int], allowed: set[int]
) -> None:
    cores = [core if core in allowed else min(allowed) for core in core_of]
    for _ in range(100):
        moves = [choose(native, cores, me, sorted(allowed)) for me in range(len(cores))]
        if all(move < 0 for move in moves):
            break
        cores = [core if move < 0 else move for core, move in zip(cores, moves, strict=True)]
    crowd = [cores.count(core) for core in allowed]
    assert max(crowd) - min(crowd) <= 1, cores


def together(goes_on: Callable[[Rank], bool], **options: Any) -> list[int]:
    """Two ranks begin on one core, rank 1 may use two, and call while both say so; how often each has moved."""

    def body(rank: Rank) -> int:
        mine = {CORES[0]} if rank.rank == 0 else set(CORES[:2])
        os.sched_setaffinity(0, {CORES[0]})
        os.sched_setaffinity(0, mine)
        both = np.ones(1, np.float32)
        while both[0] > 0:  # both hear of the end in the same operation
            both[0] = goes_on(rank)
            rank.run("allreduce", "x", [both], reduce_op=3)
        assert os.sched_getaffinity(0) == mine
        return rank.context.counters()["moves"]

    with Group([2], spin_us=1000, **options) as group:
        return group.run(body)


@pytest.mark.parametrize(
    ("core_of", "asleep", "expected"),
    [
        ([3, 3], [0, 0], 1),
        ([3, 4, 3], [0, 0, 0], 1),
        ([3, 3], [0, 1], 0),
        ([3, 3], [1, 0], 1),
        ([3, 4], [0, 0], 0),
        ([3], [0], 0),
        ([0, 0], [0, 0], 0),  # ranks do not tell
    ],
)
def test_a_core_is_shared_where_another_rank_is_at_work_on_it(
    native: ModuleType, core_of: list[int], asleep: list[int], expected: int
) -> None:
    assert native.lib.shim_core_is_shared(core_of, asleep, len(core_of)) == expected


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_rank_leaves_the_core_of_another_and_keeps_its_affinity() -> None:
    ends_s = time.monotonic() + 60
    libc = ctypes.CDLL(None)
    arrived = threading.Event()

    def goes_on(rank: Rank) -> bool:
        if rank.rank == 1 and libc.sched_getcpu() == CORES[1]:
            arrived.set()
        return not arrived.is_set() and time.monotonic() < ends_s

    moves = together(goes_on, leaves_crowded_cores=True)
    assert arrived.is_set(), moves
    assert moves[0] == 0
