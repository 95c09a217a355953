"""Process sets that are removed while their last work by NCCL stands behind a GPU that is late."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr, wait_for
from test_teams import Links, hosts_of

ONES = np.ones(5, np.float32)
HOSTS = [(2,), (1, 1), (2, 1)]
NAME = "process set 1 (ranks 0, 1)"
TOLD = (
    f"{NAME} has been removed, and its last work by NCCL, allreduce 'last', has not ended on this rank's GPU, or on "
    "one that it waits for, for"
)


def remove_behind_a_gate(rank: Rank, own: OnGpu, gpu: Gpu, links: Links) -> tuple[ctypes.c_int | None, int]:
    """Adds the set of ranks 0 and 1, which sums once more behind a gate on rank 0's stream, and removes it.

    Returns the gate, on rank 0, and where the sum is to be.
    """
    members = [0, 1]
    team = rank.context.add_team(members, **links.of(rank.rank, members, 0))
    gate, target = None, 0
    if rank.rank in members:
        own.allreduce(ONES, "first", team=team)
        gate = gpu.hold(own.stream) if rank.rank == 0 else None
        handle, _, target = own.submit("allreduce", "last", ONES, team=team, reduce_op=SUM)
        own.finish(handle)
    rank.context.remove_team(team)
    return gate, target


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize(("shutdown_ms", "reports"), [(0, 2), (1500, 7)])
def test_they_are_told_of_and_the_job_goes_on(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], shutdown_ms: int, reports: int
) -> None:
    """Also for longer than a stall may last: nobody waits for them."""
    links = Links(hosts_of(list(hosts)))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        gate, target = remove_behind_a_gate(rank, own, gpu, links)
        for member in range(2):
            told = f"horo [{member}] warning: {TOLD} "
            wait_for(lambda told=told: written().count(told) >= reports)
        assert rank.allreduce(np.ones(3, np.float32), "host").tolist() == [float(sum(hosts))] * 3
        rank.barrier("told")
        if gate is not None:
            gpu.open(gate)
        if rank.rank < 2:
            gpu.synchronize(own.stream)
            assert gpu.get(target, ONES).tolist() == [2.0] * 5
        wait_for(lambda: nccl.counts()["destroys"] == 2)
        rank.barrier("ended")
        own.close()

    with recorded_stderr() as written, Group(hosts, stall_warning_ms=300, stall_shutdown_ms=shutdown_ms) as group:
        group.run(body)
    assert nccl.counts()["aborts"] == 0


def test_looks_at_them_become_rare(gpu: Gpu, nccl: Nccl) -> None:
    """Between two reports of a rank, which come each 300 ms, there are ten looks at most."""
    links = Links(hosts_of([2]))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        gate, _ = remove_behind_a_gate(rank, own, gpu, links)
        if gate is not None:
            wait_for(lambda: written().count(TOLD) >= 12)
            reports = written().count(TOLD)
            looks = nccl.counts()["asked"]
            wait_for(lambda: written().count(TOLD) >= 24)
            looks = nccl.counts()["asked"] - looks
            reports = written().count(TOLD) - reports
            assert looks <= 10 * (reports + 2)
            gpu.open(gate)
        wait_for(lambda: nccl.counts()["destroys"] == 2)
        rank.barrier("ended")
        own.close()

    with recorded_stderr() as written, Group((2,), stall_warning_ms=300) as group:
        group.run(body)


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2]], ids=["set", "all"])
def test_a_rank_that_leaves_tells_which_work_it_ends(gpu: Gpu, nccl: Nccl, members: list[int]) -> None:
    links = Links(hosts_of([3]))
    name = NAME if members == [0, 1] else "all ranks"

    def body(rank: Rank) -> OnGpu:
        own = on_gpu(rank, gpu, nccl)
        team = rank.context.add_team(members, **links.of(rank.rank, members, 0)) if members == [0, 1] else 0
        if rank.rank in members:
            own.allreduce(ONES, "first", team=team)
            if rank.rank == 1:
                nccl.fail("hang", 1)
            rank.barrier("before", team=team)
            own.finish(own.submit("allreduce", "last", ONES, team=team, reduce_op=SUM)[0])
        rank.barrier("called")
        return own

    with recorded_stderr() as written:
        with Group((3,)) as group:
            owners = group.run(body)
        for member in range(3):
            told = (
                f"horo [{member}] warning: leaving, this rank has waited 5 s for NCCL, and ends it: operations of "
                f"{name} up to allreduce 'last' have not ended on this rank's GPU, or on one that it waits for, and "
                "their results are lost"
            )
            assert written().count(told) == (member in members)
    for own in owners:
        gpu.synchronize(own.stream)
        own.close()


@pytest.mark.parametrize("hosts", HOSTS[:2], ids=str)
def test_a_rank_that_leaves_long_before_others_has_lost_nothing(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """The others come to the end of their communicator when they leave."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        assert own.allreduce(ONES, "first").tolist() == [2.0] * 5
        own.close()

    with recorded_stderr() as written:
        with Group(hosts) as group:
            group.run(body)
            group.run(lambda rank: rank.context.destroy(), ranks=[0])
        assert written() == ""
