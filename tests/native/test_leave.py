"""Ranks that shut horo down while others work: who waits for them is told, what all have agreed on is finished."""

import contextlib
import time

import native_build
import numpy as np
import pytest
from ranks import SUM, Group, Rank, on_ranks, wait_for

from horo.errors import AbortedError

ROUNDS = 20 if native_build.FLAVOUR else 100
TOLD_WITHIN_S = 15
GRACE_S = 2
"""LEAVE_GRACE_MS of the core."""
LEAVERS = [(hosts, leaver) for hosts in ([2], [1, 1], [2, 2]) for leaver in range(sum(hosts))]


def total(size: int) -> float:
    return size * (size + 1) / 2


def told(leaver: int) -> str:
    return rf"rank {leaver} \(host\d\) has shut horo down"


@on_ranks([2], [1, 1], [2, 2], [1, 1, 1, 1], times=ROUNDS, within_s=TOLD_WITHIN_S, log_level=5)
def test_all_may_leave_at_once_and_what_was_agreed_on_is_finished_everywhere(rank: Rank) -> None:
    """The log ends at one place for all: a tensor is reduced on all ranks, or on none."""
    arrays = [np.ones(20_000, np.float32) for _ in range(4)]
    rank.meet()
    with contextlib.suppress(AbortedError):  # another rank has left already
        for i, array in enumerate(arrays):
            rank.submit("allreduce", f"x{i}", [array], reduce_op=SUM)
    rank.group.leave(rank.rank)
    assert all(array.min() == array.max() in (1, rank.size) for array in arrays)
    assert rank.is_common("reduced", [float(array.max()) for array in arrays])


@pytest.mark.parametrize("submits", [False, True])
@on_ranks([3], [1, 1, 1], [2, 1], [1, 2], within_s=TOLD_WITHIN_S)
def test_waiting_ranks_are_told_of_a_leaver_while_rank_0_computes(rank: Rank, submits: bool) -> None:
    """Rank 0 does not call horo until the others know."""
    rank.barrier("start")
    if rank.rank == 0:
        rank.await_mark("all know", timeout_s=20)
        with pytest.raises(AbortedError, match=told(2)):
            rank.barrier("later")
    elif rank.rank == 1:
        with pytest.raises(AbortedError, match=told(2)):
            rank.barrier("never")
        rank.mark("all know")
    else:
        if submits:
            rank.submit("barrier", "never", [])
        rank.group.leave(2)


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
@on_ranks("hosts", within_s=TOLD_WITHIN_S, segment_bytes=1 << 12)
def test_a_batch_that_runs_is_finished_by_a_rank_that_leaves(rank: Rank, leaver: int) -> None:
    """All have agreed on it, so all get its result; what comes later is aborted."""
    own = np.full(1_000_000, rank.rank + 1, np.float32)  # a thousand segments, of which one is awaited
    never = rank.submit("barrier", "never", []) if rank.rank != leaver else 0
    large = rank.submit("allreduce", "large", [own], reduce_op=SUM)
    if rank.rank == leaver:
        wait_for(lambda: own[0] == total(rank.size))
        rank.group.leave(leaver)
    else:
        rank.finish(large)
        with pytest.raises(AbortedError, match=told(leaver)):
            rank.finish(never)
    assert (own == total(rank.size)).all()


@pytest.mark.parametrize("leaver", [1, 2, 3])
@pytest.mark.parametrize("submits", [False, True])
@on_ranks([1, 1, 1, 1], times=ROUNDS // 2, within_s=TOLD_WITHIN_S, log_level=5)
def test_all_of_a_tree_of_hosts_are_told_of_a_leaver_in_its_middle(rank: Rank, leaver: int, submits: bool) -> None:
    """Host 3 hangs below host 2, so the message of its parent's end must not look like a loss."""
    array = np.full(1000, rank.rank + 1, np.float64)
    assert (rank.allreduce(array, "start") == total(4)).all()
    rank.meet()
    if rank.rank == leaver:
        if submits:
            rank.submit("barrier", "next", [])
        rank.group.leave(leaver)
        return
    with pytest.raises(AbortedError, match=told(leaver)):
        for i in range(10_000):
            rank.barrier("next" if i == 0 else f"later{i}")
