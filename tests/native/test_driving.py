"""The background thread of a rank that other hosts need leaves the driving to callers, and serves when none come."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ranks import Group, Rank
from test_teams_ends import run_script

from horo import _core

SUM = _core.REDUCE_OPS["sum"]
CALLS, TURNS, LIMIT_S = 20, 15, 30

# Rank 0, whose record brings the result to rank 1, stops when its own call returns, its background thread with it.
STOP = """
import os, signal, sys
import numpy as np
from fabric import close_setup, make_setups
from ranks import Rank
from horo import _core
from horo._core import Context

setups = make_setups([1, 1])
pids = [os.fork()]
if pids[0] != 0:
    pids.append(os.fork())
if 0 not in pids:
    for setup in setups:
        close_setup(setup)
    _, status = os.waitpid(pids[1], 0)
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)
    sys.exit(os.waitstatus_to_exitcode(status))
me = len(pids) - 1
close_setup(setups[1 - me])
rank = Rank(Context(setups[me]))
signal.alarm(20)
for _ in range(20):
    ones = np.ones(4, np.float32)
    rank.run("allreduce", "x", [ones], reduce_op=_core.REDUCE_OPS["sum"])
if me == 0:
    signal.alarm(0)
    os.kill(os.getpid(), signal.SIGSTOP)
os.write(1, b"finished")
os._exit(0)
"""


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("late_s", [0, 0.01], ids=["stream", "long-call"])
def test_others_are_served_when_the_caller_stops_calling(hosts: list[int], late_s: float) -> None:
    """After a stream of calls, or one that lasted so long that the thread no longer looks by itself meanwhile."""
    served = [threading.Event() for _ in range(TURNS)]

    def body(rank: Rank) -> None:
        ones = np.ones(4, np.float32)
        for turn in range(TURNS):
            for _ in range(CALLS):
                ones[:] = 1
                rank.run("allreduce", "stream", [ones], reduce_op=SUM)
                assert np.all(ones == rank.size)
            if rank.rank > 0:
                time.sleep(late_s)
            rank.run("barrier", "last", [])
            # Nobody is woken for this one, and rank 0, which leads the agreement, does not wait for it.
            handle = rank.submit("barrier", "between", [], sync=True)
            if rank.rank == 0:
                assert served[turn].wait(LIMIT_S)
            rank.finish(handle)
            served[turn].set()

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2]])
def test_streams_of_both_kinds_alternate(hosts: list[int]) -> None:
    def body(rank: Rank) -> None:
        for turn in range(TURNS):
            for _ in range(turn % 5):
                rank.run("barrier", "stream", [])
            arrays = [np.full(3, index, np.int64) for index in range(turn % 4)]
            handles = [
                rank.submit("allreduce", f"async {index}", [array], reduce_op=SUM) for index, array in enumerate(arrays)
            ]
            rank.run("barrier", "stream", [])
            for handle in handles:
                rank.finish(handle)
            assert all(np.all(array == index * rank.size) for index, array in enumerate(arrays))

    with Group(hosts) as group:
        group.run(body)


def test_the_thread_sleeps_while_a_call_waits() -> None:
    """It looks after a call that has just begun; then the caller wakes it."""
    late_s = 0.3

    def body(rank: Rank) -> int:
        rank.run("barrier", "first", [])
        before = rank.context.counters()["sleeps"]
        if rank.rank == 1:
            time.sleep(late_s)
        rank.run("barrier", "second", [])
        return rank.context.counters()["sleeps"] - before

    with Group([1, 1]) as group:
        sleeps = group.run(body)
    assert max(sleeps) < 1000 * late_s / 4, sleeps


def test_a_caller_finds_an_idle_leader_ready_to_be_driven() -> None:
    """Nobody is woken for its call: the thread sleeps without holding the driving."""

    def body(rank: Rank) -> list[int]:
        wakes = []
        for _ in range(5):
            rank.barrier()
            time.sleep(0.02)  # until nobody looks any more
            before = rank.context.counters()["wakes"]
            handle = rank.submit("barrier", "alone", [], team=teams[rank.rank], sync=True)
            wakes.append(rank.context.counters()["wakes"] - before)
            rank.finish(handle)
        return wakes

    teams: dict[int, int] = {}

    def add(rank: Rank) -> None:
        teams[rank.rank] = [rank.context.add_team([member]) for member in range(2)][rank.rank]

    with Group([1, 1]) as group:
        group.run(add)
        assert [min(wakes) for wakes in group.run(body)] == [0, 0]  # on a busy machine the thread may still be awake


def test_what_others_wait_for_leaves_before_a_call_returns() -> None:
    for _ in range(5):
        assert run_script(STOP) == "finished"
