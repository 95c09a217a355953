"""The first calls of a team that NCCL could do, of which some fail, before ranks know what NCCL is to do."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr
from test_nccl_teams import ONES, add_teams, begin
from test_teams import Links, hosts_of

from horo.errors import HoroError, MismatchError, PeerLostError, UsageError

HOSTS = ([2], [1, 1], [3], [2, 1])
REFUSED = "broadcast '{}': .*root rank 7 (does not exist|is no member)"


def refuse(own: OnGpu, name: str, team: int = 0) -> None:
    with pytest.raises(UsageError, match=REFUSED.format(name)):
        own.submit("broadcast", name, ONES, root_rank=7, team=team)


def fails(own: OnGpu, handle: int, error: type[HoroError], match: str) -> None:
    with pytest.raises(error, match=match):
        own.context.wait(handle)
    own.context.release(handle)


def goes_on(gpu: Gpu, nccl: Nccl, hosts: list[int], first: Callable[[OnGpu], None]) -> None:
    """In host memory, then by NCCL, when the ``first`` call has failed."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        first(own)
        rank.barrier("in host memory")
        assert own.allreduce(ONES).tolist() == [rank.size] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] == sum(hosts)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("who", [0, 1])
def test_a_first_call_that_a_rank_refuses_fails_on_all_at_once(
    gpu: Gpu, nccl: Nccl, hosts: list[int], who: int
) -> None:
    """The rank that refuses goes on in host memory, and has no tensor on a GPU before the others know."""

    def first(own: OnGpu) -> None:
        if own.rank.rank == who:
            refuse(own, "x")
        else:
            fails(own, own.submit("broadcast", "x", ONES)[0], UsageError, rf"^rank {who} .*{REFUSED.format('x')}")

    goes_on(gpu, nccl, hosts, first)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_first_call_in_host_memory_on_one_rank_fails_on_all_at_once(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    words = r"allreduce 'x': rank \d+ \(.*\) sent it (on the GPU that NCCL uses|in host memory or on another GPU), rank"

    def first(own: OnGpu) -> None:
        with pytest.raises(MismatchError, match=words):
            own.rank.allreduce(ONES, "x") if own.rank.rank == 1 else own.allreduce(ONES, "x")

    goes_on(gpu, nccl, hosts, first)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_set_whose_first_call_a_rank_refused_can_be_removed(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """Nothing of what the others have begun is left in it."""
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for step in range(3):
            (team,) = add_teams(rank, links, [[0, 1]], step)
            if rank.rank == step % 2:
                refuse(own, "b", team)
            elif rank.rank < 2:
                fails(own, own.submit("broadcast", "b", ONES, team=team)[0], UsageError, "has refused it")
            rank.context.remove_team(team)
        (team,) = add_teams(rank, links, [[0, 1]], "last")
        if rank.rank < 2:
            assert own.allreduce(ONES, team=team).tolist() == [2.0] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] == 2


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_nobody_waits_for_nccl_where_all_first_calls_have_failed(gpu: Gpu, nccl: Nccl, hosts: list[int]) -> None:
    """No report of a stall, and no end of the job by one, while the program goes on in host memory."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        if rank.rank == 0:
            refuse(own, "x")
        else:
            fails(own, own.submit("broadcast", "x", ONES)[0], UsageError, "has refused it")
        for number in range(30):
            rank.barrier(f"{number}")
        own.close()

    with recorded_stderr() as text:
        with Group(hosts) as group:
            group.run(body)
        assert "waiting" not in text()


@pytest.mark.parametrize("lack", ["memory", "values"])
def test_what_cannot_be_staged_any_more_ends_the_group(gpu: Gpu, nccl: Nccl, lack: str) -> None:
    """Both ranks are on one GPU; their first call is with NCCL when that is refused."""
    words = {
        "memory": "a tensor on a GPU that it could not copy to the host: allreduce 'x': no 64 bytes of pinned memory: "
        "cuMemHostAlloc failed with code 2: out of memory",
        "values": "an error on GPU 0 that lost the values of allreduce 'x': the copy from the GPU failed with code "
        "719: unspecified launch failure; if a kernel of the program is at fault, a run with CUDA_LAUNCH_BLOCKING=1 "
        "shows which",
    }[lack]

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl, device=0)
        gpu.is_broken = lack == "values"
        gpu.fail(**({"host_bytes": 0} if lack == "memory" else {"copy": 1}))
        rank.barrier()
        handle, _ = begin(own, "x")
        fails(own, handle, PeerLostError, f"ended with {words}")
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("is_shared", [False, True], ids=["nccl", "staged"])
@pytest.mark.parametrize("seed", range(8))
def test_first_calls_of_all_teams_of_which_many_fail(
    gpu: Gpu, nccl: Nccl, hosts: list[int], is_shared: bool, seed: int
) -> None:
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
        own = on_gpu(rank, gpu, nccl, **({"device": 0} if is_shared else {}))
        chance = random.Random(100 * seed + rank.rank)
        for epoch, plan in enumerate(plans):
            teams = add_teams(rank, links, sets, epoch)
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
