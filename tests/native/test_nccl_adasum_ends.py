"""Adasum by NCCL in which something fails or somebody is gone, in each phase; and with ranks that have joined."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu, on_gpu
from nccl_checks import dies_at_any_time, ends_with_words
from ranks import Group, Rank, recorded_stderr, wait_for
from test_adasum import OP, check
from test_join import join
from test_nccl_adasum import combined, values_of
from test_nccl_failures import ONES, RUNNING, dies
from test_nccl_join import alone
from test_nccl_pack import ends_without_memory, reduced, submit
from test_nccl_teams import add_teams
from test_teams import Links, hosts_of

from horo.errors import GroupError, PeerLostError

HOSTS = [(2,), (1, 1), (3,), (2, 1)]
over_all_hosts = pytest.mark.parametrize("hosts", HOSTS, ids=str)
MANY = np.ones(40_000, np.float32)


def launches_of(size: int) -> int:
    """Of NCCL's: the exchange, the sums of each level, the gathering."""
    return 2 + (size - 1).bit_length()


def begin(own: OnGpu, tensors: int = 1) -> int:
    handle: int = submit(own, "x", [MANY] * tensors, "adasum")[0]
    return handle


# ---- A rank is gone ----


@over_all_hosts
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("launch", [1, 2, 3, 4])
def test_a_rank_dies_while_a_launch_of_each_phase_never_comes(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, launch: int
) -> None:
    def until(rank: Rank, own: OnGpu) -> int:
        own.allreduce(ONES, "first")
        rank.barrier("all are connected")
        nccl.fail("late launch", rank.rank, at=min(launch, launches_of(rank.size)))
        return begin(own)

    dies(gpu, nccl, victim, hosts, until)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,), (2, 1)], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", ["exchange", "sum", "gather"])
def test_a_rank_dies_while_a_kernel_of_each_phase_hangs(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, call: str
) -> None:
    """No thread is in horo by then: the program may wait for its GPU, which only horo can free."""
    size = sum(hosts)
    at = {"exchange": 1, "sum": 2, "gather": launches_of(size)}[call]

    def until(rank: Rank, own: OnGpu) -> None:
        own.allreduce(ONES, "first")
        if rank.rank == victim:
            nccl.fail("hang", victim, at=at)
        rank.barrier("it is to hang")
        own.finish(begin(own, tensors=2))

    dies(gpu, nccl, victim, hosts, until)
    assert nccl.counts()["aborts"] == size


def test_a_rank_dies_while_all_of_it_waits_for_the_program(gpu: Gpu, nccl: Nccl) -> None:
    """Memory goes back behind kernels, whatever the program's GPU is at."""
    gates = {}

    def until(rank: Rank, own: OnGpu) -> None:
        own.allreduce(ONES, "first")
        gates[rank.rank] = gpu.hold(own.stream)
        own.finish(begin(own, tensors=2))
        gpu.open(gates[rank.rank])

    dies(gpu, nccl, 1, (2,), until)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,)], ids=str)
@pytest.mark.parametrize("tensors", [1, 2])
def test_a_rank_dies_while_pinned_memory_stands_in(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], tensors: int) -> None:
    """No batch makes the thread wait for the one before, which waits for that rank."""

    def until(rank: Rank, own: OnGpu) -> None:
        own.allreduce(ONES, "first")
        if rank.rank == 1:
            gpu.limit_rooms(1000)
            nccl.fail("hang", 1)
        rank.barrier("it is to hang")
        for name in "xy":
            own.finish(submit(own, name, [MANY] * tensors, "adasum")[0])

    dies(gpu, nccl, 1, hosts, until)


@over_all_hosts
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_dies_at_any_time(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    make = partial(on_gpu, gpu=gpu, nccl=nccl)
    dies_at_any_time(hosts, seed, make, lambda own, number: begin(own, tensors=1 + number % 2))


# ---- Something fails ----


def fails(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], words: str, place: tuple[str, int]) -> None:
    """What rank 0 does there for the so many-th time from now on."""
    how, at = place

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        rank.barrier("all are connected")
        if rank.rank == 0 and how == "kernel":
            gpu.refuse_kernels(launch=at)
        elif rank.rank == 0:
            nccl.fail(how, 0, at=at)
        rank.barrier("it is to fail")
        arrays = [MANY[:300], MANY[:70]]
        ends_with_words(own, words, lambda number: reduced(own, f"x{number}", arrays, "adasum"), GroupError)

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["destroys"] == 0


@pytest.mark.parametrize("hosts", [(2,), (3,)], ids=str)
@pytest.mark.parametrize("at", range(1, 9))
def test_a_kernel_that_cannot_be_launched_ends_the_group(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], at: int) -> None:
    """Whichever it is: one that packs, multiplies, adds up, combines or unpacks."""
    words = "ended with a failure of NCCL: cuLaunchKernel failed with code 719: unspecified launch failure"
    fails(gpu, nccl, hosts, words, ("kernel", at))


@pytest.mark.parametrize("hosts", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("place", ["call", "group end", "run"])
def test_a_failure_of_nccl_ends_the_group_with_its_words(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], place: str, at: int
) -> None:
    function = {
        "call": "nccl(Send|Recv|AllReduce|AllGather|Broadcast)",
        "group end": "ncclGroupEnd",
        "run": RUNNING,
    }[place]
    words = f"ended with a failure of NCCL: {function} failed with code 2: unhandled system error"
    fails(gpu, nccl, hosts, words, (place, at))


def test_where_there_is_no_memory_at_all_the_group_ends_with_the_size(gpu: Gpu, nccl: Nccl) -> None:
    ends_without_memory(gpu, nccl, r"16\d\d\d\d", lambda own: combined(own, MANY))


def test_without_pinned_memory_for_its_tables_the_group_ends_with_a_sentence(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        gpu.fail(host_bytes=100)
        with pytest.raises(PeerLostError, match=r"no \d+ bytes of pinned memory: cuMemHostAlloc failed with code 2"):
            reduced(own, "x", [MANY] * 30, "adasum")
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)


# ---- Ranks that have joined, ranks that leave ----


@pytest.mark.parametrize("hosts", [(2,), (3,), (1, 1, 1), (4,)], ids=str)
def test_joined_ranks_change_nothing(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """Their vectors are zeros."""

    def body(rank: Rank, own: OnGpu) -> None:
        for dtype in ("float16", "float32", "float64"):
            inputs = [values_of(r, 3001, dtype) * (r > 0) for r in range(rank.size)]
            check(combined(own, inputs[rank.rank], dtype), inputs, dtype)
            for found in reduced(own, f"two {dtype}", [inputs[rank.rank]] * 2, "adasum"):
                check(found, inputs, dtype)
        inputs = [values_of(r, 3001, np.float32) * (r > 0) for r in range(rank.size)]
        (found,) = reduced(own, "half", [inputs[rank.rank]], "adasum", half="bfloat16")
        check(found, inputs, "bfloat16")

    alone(hosts, body, gpu, nccl)
    assert gpu.counts()["kernels"] > 0


def test_ranks_of_a_set_join_in_turn(gpu: Gpu, nccl: Nccl) -> None:
    links = Links(hosts_of([2, 1]))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        (team,) = add_teams(rank, links, [[1, 2]])
        own.allreduce(ONES, "first")
        for away in (1, 2) if rank.rank > 0 else ():
            inputs = [values_of(r, 900, np.float32) * (r != away) for r in (1, 2)]
            if rank.rank != away:
                check(combined(own, inputs[rank.rank - 1], f"x{away}", team=team), inputs, "float32")
            join(rank, team=team)
        assert own.allreduce(ONES, "last").tolist() == [3.0] * 5
        own.close()

    with Group([2, 1]) as group:
        group.run(body)


def test_a_rank_leaves_behind_an_adasum(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> OnGpu:
        own = on_gpu(rank, gpu, nccl)
        gate = gpu.hold(own.stream)
        own.finish(own.submit("allreduce", "x", MANY, reduce_op=OP)[0])
        gpu.open(gate)
        return own

    with Group((3,)) as group:
        owners = group.run(body)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (3, 0)
    wait_for(lambda: nccl.counts()["comms"] == 0)
    for own in owners:
        own.close()
