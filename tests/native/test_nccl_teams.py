"""NCCL in process sets that overlap: launches of all of them come in one order on all ranks, and communicators go."""

import random
import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu, on_gpu
from ranks import SUM, Rank, Written, on_ranks, run_ranks, wait_for

from horo.errors import GroupError, StalledError

ONES = np.ones(5, np.float32)
HOSTS = ([3], [2, 1], [1, 1, 1])
SETS = ([0, 1], [1, 2], [0, 2])


def add_teams(own: OnGpu, sets: Sequence[list[int]] = SETS) -> list[int]:
    return [own.add_team(ranks) for ranks in sets]


def begin(own: OnGpu, name: str, team: int = 0, array: np.ndarray = ONES) -> tuple[int, int]:
    handle, source, _ = own.submit("allreduce", name, array, reduce_op=SUM, team=team)
    return handle, source


def teams_of(rank: Rank, teams: Sequence[int], sets: Sequence[list[int]] = SETS) -> list[tuple[int, int]]:
    """Those of a rank, with the number of members, and the world."""
    size = len({member for ranks in sets for member in ranks})
    return [(0, size), *[(team, len(ranks)) for team, ranks in zip(teams, sets, strict=True) if rank.rank in ranks]]


@pytest.mark.parametrize("seed", range(6))
@on_ranks(*HOSTS)
def test_launches_of_all_teams_come_in_one_order(rank: Rank, gpu: Gpu, nccl: Nccl, seed: int) -> None:
    """Ranks submit to the world and to sets that overlap in a circle, each in an order of its own."""
    own = on_gpu(rank, gpu, nccl)
    mine = teams_of(rank, add_teams(own))
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
    rank.meet()
    assert nccl.counts()["launched"] == 8 * 3 * (3 + 3 * 2)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_the_communicator_of_a_set_that_is_removed_ends_in_order(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """Its kernels are still to run; nobody waits for that, and a set of the same number has one of its own."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for step in range(4):
            teams = add_teams(own)
            mine = teams_of(rank, teams)
            gate = gpu.hold_stream(own.stream)
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

    run_ranks(body, hosts)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (4 * 6 + 3, 0)


CALLS = 900
"""The program's own stream has room for as many marks; NCCL's has not for what they take."""


def await_still(own: OnGpu) -> None:
    """Until the calls that have been launched have not become more for 40 looks."""
    seen = [(-1, 0)]

    def look() -> bool:
        now = own.context.counters()["batches"]
        seen.append((now, seen[-1][1] + 1 if now == seen[-1][0] else 0))
        return seen[-1][1] >= 40

    wait_for(look)


@pytest.mark.parametrize(("late", "cycle_time_us"), [(0, 0), (1, 50_000)])
@on_ranks((2, 1), "cycle_time_us")
def test_what_is_pending_on_a_gpu_that_is_late_has_a_bound(rank: Rank, gpu: Gpu, nccl: Nccl, late: int) -> None:
    """In many small batches or few large ones; no thread of horo's waits in the driver for a stream that is full."""
    own = on_gpu(rank, gpu, nccl)
    mine = teams_of(rank, add_teams(own))
    for team, _ in mine:
        own.allreduce(ONES, "first", team=team)
    gate = gpu.hold_stream(own.stream) if rank.rank == late else None
    order = mine if rank.rank else mine[::-1]
    begun = [(*begin(own, f"x{n}", team), size) for n in range(CALLS // 3) for team, size in order]
    there = np.ones(3, np.float32)
    behind = rank.submit("allreduce", "host", [there], reduce_op=SUM)
    await_still(own)
    if gate is not None:
        gpu.open(gate)
    rank.finish(behind)
    assert there.tolist() == [3.0] * 3
    for handle, _, _ in begun:
        own.finish(handle)
    gpu.synchronize(own.stream)
    for _, source, size in begun:
        assert gpu.get(source, ONES).tolist() == [size] * 5
    own.close()
    rank.meet()
    assert gpu.waits() == 0


@on_ranks((2,), (1, 1), stall_warning_ms=500, stall_shutdown_ms=1000)
def test_a_stall_for_lack_of_room_blames_no_other_rank(rank: Rank, gpu: Gpu, nccl: Nccl, written: Written) -> None:
    own = on_gpu(rank, gpu, nccl)
    own.allreduce(ONES, "first")
    rank.barrier()
    gate = gpu.hold_stream(own.stream) if rank.rank == 0 else None
    begun: list[int] = []
    with pytest.raises(StalledError) as caught:
        for n in range(CALLS):  # which on a busy machine takes longer than the stall
            begun.append(begin(own, f"x{n}")[0])
        own.context.wait(begun[-1])
    assert not re.search(r"rank [01] \(", str(caught.value)), str(caught.value)
    if gate is not None:
        gpu.open(gate)
    for handle in begun:
        with suppress(GroupError):
            own.context.wait(handle)
        own.context.release(handle)
    gpu.synchronize(own.stream)
    own.close()
    rank.meet()
    assert "waiting for its own GPU in the middle of an operation" in written()
