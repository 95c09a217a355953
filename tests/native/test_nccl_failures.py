"""NCCL connects all ranks or none; it fails, or a rank is gone, in each phase; and how ranks leave with it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, on_ranks, recorded_stderr, run_ranks, wait_for
from test_nccl import add_teams, begin, teams_of

from horo.bootstrap.nccl import choose_device
from horo.errors import AbortedError, GroupError, HoroError, MismatchError, PeerLostError, ResourceError, UsageError

ONES = np.ones(5, np.float32)
HOSTS = [(2,), (1, 1), (3,)]
ALL_HOSTS = [(3,), (2, 1), (1, 1, 1)]


def refuses(hosts: Sequence[int], connect: Callable[[Rank], object], error: type[HoroError], match: str) -> None:
    """On all ranks with one sentence, an ``error`` where it is named, an AbortedError elsewhere; the group goes on."""

    def body(rank: Rank) -> None:
        with pytest.raises(HoroError, match=match) as caught:
            connect(rank)
        is_here = f"on rank {rank.rank}:" in str(caught.value) or "NCCL on rank" not in str(caught.value)
        assert caught.type is (error if is_here else AbortedError)
        assert rank.allreduce(ONES.copy()).tolist() == [rank.size] * 5

    run_ranks(body, hosts)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize(
    "failure",
    [
        ("id", 0, "ncclGetUniqueId"),
        ("init", 1, "ncclCommInitRankConfig"),
        ("connect", 0, "NCCL's connecting"),
        ("connect", 1, "NCCL's connecting"),
    ],
)
def test_a_failed_connect_is_told(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], failure: tuple[str, int, str]) -> None:
    place, victim, function = failure
    nccl.fail(place, victim)
    words = f"^NCCL on rank {victim}: {function} failed with code 2: unhandled system error"
    refuses(hosts, lambda rank: on_gpu(rank, gpu, nccl), ResourceError, words)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_unconnected_ranks_are_told_why(gpu: Gpu, make_nccl: Callable[..., Nccl], hosts: tuple[int, ...]) -> None:
    good, bare, old = make_nccl(), make_nccl(LACKS_ABORT=1), make_nccl(VERSION=22105)

    def with_on_rank_1(path: Path) -> Callable[[Rank], OnGpu]:
        return lambda rank: OnGpu(rank, gpu, [good.path if rank.rank != 1 else path], device=rank.rank)

    refuses(hosts, with_on_rank_1(Path("/nowhere")), ResourceError, "^NCCL on rank 1: no usable NCCL: /nowhere: ")
    refuses(hosts, with_on_rank_1(bare.path), ResourceError, "^NCCL on rank 1: no usable NCCL: ")
    words = r"^NCCL is 2.23.4 on rank 0(, 2)?, and 2.21.5 on rank 1$"
    refuses(hosts, with_on_rank_1(old.path), MismatchError, words)
    words = r"^NCCL on rank 0: init\(device='cuda:20'\): this process sees 8 GPUs, cuda:0 to cuda:7$"
    refuses(hosts, lambda rank: on_gpu(rank, gpu, good, device=rank.rank or 20), UsageError, words)
    words = r"^rank 0 and rank \d are on the same GPU, which NCCL refuses: choose another one by "
    refuses(hosts, lambda rank: on_gpu(rank, gpu, good, device=1), UsageError, words)
    good.fail("late connect", 1)
    words = r"^NCCL on rank \d: the ranks 0, 1(, 2)? were not connected in 0.01 s \(HORO_START_TIMEOUT\)$"
    with Group(hosts) as group, pytest.raises(HoroError, match=words):
        group.run(lambda rank: on_gpu(rank, gpu, good, within_s=0.01))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_of_a_set", [False, True], ids=["world", "set"])
@on_ranks(*HOSTS)
def test_death_as_nccl_connects(rank: Rank, gpu: Gpu, nccl: Nccl, *, victim: int, is_of_a_set: bool) -> None:
    own = on_gpu(rank, gpu, nccl) if is_of_a_set else None
    rank.meet()
    nccl.fail("late connect", rank.rank)
    rank.meet()

    def die() -> None:
        wait_for(lambda: nccl.counts()["comms"] == rank.size + 2 if is_of_a_set else rank.size)
        rank.group.kill(victim)
        rank.context.end("its death")  # which its engine, that lives on, does not know of by itself

    killing = threading.Thread(target=die)
    if rank.rank == victim:
        killing.start()
    words = "gone|this rank|shutting down" if rank.rank == victim else f"^rank {victim} "
    with pytest.raises(GroupError, match=words):
        on_gpu(rank, gpu, nccl) if own is None else own.add_team([0, 1])
    if rank.rank == victim:
        killing.join(60)


@on_ranks((3,), (2, 1))
def test_a_set_that_nccl_does_not_connect_is_not_added(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    """Ranks outside learn of it, too; what is connected goes on, and the next set is connected."""
    own = on_gpu(rank, gpu, nccl)
    rank.barrier()
    if rank.rank == 1:
        nccl.fail("connect", 1)
    rank.barrier()
    with pytest.raises(HoroError, match=r"^NCCL on rank 1: NCCL's connecting failed with code 2"):
        own.add_team([0, 1])
    assert own.allreduce(ONES).tolist() == [3.0] * 5
    team = own.add_team([0, 1])
    if rank.rank < 2:
        assert own.allreduce(ONES, "y", team=team).tolist() == [2.0] * 5
    rank.meet()
    assert nccl.counts()["launched"] == 3 + 2


def test_the_gpu_of_a_rank() -> None:
    numbers = [choose_device(*given) for given in [(None, 3, 1), (None, 3, 4), (2, 3, 4), (0, 1, 1)]]
    assert numbers == [0, 3, 2, 0]
    with pytest.raises(ResourceError, match=r"^this process sees no GPU; HORO_GPU_OPERATIONS=staged does"):
        choose_device(None, 0, 0)
    with pytest.raises(UsageError, match=r"^local rank 2 sees 2 GPUs, cuda:0 to cuda:1; choose one by init\(device="):
        choose_device(None, 2, 2)
    with pytest.raises(UsageError, match=r"^init\(device='cuda:1'\): this process sees 1 GPU, cuda:0$"):
        choose_device(1, 0, 1)


RUNNING = "(a collective of NCCL|nccl(AllReduce|GroupEnd|RedOpCreatePreMulSum))"
"""Who tells that what runs has failed: a look, or a call that comes just then."""
FUNCTIONS = {
    "call": "ncclAllReduce", "group end": "ncclGroupEnd", "run": RUNNING, "scale": "ncclRedOpCreatePreMulSum",
    "end": "ncclCommFinalize",
}  # fmt: skip


@pytest.mark.parametrize("place", FUNCTIONS)
@pytest.mark.parametrize("is_of_a_set", [False, True], ids=["world", "set"])
@on_ranks((2,), (1, 1))
def test_a_failure_of_nccl_ends_the_group_with_its_words(
    rank: Rank, gpu: Gpu, nccl: Nccl, *, place: str, is_of_a_set: bool
) -> None:
    """The end of a communicator comes when its set has been removed already."""
    which = r" for process set 1 \(ranks 0, 1\)" if is_of_a_set or place == "end" else ""
    words = f"ended with a failure of NCCL{which}: {FUNCTIONS[place]} failed with code 2: unhandled system error"
    own = on_gpu(rank, gpu, nccl)
    team = own.add_team([0, 1]) if which else 0
    rank.barrier()
    if rank.rank == 1:
        nccl.fail(place, 1)
    rank.barrier()
    with pytest.raises(PeerLostError, match=words):
        if place == "end":
            rank.context.remove_team(team)
        for number in range(1_000_000):  # what runs fails when its call is over
            rank.barrier() if place == "end" else own.allreduce(ONES, f"x{number}", "average", team=team)
    gpu.synchronize(own.stream)
    with pytest.raises(PeerLostError, match=words):
        own.allreduce(ONES, "later")


def before_it_has_a_tensor(rank: Rank, own: OnGpu, nccl: Nccl, victim: int, mine: list[tuple[int, int]]) -> list[int]:
    return [begin(own, "x")[0]] if rank.rank != victim else []


def while_a_call_is_launched(rank: Rank, own: OnGpu, nccl: Nccl, victim: int, mine: list[tuple[int, int]]) -> list[int]:
    rank.barrier()
    nccl.fail("late launch", rank.rank)
    rank.barrier()
    return [begin(own, "x")[0]]


def while_kernels_run(rank: Rank, own: OnGpu, nccl: Nccl, victim: int, mine: list[tuple[int, int]]) -> list[int]:
    """No thread is in horo: the program may wait for its GPU, which only horo can free."""
    if rank.rank == victim:
        nccl.fail("hang", victim)  # as a rank of the world; its kernels of other teams stand behind or before
    for handle in [begin(own, f"{i}", team)[0] for i in range(3) for team, _ in mine]:
        own.finish(handle)
    return []


def before_it_proposes(rank: Rank, own: OnGpu, nccl: Nccl, victim: int, mine: list[tuple[int, int]]) -> list[int]:
    """Its neighbour has launched the first call and waits for a proposal; the victim never launches the first."""
    if rank.rank not in (1, victim):
        return []
    team = mine[1 if victim == 0 and rank.rank == 0 else 2 if rank.rank == 1 and victim == 2 else 1][0]
    if rank.rank == victim:
        nccl.fail("late launch", 1 if victim == 2 else 0)
        return [begin(own, name, team)[0] for name in "ab"]
    own.finish(begin(own, "a", team)[0])
    return [begin(own, "b", team)[0]]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "until", [before_it_has_a_tensor, while_a_call_is_launched, while_kernels_run, before_it_proposes]
)
@pytest.mark.parametrize("hosts", ALL_HOSTS, ids=str)
def test_rank_dies(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, until: Callable[..., list[int]]) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = teams_of(rank, add_teams(own))
        for team, _ in mine:
            own.allreduce(ONES, "first", team=team)
        handles = until(rank, own, nccl, victim, mine)
        rank.meet()
        if rank.rank == victim:
            rank.group.kill(victim)
            own.context.end("its death")  # which its engine, that lives on, does not know of by itself
        gpu.synchronize(own.stream)
        for handle in handles:
            with pytest.raises(GroupError):
                own.context.wait(handle)
            own.context.release(handle)
        with pytest.raises(PeerLostError, match="gone|this rank" if rank.rank == victim else f"^rank {victim} "):
            own.allreduce(ONES, "later")

    with recorded_stderr():
        run_ranks(body, hosts)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (0, 9)


@pytest.mark.parametrize("is_told_behind", [False, True], ids=["together", "behind another"])
def test_a_rank_that_leaves_waits_for_its_gpu(gpu: Gpu, nccl: Nccl, is_told_behind: bool) -> None:
    """Also where its thread looks after the GPU, and the group has ended in order, when it is told to leave."""
    gates = []

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        gates.append(gpu.hold_stream(own.stream))
        own.finish(begin(own, "x")[0])

    group = Group((2,))
    group.run(body)
    if is_told_behind:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(group.leave, 0)
            wait_for(lambda: group.contexts[1].health() is not None)
            second = pool.submit(group.leave, 1)
            gpu.open(*gates)
            first.result(60)
            second.result(60)
    else:
        group.destroy_while(lambda: gpu.open(*gates))
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (2, 0)


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2]], ids=["set", "all"])
def test_a_rank_that_leaves_tells_which_work_it_ends(gpu: Gpu, nccl: Nccl, members: list[int]) -> None:
    name = "process set 1 (ranks 0, 1)" if members == [0, 1] else "all ranks"

    def body(rank: Rank) -> OnGpu:
        own = on_gpu(rank, gpu, nccl)
        team = own.add_team(members) if members == [0, 1] else 0
        if rank.rank in members:
            own.allreduce(ONES, "first", team=team)
            if rank.rank == 1:
                nccl.fail("hang", 1)
            rank.barrier("before", team=team)
            own.finish(begin(own, "last", team)[0])
        rank.barrier("called")
        return own

    with recorded_stderr() as written:
        owners = run_ranks(body, (3,))
        for member in range(3):
            told = (
                f"horo [{member}] warning: leaving, this rank has waited 5 s for NCCL, and ends it: operations of "
                f"{name} have not ended on this rank's GPU, or on one that it waits for, and "
                "their results are lost"
            )
            assert written().count(told) == (member in members)
    for own in owners:
        gpu.synchronize(own.stream)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_a_rank_that_leaves_long_before_others_has_lost_nothing(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """The others come to the end of their communicator when they leave; a job after that has one of its own."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        assert own.allreduce(ONES, "first").tolist() == [2.0] * 5

    with recorded_stderr() as written:
        for _ in range(2):
            with Group(hosts) as group:
                group.run(body)
                group.run(lambda rank: rank.context.destroy(), ranks=[0])
        assert written() == ""
