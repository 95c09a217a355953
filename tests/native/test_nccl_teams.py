"""NCCL in process sets that overlap: launches of all of them come in one order on all ranks, and communicators go."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr, wait_for
from test_teams import Links, hosts_of

from horo.core import context
from horo.errors import HoroError, MismatchError, PeerLostError, StalledError, UsageError

ONES = np.ones(5, np.float32)
HOSTS = ([3], [2, 1], [1, 1, 1])
SETS = ([0, 1], [1, 2], [0, 2])


def add_teams(own: OnGpu, links: Links, sets: Sequence[list[int]] = SETS, key: object = 0) -> list[int]:
    return [own.add_team(ranks, **links.of(own.rank.rank, ranks, (key, i))) for i, ranks in enumerate(sets)]


def begin(own: OnGpu, name: str, team: int = 0, array: np.ndarray = ONES) -> tuple[int, int]:
    handle, source, _ = own.submit("allreduce", name, array, reduce_op=SUM, team=team)
    return handle, source


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_process_set_has_a_communicator_of_its_own(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        (team,) = add_teams(own, links, [[1, 2]])
        if rank.rank > 0:
            mine = np.full((2, 3), rank.rank, np.float32)
            assert own.run("allreduce", "x", mine, reduce_op=context.REDUCE_OPS["average"], team=team)[0, 0] == 1.5
            assert own.run("broadcast", "b", mine, root_rank=2, team=team)[0, 0] == 2
        assert own.allreduce(ONES).tolist() == [3.0] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] == 2 * 2 + 3
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (5, 0)
    assert gpu.counts()["pinned_ever"] == 0


def teams_of(rank: Rank, teams: Sequence[int], sets: Sequence[list[int]] = SETS) -> list[tuple[int, int]]:
    """Those of a rank, with the number of members, and the world."""
    size = len({member for ranks in sets for member in ranks})
    return [(0, size), *[(team, len(ranks)) for team, ranks in zip(teams, sets, strict=True) if rank.rank in ranks]]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_launches_of_all_teams_come_in_one_order(gpu: Gpu, nccl: Nccl, hosts: list[int], seed: int) -> None:
    """Ranks submit to the world and to sets that overlap in a circle, each in an order of its own."""
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = teams_of(rank, add_teams(own, links))
        chance = random.Random(100 * seed + rank.rank)
        for step in range(8):
            calls = [(team, size, f"{step}:{i}") for team, size in mine for i in range(3)]
            chance.shuffle(calls)
            begun = [(*begin(own, name, team, ONES * (team + 1)), size * (team + 1)) for team, size, name in calls]
            chance.shuffle(begun)
            for handle, source, total in begun:
                own.finish(handle)
                gpu.synchronize(own.stream)
                assert gpu.get(source, ONES).tolist() == [total] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] == 8 * 3 * (3 + 3 * 2)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_launches_come_in_one_order_where_gpus_stand_still(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """All calls are over before a kernel has run: the values of each rank wait for another call's gate."""
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = teams_of(rank, add_teams(own, links))
        for team, _ in mine:
            own.finish(begin(own, "first", team)[0])
        gpu.synchronize(own.stream)
        gate = gpu.hold(own.stream)
        order = mine[rank.rank :] + mine[: rank.rank]
        begun = [(*begin(own, f"{i}", team), size) for i in range(5) for team, size in order]
        for handle, _, _ in reversed(begun):
            own.finish(handle)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        for _, source, size in begun:
            assert gpu.get(source, ONES).tolist() == [size] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("count", [1, 3])
def test_a_wait_that_spins_asks_seldom_how_kernels_are(gpu: Gpu, nccl: Nccl, count: int) -> None:
    """Kernels of sets are in flight, of which nobody waits for the end."""
    links = Links([0, 0])
    asked: list[tuple[int, float]] = []

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        teams = add_teams(own, links, [[0, 1]] * count)
        gate = gpu.hold(own.stream)
        for team in teams:
            own.finish(begin(own, "x", team)[0])
        rank.barrier()
        before, begin_s = nccl.counts()["asked"], time.monotonic()
        for _ in range(300):
            rank.barrier()
        asked.append((nccl.counts()["asked"] - before, time.monotonic() - begin_s))
        rank.barrier()
        gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()

    with Group((2,)) as group:
        group.run(body)
    for number, seconds in asked:
        assert number <= 2 * count * (seconds * 1000 + 2)


# ---- Calls that fail ----


def refuse(own: OnGpu, name: str, team: int = 0) -> None:
    with pytest.raises(UsageError, match=f"broadcast '{name}': .*root rank 7 (does not exist|is no member)"):
        own.submit("broadcast", name, ONES, root_rank=7, team=team)


def fails(own: OnGpu, handle: int, error: type[HoroError], match: str) -> None:
    with pytest.raises(error, match=match):
        own.context.wait(handle)
    own.context.release(handle)


@pytest.mark.parametrize("hosts", ([2], [1, 1], [3], [2, 1]), ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_first_calls_of_all_teams_of_which_many_fail(gpu: Gpu, nccl: Nccl, hosts: list[int], seed: int) -> None:
    """Each rank has an order of its own. What is right on all is done; what one rank refuses, or has in host memory
    alone, fails on all; then the sets go and come again."""
    links = Links(hosts_of(hosts))
    size = sum(hosts)
    common = random.Random(seed)
    sets = [[0, 1], list(range(size)), [0, size - 1]]
    plans = [
        [(team, f"{epoch}:{i}", common.choice(["ok", "ok", "refused", "host", "all host", "rows"]), common.random())
         for team in range(-1, 3) for i in range(common.randrange(5))]
        for epoch in range(4)
    ]  # fmt: skip

    def call(own: OnGpu, entry: tuple[int, str, str, float], team: int, members: list[int]) -> object:
        _, name, kind, chosen = entry
        odd = members[int(chosen * len(members))] == own.rank.rank
        if kind == "refused":
            return refuse(own, name, team) if odd else (begin(own, name, team)[0], None)
        if kind == "rows":
            return own.submit("allgather", name, ONES, team=team)[0], "rows"
        if kind == "all host" or (kind == "host" and odd):
            array = ONES.copy()
            return own.rank.submit("allreduce", name, [array], reduce_op=SUM, team=team), array
        return begin(own, name, team)

    def finish(own: OnGpu, kind: str, members: list[int], result: object) -> None:
        if result is None:
            return
        handle, value = result  # type: ignore[misc]
        if kind in ("refused", "host") and not (kind == "host" and len(members) == 1):
            fails(own, handle, UsageError if kind == "refused" else MismatchError, "has refused it|sent it")
        elif kind == "rows":
            assert own.gathered(handle, ONES).tolist() == [1.0] * 5 * len(members)
        elif isinstance(value, np.ndarray):
            own.rank.finish(handle)
            assert value.tolist() == [len(members)] * 5
        else:
            own.finish(handle)
            gpu.synchronize(own.stream)
            assert gpu.get(value, ONES).tolist() == [len(members)] * 5

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        chance = random.Random(100 * seed + rank.rank)
        for epoch, plan in enumerate(plans):
            teams = add_teams(own, links, sets, epoch)
            members = {-1: (0, list(range(size))), **{i: (teams[i], sets[i]) for i in range(3)}}
            mine = [entry for entry in plan if rank.rank in members[entry[0]][1]]
            chance.shuffle(mine)
            begun = [(entry[2], members[entry[0]][1], call(own, entry, *members[entry[0]])) for entry in mine]
            chance.shuffle(begun)
            for kind, ranks, result in begun:
                finish(own, kind, ranks, result)
            rank.barrier(f"end {epoch}")
            for team in teams:
                rank.context.remove_team(team)
        own.close()

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)


# ---- Their end ----


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_the_communicator_of_a_set_that_is_removed_ends_in_order(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """Its kernels are still to run; nobody waits for that, and a set of the same number has one of its own."""
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for step in range(4):
            teams = add_teams(own, links, key=step)
            mine = teams_of(rank, teams)
            gate = gpu.hold(own.stream)
            begun = [(*begin(own, "x", team), size) for team, size in mine]
            for handle, _, _ in begun:
                own.finish(handle)
            for team in teams:
                rank.context.remove_team(team)
            gpu.open(gate)
            gpu.synchronize(own.stream)
            for _, source, size in begun:
                assert gpu.get(source, ONES).tolist() == [size] * 5
            if step % 2 == 0:
                wait_for(lambda step=step: nccl.counts()["destroys"] >= 6 * (step + 1))
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (4 * 6 + 3, 0)


def ends(gpu: Gpu, nccl: Nccl, hosts: Sequence[int], until: Any) -> None:
    """Rank 2 dies when all have come to the end of ``until``."""
    links = Links(hosts_of(hosts))
    there = threading.Barrier(3)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = teams_of(rank, add_teams(own, links))
        handles = until(rank, own, mine)
        there.wait(60)
        if rank.rank == 2:
            group.kill(2, links.sockets_of(2))
            own.context.end("its death")
        gpu.synchronize(own.stream)
        for handle in handles:
            with pytest.raises(PeerLostError):
                own.context.wait(handle)
            own.context.release(handle)
        with pytest.raises(PeerLostError, match="gone|this rank" if rank.rank == 2 else "^rank 2 "):
            own.allreduce(ONES, "later")
        own.close()

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["destroys"] == 0


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_rank_dies_while_kernels_of_all_teams_run(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    def until(rank: Rank, own: OnGpu, mine: list[tuple[int, int]]) -> list[int]:
        for team, _ in mine:
            own.finish(begin(own, "first", team)[0])
        gpu.synchronize(own.stream)
        if rank.rank == 2:
            nccl.fail("hang", 2)  # as a rank of the world; its kernels of other teams stand behind or before
        for handle in [begin(own, f"{i}", team)[0] for i in range(3) for team, _ in mine]:
            own.finish(handle)
        return []

    ends(gpu, nccl, hosts, until)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_rank_dies_while_a_launch_does_not_end(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    def until(rank: Rank, own: OnGpu, mine: list[tuple[int, int]]) -> list[int]:
        for team, _ in mine:
            own.finish(begin(own, "first", team)[0])
        rank.barrier()
        nccl.fail("late launch", rank.rank)
        rank.barrier()
        return [begin(own, "x")[0]]

    ends(gpu, nccl, hosts, until)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_rank_dies_before_it_proposes_a_turn(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """Rank 1 has launched the first call and waits for a proposal; rank 2 never launches the first."""

    def until(rank: Rank, own: OnGpu, mine: list[tuple[int, int]]) -> list[int]:
        if rank.rank == 0:
            return []
        (team,) = (team for team, size in mine if size == 2 and team == 2)
        own.finish(begin(own, "first", team)[0])
        if rank.rank == 2:
            nccl.fail("late launch", 1)
            return [begin(own, name, team)[0] for name in "ab"]
        own.finish(begin(own, "a", team)[0])
        return [begin(own, "b", team)[0]]

    ends(gpu, nccl, hosts, until)


@pytest.mark.parametrize("place", ["call", "end"])
def test_a_failure_names_the_set_whose_communicator_it_is(gpu: Gpu, nccl: Nccl, place: str) -> None:
    """The end of one comes when its set has been removed already."""
    links = Links([0, 0])
    function = {"call": "ncclAllReduce", "end": "ncclCommFinalize"}[place]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        (team,) = add_teams(own, links, [[0, 1]])
        assert own.allreduce(ONES, team=team).tolist() == [2.0] * 5
        rank.barrier()
        if rank.rank == 1:
            nccl.fail(place, 1)
        rank.barrier()
        words = rf"a failure of NCCL for process set 1 \(ranks 0, 1\): {function} failed with code 2"
        with pytest.raises(PeerLostError, match=words):
            if place == "end":
                rank.context.remove_team(team)
            for _ in range(1_000_000):
                rank.barrier() if place == "end" else own.allreduce(ONES, team=team)
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)


def leave_behind_gates(gpu: Gpu, body: Callable[[Rank], tuple[OnGpu, ctypes.c_int | None]]) -> None:
    """Two ranks leave; ``body`` returns what stands on their GPUs meanwhile."""
    with Group((2,)) as group:
        owners = group.run(body)
    for own, gate in owners:
        if gate is not None:
            gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()


def test_what_does_not_end_while_its_rank_leaves_is_aborted_at_once(gpu: Gpu, nccl: Nccl) -> None:
    """A kernel of all ranks stands behind one of a set, which waits for a GPU that stands still."""
    links = Links([0, 0])

    def body(rank: Rank) -> tuple[OnGpu, ctypes.c_int | None]:
        own = on_gpu(rank, gpu, nccl)
        (team,) = add_teams(own, links, [[0, 1]])
        for each in (0, team):
            own.finish(begin(own, "first", each)[0])
        gpu.synchronize(own.stream)
        gate = gpu.hold(own.stream) if rank.rank == 0 else None
        for each in (team, 0):
            own.finish(begin(own, "x", each)[0])
        return own, gate

    leave_behind_gates(gpu, body)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (0, 4)


def test_kernels_of_a_set_that_is_gone_stay_while_its_gpu_stands_still(gpu: Gpu, nccl: Nccl) -> None:
    links = Links([0, 0])

    def body(rank: Rank) -> tuple[OnGpu, ctypes.c_int | None]:
        own = on_gpu(rank, gpu, nccl)
        (team,) = add_teams(own, links, [[0, 1]])
        own.finish(begin(own, "first", team)[0])
        gpu.synchronize(own.stream)
        gate = gpu.hold(own.stream) if rank.rank == 0 else None
        own.finish(begin(own, "x", team)[0])
        rank.context.remove_team(team)
        return own, gate

    leave_behind_gates(gpu, body)


@pytest.mark.parametrize("hosts", [[1, 1, 1], [3]], ids=str)
def test_nobody_is_blamed_for_a_turn_that_other_ranks_hold_up(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """A launch on rank 2 does not end. So ranks 0 and 1 cannot launch in their set, and neither waits for the other."""
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        (team,) = add_teams(own, links, [[0, 1]])
        mine = [0] if rank.rank == 2 else [0, team]
        for each in mine:
            own.finish(begin(own, "first", each)[0])
        rank.barrier()
        if rank.rank == 2:
            nccl.fail("late launch", 2)
        handles = [begin(own, "a")[0]]
        if rank.rank < 2:
            own.finish(handles.pop())
        handles.append(begin(own, "b")[0])
        if rank.rank < 2:
            wait_for(lambda: any(event.event == "begun" and event.name == "b" for event in own.context.events()))
            handles.append(begin(own, "c", team)[0])
        for handle in handles:
            with pytest.raises(StalledError, match=r"^(a|this) rank has not submitted what others wait for"):
                own.context.wait(handle)
            own.context.release(handle)
        own.close()

    with recorded_stderr() as text, Group(hosts, stall_warning_ms=200, stall_shutdown_ms=600) as group:
        group.run(body)
        assert "waiting in process set" not in text()
