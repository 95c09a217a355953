"""Process sets that are removed while their last work by NCCL stands behind a GPU that is late."""

from __future__ import annotations

import time

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr, wait_for
from test_teams import Links, hosts_of

ONES = np.ones(5, np.float32)
HOSTS = [(2,), (1, 1), (2, 1)]
NAME = "process set 1 (ranks 0, 1)"


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_job_goes_on_while_its_work_has_not_ended(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """Also for longer than a stall may last: nobody waits for it."""
    links = Links(hosts_of(list(hosts)))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        members = [0, 1]
        team = own.add_team(members, **links.of(rank.rank, members, 0))
        gate = gpu.hold(own.stream) if rank.rank == 0 else None
        target = 0
        if rank.rank in members:
            handle, _, target = own.submit("allreduce", "last", ONES, team=team, reduce_op=SUM)
            own.finish(handle)
        rank.context.remove_team(team)
        until_s = time.monotonic() + 1.5
        while rank.allreduce(np.full(1, time.monotonic() < until_s, np.float32), "host")[0] == sum(hosts):
            pass
        if gate is not None:
            gpu.open(gate)
        if rank.rank in members:
            gpu.synchronize(own.stream)
            assert gpu.get(target, ONES).tolist() == [2.0] * 5
        wait_for(lambda: nccl.counts()["destroys"] == 2)
        rank.barrier("ended")
        own.close()

    with recorded_stderr() as text, Group(hosts, stall_warning_ms=500, stall_shutdown_ms=1000) as group:
        group.run(body)
        assert "waiting" not in text()
    assert nccl.counts()["aborts"] == 0


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2]], ids=["set", "all"])
def test_a_rank_that_leaves_tells_which_work_it_ends(gpu: Gpu, nccl: Nccl, members: list[int]) -> None:
    links = Links(hosts_of([3]))
    name = NAME if members == [0, 1] else "all ranks"

    def body(rank: Rank) -> OnGpu:
        own = on_gpu(rank, gpu, nccl)
        team = own.add_team(members, **links.of(rank.rank, members, 0)) if members == [0, 1] else 0
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
                f"{name} have not ended on this rank's GPU, or on one that it waits for, and "
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
