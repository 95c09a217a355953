"""Records that change what all have: sets of ranks with collectives of their own, and values that rank 0 proposes.

Random proposals, all the time, are a part of stress.py.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fabric import close_setup, make_setups
from native_build import FLAVOUR
from ranks import SUM, Rank, on_ranks, run_ranks, run_script, wait_for

from horo import errors
from horo.core.context import Context
from horo.core.setup import KNOBS


@on_ranks([2], [1, 1])
def test_a_removal_comes_behind_refused_calls_and_is_asked_for_again_behind_the_end(rank: Rank) -> None:
    """The answer is that of every call then, not that the removal is under way."""
    team = rank.add_team([0, 1])
    if rank.rank == 1:
        for _ in range(2):
            with pytest.raises(errors.UnsupportedError):
                rank.allreduce(np.ones(2, np.int32), "odd", "adasum", team=team)
    rank.context.remove_team(team)
    assert (rank.allreduce(np.ones(2, np.float32)) == 2).all()
    team = rank.add_team([0, 1])
    rank.meet()
    if rank.rank == 1:
        rank.group.kill(1)
        return
    for _ in range(2):
        with pytest.raises(errors.PeerLostError):
            rank.context.remove_team(team)
    with pytest.raises(errors.PeerLostError):
        rank.barrier(team=team)


@on_ranks([3], [1, 2], segment_bytes=4096)
def test_numbers_are_used_again_and_nothing_of_the_former_team_is_left(rank: Rank) -> None:
    for step in range(15 if FLAVOUR else 40):
        sets = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
        both = [sets[step % 4], sets[(step // 4 + 1) % 4]]
        teams = [rank.add_team(ranks) for ranks in both]
        assert teams == [1 + step * 256, 2 + step * 256]  # the ids are not
        for former in [team - 256 for team in teams] if step > 0 else []:
            with pytest.raises(errors.UsageError, match=f"'x': process set {former % 256} has been removed"):
                rank.allreduce(np.ones(1, np.float32), "x", team=former)
            with pytest.raises(errors.UsageError, match=f"process set {former % 256} has been removed"):
                rank.context.remove_team(former)
        for team, ranks in zip(teams, both, strict=True):
            if rank.rank not in ranks:
                continue
            for count in (1, 50_000):
                array = rank.allreduce(np.full(count, rank.rank + step), f"r{count}", team=team)
                assert (array == sum(ranks) + len(ranks) * step).all()
            gathered, _ = rank.allgather(np.full(ranks.index(rank.rank) + step % 2, rank.rank), team=team)
            assert gathered.tolist() == [r for i, r in enumerate(ranks) for _ in range(i + step % 2)]
        for team in teams:
            rank.context.remove_team(team)


@on_ranks([2], segment_bytes=4096, teams=64)
def test_there_are_at_most_64_teams(rank: Rank) -> None:
    teams = [rank.context.add_team([i % 2]) for i in range(63)]
    assert teams == list(range(1, 64))
    with pytest.raises(errors.ResourceError, match="there are 64 process sets already"):
        rank.context.add_team([0, 1])
    rank.context.remove_team(17)
    assert rank.context.add_team([0, 1]) == 17 + 256
    rank.allreduce(np.ones(4, np.float32), team=17 + 256)


BAD = [
    ([], "a process set of 0 ranks is impossible"),
    ([0, 1, 2], "a process set of 3 ranks is impossible in a job of 2"),
    ([1, 0], "must be ascending"),
    ([0, 0], "must be ascending"),
    ([0, 7], "from 0 to 1"),
    ([-1, 0], "from 0 to 1"),
]


@on_ranks([2])
def test_impossible_teams_are_refused_and_ranks_that_ask_for_different_ones_go_on(rank: Rank) -> None:
    for ranks, text in BAD:
        with pytest.raises(errors.UsageError, match=text):
            rank.context.add_team(ranks)
    with pytest.raises(errors.MismatchError, match=r"rank 0 .* calls add_process_set for .* \[0, 1\], rank 1 .*\[1\]"):
        rank.context.add_team([1] if rank.rank == 1 else [0, 1])
    first, second = rank.context.add_team([0, 1]), rank.context.add_team([0, 1])
    assert (first, second) == (1, 2)
    with pytest.raises(errors.MismatchError, match=r"calls remove_process_set for process set 1, rank 1 .* set 2;"):
        rank.context.remove_team(second if rank.rank == 1 else first)
    with pytest.raises(errors.MismatchError, match=r"0 .* remove_process_set for process set 1, rank 1 .* add_pr"):
        rank.context.remove_team(first) if rank.rank == 0 else rank.context.add_team([0, 1])
    for team in (0, first, second):
        assert (rank.allreduce(np.ones(5, np.float32), team=team) == 2).all()
    rank.context.remove_team(first)
    with pytest.raises(errors.UsageError, match="process set 1 has been removed"):
        rank.allreduce(np.ones(5, np.float32), team=first)


@on_ranks([3])
def test_what_a_team_cannot_do_is_refused(rank: Rank) -> None:
    team = rank.context.add_team([1, 2])
    if rank.rank == 0:
        with pytest.raises(errors.UsageError, match="rank 0 is no member of process set 1"):
            rank.barrier(team=team)
    else:
        with pytest.raises(errors.UsageError, match=r"root rank 0 is no member of process set 1 \(ranks 1, 2\)"):
            rank.broadcast(np.ones(1, np.float32), 0, team=team)
    for unknown in (-1, 5, 64, 10**6):
        with pytest.raises(errors.UsageError, match=f"process set {unknown} does not exist"):
            rank.barrier(team=unknown)
    for unknown in (-1, 5, 64):
        with pytest.raises(errors.UsageError, match="does not exist"):
            rank.context.remove_team(unknown)
    with pytest.raises(errors.UsageError, match="process set 0 has all ranks"):
        rank.context.remove_team(0)


@on_ranks([1, 1])
def test_a_missing_link_is_named(rank: Rank) -> None:
    with pytest.raises(errors.UsageError, match="was given no connection for agreement to host"):
        rank.context.add_team([0, 1], control_fds=[-1, -1], data_fds=[-1, -1])
    with pytest.raises(errors.UsageError, match="are on 2 hosts, but no connections between them were given"):
        rank.context.add_team([0, 1])


@pytest.mark.parametrize("leaving", [0, 1, 2])
@on_ranks([3], [1, 2], [2, 1], [1, 1, 1])
def test_a_shutdown_ends_what_waits_in_any_team(rank: Rank, leaving: int) -> None:
    """Also in teams that the rank that leaves is no member of, whose leader has nothing to do."""
    others = [rank for rank in range(3) if rank != leaving]
    rank.context.remove_team(rank.add_team(others))
    pair = rank.add_team(others)
    three = rank.add_team([0, 1, 2])
    ones = np.ones(10, np.float32)
    handle = rank.submit("allreduce", "x", [ones], reduce_op=1, team=pair) if rank.rank == others[1] else None
    rank.allreduce(np.ones(10, np.float32), team=three)
    if rank.rank == leaving:
        rank.group.leave(leaving)
    elif handle is not None:
        expected = rf"rank {leaving} .* has shut horo down; pending here: 'x' \(process set 1\)$"
        with pytest.raises(errors.AbortedError, match=expected):
            rank.finish(handle)
    else:
        wait_for(lambda: isinstance(rank.context.health(), errors.GroupError))


@on_ranks([2])
def test_a_context_that_goes_while_a_team_is_being_added_ends_in_order(rank: Rank) -> None:
    if rank.rank == 0:
        rank.barrier()
        rank.group.leave(0)
        return
    with ThreadPoolExecutor() as pool:
        adding = pool.submit(rank.context.add_team, [0, 1])
        wait_for(adding.running)
        rank.barrier()
        with pytest.raises(errors.AbortedError):
            adding.result(30)


@on_ranks([3], [1, 2], [1, 1, 1])
def test_what_all_members_of_a_team_have_begun_is_finished_though_another_rank_has_left(rank: Rank) -> None:
    team = rank.add_team([1, 2])
    if rank.rank == 0:
        rank.await_mark(1, 2)
        rank.context.destroy()
        return
    array = np.full(4_000_000, rank.rank, np.float32)
    handle = rank.submit("allreduce", "big", [array], reduce_op=SUM, team=team)
    wait_for(lambda: any(event.event == "begun" and event.name == "big" for event in rank.context.events()))
    rank.mark(rank.rank)
    rank.finish(handle)
    assert (array == 3).all()


@on_ranks([2, 2], teams=8)
def test_a_rank_that_led_a_team_between_hosts_parks_again_once_it_is_gone(rank: Rank) -> None:
    """Who makes a synchronous call then drives itself: nobody is woken for it."""
    alone = [rank.context.add_team([member]) for member in range(4)][rank.rank]
    pair = rank.add_team([1, 3])
    rank.barrier()
    rank.context.remove_team(pair)
    rank.barrier()
    for _ in range(10):  # on a busy machine a thread may come to rest only in a later round
        before = rank.context.counters()["wakes"]
        for _ in range(10):
            time.sleep(0.01)  # not in a stream of calls
            rank.run("barrier", "alone", [], team=alone)
        if (wakes := rank.context.counters()["wakes"] - before) == 0:
            break
    assert rank.rank in {0, 2} or wakes == 0


FORK = """
from ranks import Group, Links
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
    assert int(run_script(FORK)) == 7  # two links of the world, two of the team; the arena, its and a thread's eventfd


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


SLOT = 1 << 16
FIRST = {"sockets": 1, "segment": 1 << 14, "cycle": 200, "overlap": 2}
TUNED: dict[str, Any] = {"segment_bytes": SLOT, "sockets_per_peer": 4, "tuned": FIRST}
"""Options of a group on several hosts whose values may change."""


@on_ranks([2, 1], **TUNED)
def test_final_values_are_those_of_all_ranks_and_of_process_sets(rank: Rank) -> None:
    """Of one that exists by then, and of one that is made later; both go on working."""
    last = {"segment": 4096, "piece": 8192, "sockets": 2, "fusion": 0, "doubling": 1024, "carried": 0}
    last |= {"cycle": 0, "overlap": 1}
    teams = [rank.add_team([1, 2])]

    def check() -> None:
        for team in teams if rank.rank > 0 else ():
            assert set(rank.allreduce(np.full(50_000, rank.rank, np.float32), "t", team=team)) == {3}

    values, is_final = rank.context.tuning()
    assert not is_final
    assert {knob: values[knob] for knob in FIRST} == FIRST
    check()
    if rank.rank == 0:
        rank.context.propose_tuning(dict(last, sockets=1))  # never in force: another follows before a batch
        rank.context.propose_tuning(last, is_final=True)
    rank.barrier()
    assert rank.context.tuning() == (last, True)
    teams.append(rank.add_team([1, 2]))
    for _ in range(5):
        check()
    rank.barrier()


@on_ranks([2])
def test_without_first_values_nothing_changes(rank: Rank) -> None:
    with pytest.raises(errors.UsageError, match="by rank 0, in a job that has begun with some"):
        rank.context.propose_tuning(dict.fromkeys(KNOBS, 1))
    assert rank.context.tuning() == (dict.fromkeys(KNOBS, 0), False)


IMPOSSIBLE = [{"segment": 1 << 20}, {"segment": 5000}, {"sockets": 2}, {"overlap": 3}, {"carried": 1 << 15}]


@pytest.mark.parametrize("wrong", IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused(wrong: dict[str, int]) -> None:
    (setup,) = make_setups([1], segment_bytes=SLOT, tuned=wrong)
    with pytest.raises(errors.UsageError, match="values that this job cannot have"):
        Context(setup)
    close_setup(setup)

    def body(rank: Rank) -> None:
        before = rank.context.tuning()
        with pytest.raises(errors.UsageError, match="none that this job can have" if rank.rank == 0 else "by rank 0"):
            rank.context.propose_tuning({**before[0], **wrong})
        rank.barrier()
        assert rank.context.tuning() == before

    run_ranks(body, [2], segment_bytes=SLOT, tuned={})
