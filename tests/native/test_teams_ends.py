"""How teams end with the job: who is needed to the end, and what is left behind."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks, recorded_stderr, run_ranks, run_script, wait_for

from horo.core import context as _core
from horo.errors import AbortedError


@pytest.mark.parametrize("hosts", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_what_all_members_of_a_team_have_begun_is_finished_though_another_rank_has_left(hosts: list[int]) -> None:
    begun = [threading.Event() for _ in range(3)]

    def body(rank: Rank) -> None:
        team = rank.add_team([1, 2])
        if rank.rank == 0:
            assert all(event.wait(60) for event in begun[1:])
            rank.context.destroy()
            return
        array = np.full(4_000_000, rank.rank, np.float32)
        handle = rank.submit("allreduce", "big", [array], reduce_op=_core.REDUCE_OPS["sum"], team=team)
        wait_for(lambda: any(event.event == "begun" and event.name == "big" for event in rank.context.events()))
        begun[rank.rank].set()
        rank.finish(handle)
        assert (array == 3).all()

    run_ranks(body, hosts)


@pytest.mark.parametrize("hosts", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_what_a_member_of_a_team_has_not_begun_ends_when_another_rank_leaves(hosts: list[int]) -> None:
    is_over = threading.Event()

    def body(rank: Rank) -> None:
        team = rank.add_team([1, 2])
        if rank.rank == 0:
            rank.context.destroy()
        elif rank.rank == 2:
            assert is_over.wait(60)
        else:
            with pytest.raises(AbortedError, match=r"^rank 0 \("):
                rank.barrier(team=team)
            is_over.set()

    run_ranks(body, hosts)


def test_a_rank_that_led_a_team_between_hosts_parks_again_once_it_is_gone() -> None:
    """Who makes a synchronous call then drives itself: nobody is woken for it."""

    def body(rank: Rank) -> int:
        alone = [rank.context.add_team([member]) for member in range(4)][rank.rank]
        pair = rank.add_team([1, 3])
        rank.barrier()
        rank.context.remove_team(pair)
        rank.barrier()
        time.sleep(0.1)
        before = rank.context.counters()["wakes"]
        for _ in range(10):
            time.sleep(0.01)  # not in a stream of calls
            rank.run("barrier", "alone", [], team=alone)
        return rank.context.counters()["wakes"] - before

    wakes = run_ranks(body, [2, 2], teams=8)
    assert wakes[1] == wakes[3] == 0, wakes


def test_each_team_has_its_stall_reports() -> None:
    """Under one name, on one host: a report of one team does not stand for another's."""

    seen = threading.Event()

    def reported() -> bool:
        return all(f"rank {late} (host0) has not submitted 'same'" in written() for late in (1, 3))

    def body(rank: Rank) -> None:
        sets = [[0, 1], [2, 3]]
        teams = [rank.context.add_team(ranks) for ranks in sets]
        if rank.rank == 1:
            wait_for(reported)
            seen.set()
        elif rank.rank == 3:
            assert seen.wait(20)
        rank.barrier("same", team=teams[rank.rank // 2])

    with Group([4], stall_warning_ms=300) as group, recorded_stderr() as written:
        group.run(body)
        said = written()
    assert "waiting in process set 1 (ranks 0, 1) for" in said
    assert "waiting in process set 2 (ranks 2, 3) for" in said


FORK = """
import os
from ranks import Group
from ranks import Links

from horo.errors import PeerLostError
from horo.core.context import ffi, lib

group = Group([1, 1])
links = Links([0, 1]).of(0, [0, 1], 0)
fds = [ffi.new("int32_t[]", links[name]) for name in ("control_fds", "data_fds")]
ranks, handle, error = ffi.new("int32_t[]", [0, 1]), ffi.new("int64_t *"), ffi.new("char[1024]")
setup = ffi.new("horo_team_setup *", {"ranks": ranks, "size": 2, "control_fds": fds[0], "data_fds": fds[1]})
context = group.contexts[0]._context
assert lib.horo_add_team(context, setup, handle, error, 1024) == 0  # the other rank never does
if os.fork() == 0:
    before = len(os.listdir("/proc/self/fd"))
    lib.horo_after_fork(context)
    print(before - len(os.listdir("/proc/self/fd")), flush=True)
    os._exit(0)
os.wait()
os._exit(0)
"""


def test_a_forked_child_does_not_keep_the_links_of_a_team_that_is_being_added() -> None:
    world = 2  # a control and a data link
    node = 3  # the arena, the eventfd and that of the thread
    team = 2
    assert int(run_script(FORK)) == world + node + team


@on_ranks([3])
def test_a_result_outlives_its_team(rank: Rank) -> None:
    """Also where another team has its number by then."""
    team = rank.context.add_team([0, 1, 2])
    handle = rank.submit("allgather", "g", [np.full((rank.rank + 1, 2), rank.rank, np.int64)], team=team)
    rank.context.wait(handle)
    rank.context.remove_team(team)
    assert rank.context.add_team([1]) % 256 == team
    data, rows = rank.context.take_result(handle, 0)
    rank.context.release(handle)
    assert rows == [1, 2, 3]
    assert np.frombuffer(data, np.int64).tolist() == [0, 0] + [1] * 4 + [2] * 6
