"""Ranks that shut horo down while others work: who waits for them is told, what all have agreed on is finished."""

import contextlib
import threading
import time
from collections.abc import Callable

import native_build
import numpy as np
import pytest
from ranks import Group, Rank, wait_for

from horo.core import context as _core
from horo.errors import AbortedError

SUM = _core.REDUCE_OPS["sum"]
ROUNDS = 40 if native_build.FLAVOUR else 100
TOLD_WITHIN_S = 15
GRACE_S = 2
"""LEAVE_GRACE_MS of the core."""
LEAVERS = [(hosts, leaver) for hosts in ([2], [1, 1], [2, 2]) for leaver in range(sum(hosts))]


def total(size: int) -> float:
    return size * (size + 1) / 2


def told(leaver: int) -> str:
    return rf"rank {leaver} \(host\d\) has shut horo down"


def rounds(hosts: list[int], count: int, body: Callable[[Group, Rank, int], None]) -> None:
    """A fresh group each time."""
    for step in range(count):
        try:
            with Group(hosts, log_level=5) as group:
                group.run(lambda rank, group=group, step=step: body(group, rank, step), TOLD_WITHIN_S)
        except BaseException:
            print(f"in round {step}")
            raise


@pytest.mark.parametrize("hosts", [[2], [1, 1], [2, 2], [1, 1, 1, 1]], ids=str)
def test_all_may_leave_at_once_and_what_was_agreed_on_is_finished_everywhere(hosts: list[int]) -> None:
    """The log ends at one place for all: a tensor is reduced on all ranks, or on none."""
    size = sum(hosts)
    start = threading.Barrier(size)
    reduced: dict[int, list[list[float]]] = {}

    def body(group: Group, rank: Rank, step: int) -> None:
        arrays = [np.ones(20_000, np.float32) for _ in range(4)]
        start.wait(20)
        with contextlib.suppress(AbortedError):  # another rank has left already
            for i, array in enumerate(arrays):
                rank.submit("allreduce", f"x{i}", [array], reduce_op=SUM)
        group.leave(rank.rank)
        reduced.setdefault(step, []).append([float(array.max()) for array in arrays])
        assert all(array.min() == array.max() in (1, size) for array in arrays)

    rounds(hosts, min(150, ROUNDS), body)
    assert all(values == outcomes[0] for outcomes in reduced.values() for values in outcomes)


@pytest.mark.parametrize("hosts", [[3], [1, 1, 1], [2, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("submits", [False, True])
def test_waiting_ranks_are_told_of_a_leaver_while_rank_0_computes(hosts: list[int], submits: bool) -> None:
    """Rank 0 does not call horo until the others know."""
    told_all = threading.Event()

    def body(rank: Rank) -> None:
        rank.barrier("start")
        if rank.rank == 0:
            assert told_all.wait(20)
            with pytest.raises(AbortedError, match=told(2)):
                rank.barrier("later")
        elif rank.rank == 1:
            with pytest.raises(AbortedError, match=told(2)):
                rank.barrier("never")
            told_all.set()
        else:
            if submits:
                rank.submit("barrier", "never", [])
            group.leave(2)

    with Group(hosts) as group:
        group.run(body, TOLD_WITHIN_S)


@pytest.mark.parametrize("hosts", [[2], [3], [2, 2]], ids=str)
def test_a_leaver_does_not_wait_for_an_idle_rank_0(hosts: list[int]) -> None:
    """Its leader's program computes, and its thread is parked: the call wakes it, long before the grace is over."""
    took_s = []
    for _ in range(3):
        with Group(hosts) as group:
            group.run(lambda rank: rank.barrier())
            begin_s = time.monotonic()
            group.leave(1)
            took_s.append(time.monotonic() - begin_s)
    assert min(took_s) < GRACE_S


@pytest.mark.parametrize(("hosts", "leaver"), [*LEAVERS, ([1, 2], 2), ([1, 1, 1, 1], 2)], ids=str)
def test_a_batch_that_runs_is_finished_by_a_rank_that_leaves(hosts: list[int], leaver: int) -> None:
    """All have agreed on it, so all get its result; what comes later is aborted."""
    size = sum(hosts)
    count = 1_000_000  # a thousand segments, of which one is awaited
    arrays = [np.full(count, rank + 1, np.float32) for rank in range(size)]

    def body(rank: Rank) -> None:
        own = arrays[rank.rank]
        never = rank.submit("barrier", "never", []) if rank.rank != leaver else 0
        large = rank.submit("allreduce", "large", [own], reduce_op=SUM)
        if rank.rank == leaver:
            wait_for(lambda: own[0] == total(size))
            group.leave(leaver)
        else:
            rank.finish(large)
            with pytest.raises(AbortedError, match=told(leaver)):
                rank.finish(never)
        assert (own == total(size)).all()

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body, TOLD_WITHIN_S)


@pytest.mark.parametrize("leaver", [1, 2, 3])
@pytest.mark.parametrize("submits", [False, True])
def test_all_of_a_tree_of_hosts_are_told_of_a_leaver_in_its_middle(leaver: int, submits: bool) -> None:
    """Host 3 hangs below host 2, so the message of its parent's end must not look like a loss."""
    start = threading.Barrier(4)

    def body(group: Group, rank: Rank, step: int) -> None:
        array = np.full(1000, rank.rank + 1, np.float64)
        assert (rank.allreduce(array, "start") == total(4)).all()
        start.wait(20)
        if rank.rank == leaver:
            if submits:
                rank.submit("barrier", "next", [])
            group.leave(leaver)
            return
        with pytest.raises(AbortedError, match=told(leaver)):
            for i in range(10_000):
                rank.barrier("next" if i == 0 else f"later{i}")

    rounds([1, 1, 1, 1], 50, body)
