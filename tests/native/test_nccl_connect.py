"""NCCL connects the ranks of a job, or of a process set: on all of them, or on none with the same reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr, wait_for
from test_teams import Links, hosts_of

from horo.bootstrap.nccl import choose_device
from horo.errors import AbortedError, GroupError, HoroError, MismatchError, ResourceError, UsageError

ONES = np.ones(5, np.float32)
HOSTS = [(2,), (1, 1), (3,)]


def fails(
    hosts: Sequence[int], connect: Callable[[Rank], object], errors: Sequence[type[HoroError]], match: str
) -> None:
    """On all ranks with one sentence, though each has an error of its own; the group goes on."""

    def body(rank: Rank) -> None:
        with pytest.raises(HoroError, match=match) as caught:
            connect(rank)
        assert caught.type is errors[rank.rank]
        assert rank.allreduce(ONES.copy()).tolist() == [rank.size] * 5

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_rank_without_nccl(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def connect(rank: Rank) -> OnGpu:
        return OnGpu(rank, gpu, [nccl.path] if rank.rank != 1 else [Path("/nowhere")], device=rank.rank)

    errors = [AbortedError, ResourceError, AbortedError]
    fails(hosts, connect, errors, "^NCCL on rank 1: no usable NCCL: /nowhere: ")


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_rank_that_does_not_see_its_gpu(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    def connect(rank: Rank) -> OnGpu:
        return on_gpu(rank, gpu, nccl, device=20 if rank.rank == 0 else rank.rank)

    errors = [UsageError, AbortedError, AbortedError]
    words = r"^NCCL on rank 0: init\(device='cuda:20'\): this process sees 8 GPUs, cuda:0 to cuda:7$"
    fails(hosts, connect, errors, words)


def test_two_ranks_on_one_gpu(gpu: Gpu, nccl: Nccl) -> None:
    words = "^rank 0 and rank 2 are on the same GPU, which NCCL refuses: choose another one by "
    fails((3,), lambda rank: on_gpu(rank, gpu, nccl, device=rank.rank % 2), [UsageError] * 3, words)


def test_an_nccl_that_lacks_a_function(gpu: Gpu, make_nccl: Callable[..., Nccl]) -> None:
    both = make_nccl(), make_nccl(LACKS_ABORT=1)
    words = "^NCCL on rank 1: no usable NCCL: "
    fails((2,), lambda rank: on_gpu(rank, gpu, both[rank.rank]), [AbortedError, ResourceError], words)


def test_versions_that_differ(gpu: Gpu, make_nccl: Callable[..., Nccl]) -> None:
    both = make_nccl(), make_nccl(VERSION=22105)
    words = "^NCCL is 2.23.4 on rank 0, and 2.21.5 on rank 1$"
    fails((2,), lambda rank: on_gpu(rank, gpu, both[rank.rank]), [MismatchError] * 2, words)


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
def test_a_failure_of_nccl(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], failure: tuple[str, int, str]) -> None:
    """The others, which NCCL is still to connect, give that up."""
    place, victim, function = failure
    nccl.fail(place, victim)
    errors = [ResourceError if rank == victim else AbortedError for rank in range(3)]
    words = f"^NCCL on rank {victim}: {function} failed with code 2: unhandled system error"
    fails(hosts, lambda rank: on_gpu(rank, gpu, nccl), errors, words)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_a_rank_that_is_not_connected_in_time(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    nccl.fail("late connect", 1)

    def connect(rank: Rank) -> OnGpu:
        return on_gpu(rank, gpu, nccl, within_s=0.01)

    ranks = ", ".join(map(str, range(sum(hosts))))
    words = rf"^NCCL on rank \d: the ranks {ranks} were not connected in 0.01 s \(HORO_START_TIMEOUT\)$"

    def body(rank: Rank) -> None:
        with pytest.raises(HoroError, match=words):
            connect(rank)

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_of_a_set", [False, True], ids=["world", "set"])
def test_a_rank_dies_while_nccl_connects(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, is_of_a_set: bool
) -> None:
    size = sum(hosts)
    there = threading.Barrier(size)
    links = Links(hosts_of(list(hosts)))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl) if is_of_a_set else None
        there.wait(60)
        nccl.fail("late connect", rank.rank)
        there.wait(60)

        def connect() -> None:
            if own is None:
                on_gpu(rank, gpu, nccl)
            else:
                own.add_team([0, 1], **links.of(rank.rank, [0, 1], 0))

        def die() -> None:
            wait_for(lambda: nccl.counts()["comms"] == size + 2 if is_of_a_set else size)
            group.kill(victim)
            rank.context.end("its death")  # which its engine, that lives on, does not know of by itself

        killing = threading.Thread(target=die)
        if rank.rank == victim:
            killing.start()
        words = "gone|this rank|shutting down" if rank.rank == victim else f"^rank {victim} "
        with pytest.raises(GroupError, match=words):
            connect()
        if rank.rank == victim:
            killing.join(60)
        if own is not None:
            own.close()

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_a_set_that_nccl_does_not_connect_is_not_added(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """Ranks outside learn of it, too; what is connected goes on, and the next set is connected."""
    links = Links(hosts_of(list(hosts)))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        rank.barrier()
        if rank.rank == 1:
            nccl.fail("connect", 1)
        rank.barrier()
        with pytest.raises(HoroError, match=r"^NCCL on rank 1: NCCL's connecting failed with code 2"):
            own.add_team([0, 1])
        assert own.allreduce(ONES).tolist() == [3.0] * 5
        team = own.add_team([0, 1], **links.of(rank.rank, [0, 1], 0))
        if rank.rank < 2:
            assert own.allreduce(ONES, "y", team=team).tolist() == [2.0] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["launched"] == 3 + 2


def test_a_rank_that_does_not_come(gpu: Gpu, nccl: Nccl) -> None:
    """The other one does not wait for ever."""

    def body(rank: Rank) -> None:
        with pytest.raises(HoroError, match=r"^not all ranks have come in time$"):
            rank.context.wait(rank.submit("allreduce", "x", [ONES.copy()]), 0.01)

    with Group((2,)) as group:
        group.run(body, ranks=[0])


@pytest.mark.parametrize(
    ("wanted", "local_rank", "count", "number"), [(None, 3, 1, 0), (None, 3, 4, 3), (2, 3, 4, 2), (0, 1, 1, 0)]
)
def test_the_gpu_of_a_rank(wanted: int | None, local_rank: int, count: int, number: int) -> None:
    assert choose_device(wanted, local_rank, count) == number


def test_a_rank_without_a_gpu_of_its_own() -> None:
    with pytest.raises(ResourceError, match=r"^this process sees no GPU; HORO_GPU_OPERATIONS=staged does"):
        choose_device(None, 0, 0)
    with pytest.raises(UsageError, match=r"^local rank 2 sees 2 GPUs, cuda:0 to cuda:1; choose one by init\(device="):
        choose_device(None, 2, 2)
    with pytest.raises(UsageError, match=r"^init\(device='cuda:1'\): this process sees 1 GPU, cuda:0$"):
        choose_device(1, 0, 1)
