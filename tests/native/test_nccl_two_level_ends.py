"""Allreduces in two levels in which something fails or somebody is gone, in each phase; beside others; with joined
ranks.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu
from nccl_checks import DTYPES, dies_at_any_time, ends_with_words
from ranks import Group, Rank, recorded_stderr, wait_for
from test_join import join
from test_nccl_failures import ONES, RUNNING
from test_nccl_teams import add_teams, teams_of
from test_nccl_two_level import in_two
from test_teams import Links, hosts_of

from horo.errors import GroupError, PeerLostError, StalledError

HOSTS = [(2, 2), (2, 1), (3, 2)]
MANY = np.ones(30_000, np.float32)
"""In more pieces than there are slots."""


def begin_many(own: OnGpu) -> int:
    handle: int = own.submit("allreduce", "x", MANY, reduce_op=SUM)[0]
    return handle


# ---- A rank is gone ----


def dies(gpu: Gpu, nccl: Nccl, victim: int, hosts: tuple[int, ...], until: Callable[[Rank, OnGpu], Any]) -> None:
    """``until`` brings a rank to where the victim dies, and returns its request and a gate that is to be opened."""
    there = threading.Barrier(sum(hosts))

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        rank.barrier()
        handle, gate = until(rank, own)
        there.wait(60)
        if rank.rank == victim:
            group.kill(victim)
            own.context.end("its death")  # which its engine, that lives on, does not know of by itself
        with suppress(GroupError):  # one that has nothing to do any more is done
            own.context.wait(handle)
        own.context.release(handle)
        with pytest.raises(PeerLostError, match="gone|this rank" if rank.rank == victim else f"^rank {victim} "):
            own.allreduce(ONES, "later")
        if gate is not None:
            gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr(), Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("victim", [0, 1, -1])
@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_dies_while_a_launch_of_either_level_never_comes(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, at: int
) -> None:
    def until(rank: Rank, own: OnGpu) -> tuple[int, None]:
        if rank.rank == 0:
            nccl.fail("late launch", 1, at=at)
        rank.barrier("it is known")
        return begin_many(own), None

    dies(gpu, nccl, victim % sum(hosts), hosts, until)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("victim", [0, 1, -1])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_rank_dies_while_a_kernel_of_either_level_hangs(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, at: int
) -> None:
    def until(rank: Rank, own: OnGpu) -> tuple[int, None]:
        if rank.rank == 0:
            nccl.fail("hang", 0, at=at)
        rank.barrier("it is known")
        return begin_many(own), None

    dies(gpu, nccl, victim % sum(hosts), hosts, until)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("victim", [0, 1, -1])
@pytest.mark.parametrize("late", [0, -1])
def test_a_rank_dies_while_one_host_waits_for_the_parts_of_another(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, late: int
) -> None:
    """The GPU of a rank stands still. So its host has reduced nothing, and the others have sent what they may."""

    def until(rank: Rank, own: OnGpu) -> tuple[int, ctypes.c_int | None]:
        is_late = rank.rank == late % sum(hosts)
        gate = gpu.hold(own.stream) if is_late else None
        before = own.context.counters()["link_bytes"]
        handle = begin_many(own)
        if rank.rank == (0 if late else sum(hosts) - hosts[-1]):  # an owner on a host that is not late
            wait_for(lambda: own.context.counters()["link_bytes"] > before)
        return handle, gate

    dies(gpu, nccl, victim % sum(hosts), hosts, until)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("victim", [0, 1, -1])
@pytest.mark.parametrize("at", [1, 2])
def test_a_rank_dies_while_pinned_memory_stands_in(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int, at: int
) -> None:
    """No copy makes the thread wait for a kernel that waits for that rank."""

    def until(rank: Rank, own: OnGpu) -> tuple[int, None]:
        if rank.rank == 0:
            gpu.limit_rooms(1000)
            nccl.fail("hang", 0, at=at)
        rank.barrier("it is known")
        return begin_many(own), None

    dies(gpu, nccl, victim % sum(hosts), hosts, until)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_dies_at_any_time(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    """Also while NCCL connects all ranks, and those of a host."""
    make = partial(in_two, gpu=gpu, nccl=nccl)
    dies_at_any_time(hosts, seed, make, lambda own, _: begin_many(own), segment_bytes=1 << 12)


def test_a_rank_without_a_part_may_leave_while_others_exchange_theirs(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> OnGpu:
        own = in_two(rank, gpu, nccl)
        for _ in range(3):
            own.finish(begin_many(own))
        return own

    with Group((3, 1), segment_bytes=1 << 12) as group:
        owners = group.run(body)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (8, 0)
    for own in owners:
        own.close()


# ---- Something fails ----


@pytest.mark.parametrize("hosts", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("place", ["init", "call", "group end", "run", "scale"])
def test_a_failure_of_nccl_ends_the_group_with_its_words(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], place: str, at: int
) -> None:
    """Of a call at either level."""
    function = {
        "init": "ncclCommInitRankConfig",
        "call": "nccl(ReduceScatter|AllGather|Reduce|Broadcast)",
        "group end": "ncclGroupEnd",
        "run": RUNNING,
        "scale": "ncclRedOpCreatePreMulSum",
    }[place]
    words = f"ended with a failure of NCCL: {function} failed with code 2: unhandled system error"
    nccl.fail(place, 1, at=at)
    wide = np.ones(6, np.float32)

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        ends_with_words(own, words, lambda number: own.allreduce(wide, f"x{number}", "average"), PeerLostError)

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["destroys"] == 0


@pytest.mark.parametrize("copy", [1, 2, 12, 40])
def test_a_copy_that_fails_ends_the_group(gpu: Gpu, nccl: Nccl, copy: int) -> None:
    """To the host or back; the device is lost."""

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        rank.barrier()
        if rank.rank == 0:
            gpu.fail(copy=copy)
        rank.barrier("it is known")
        with pytest.raises(PeerLostError, match=r"a failure of NCCL: .* failed with code 719: unspecified launch"):
            for _ in range(10_000):
                handle = begin_many(own)
                try:
                    own.context.wait(handle)
                finally:
                    own.context.release(handle)
        own.close()

    with recorded_stderr(), Group((2, 1), segment_bytes=1 << 12) as group:
        group.run(body)


def test_without_pinned_memory_the_group_ends_with_a_sentence_that_names_the_size(gpu: Gpu, nccl: Nccl) -> None:
    gpu.fail(host_bytes=100)

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        assert own.allreduce(ONES).tolist() == [4.0] * 5
        with pytest.raises(PeerLostError, match=r"no 32768 bytes of pinned memory: cuMemHostAlloc failed with code 2"):
            own.allreduce(MANY, "large")
        own.close()

    with recorded_stderr(), Group((2, 2), segment_bytes=1 << 12) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("late", [0, 1])
def test_nobody_is_blamed_for_a_gpu_that_stands_still(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], late: int) -> None:
    """One on the host of several ranks. Its owner waits for its own GPU, not for the only rank of the other host."""

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        own.allreduce(ONES, "first")
        rank.barrier()
        gate = gpu.hold(own.stream) if rank.rank == hosts.index(2) + late else None
        handle = begin_many(own)
        try:
            if rank.rank == hosts.index(2) + 1:  # it has no part, and is done
                own.context.wait(handle)
            else:
                with pytest.raises(StalledError, match=r"^a rank has not submitted what others wait for, or not gone"):
                    own.context.wait(handle)
        finally:
            own.context.release(handle)
        wait_for(lambda: own.context.health() is not None)
        if gate is not None:
            gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr() as text:
        with Group(hosts, segment_bytes=1 << 12, stall_warning_ms=200, stall_shutdown_ms=600) as group:
            group.run(body)
        assert "waiting for its own GPU in the middle of an operation" in text()
        assert "waiting for rank" not in text()


# ---- Beside others ----

SETS = ([0, 1, 2], [1, 2, 3], [0, 3], [0, 1], [0, 1, 3])


@pytest.mark.parametrize("hosts", [[2, 2], [1, 3]], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_launches_of_all_teams_come_in_one_order(gpu: Gpu, nccl: Nccl, hosts: list[int], seed: int) -> None:
    """Sets that overlap, some with two levels, some on one host or with one rank on each; among their calls are those
    that NCCL does among all ranks, and those in host memory.
    """
    links = Links(hosts_of(hosts))

    def one(own: OnGpu, team: int, size: int, name: str) -> Callable[[], None]:
        kind, length = name.partition(":")[0], int(name.rpartition(":")[2])
        mine = np.full(length, team + 1, np.int16 if kind == "packed" else np.float32)
        if kind == "host":
            handle = own.rank.submit("allreduce", name, [mine], reduce_op=SUM, team=team)

            def finish_host() -> None:
                own.rank.finish(handle)
                assert mine.tolist() == [size * (team + 1)] * length

            return finish_host
        handle, source, _ = own.submit("allreduce", name, mine, reduce_op=SUM, team=team)

        def finish() -> None:
            own.finish(handle)
            own.gpu.synchronize(own.stream)
            assert own.gpu.get(source, mine).tolist() == [size * (team + 1)] * length

        return finish

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        mine = teams_of(rank, add_teams(rank, links, SETS), SETS)
        chance, lengths = random.Random(100 * seed + rank.rank), random.Random(seed)
        for step in range(5):
            sizes = [lengths.choice([1, 5, 900, 4000]) for _ in range(3)]
            kinds = ("gpu", "packed", "host")
            calls = [
                (team, size, f"{kind}:{step}:{i}:{length}")
                for team, size in mine
                for i, (kind, length) in enumerate(zip(kinds, sizes, strict=True))
            ]
            chance.shuffle(calls)
            finishers = [one(own, *call) for call in calls]
            chance.shuffle(finishers)
            for finish in finishers:
                finish()
        own.close()

    with Group(hosts, segment_bytes=1 << 12, teams=len(SETS) + 1) as group:
        group.run(body)


def test_sets_come_and_go(gpu: Gpu, nccl: Nccl) -> None:
    hosts = [2, 2]
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        for step in range(4):
            teams = add_teams(rank, links, [[0, 1, 2], [1, 2, 3]], key=step)
            for team, size in teams_of(rank, teams, ([0, 1, 2], [1, 2, 3])):
                assert own.allreduce(ONES, team=team).tolist() == [size] * 5
            for team in teams:
                rank.context.remove_team(team)
            wait_for(lambda step=step: nccl.counts()["destroys"] >= 12 * (step + 1))
        own.close()

    with Group(hosts) as group:
        group.run(body)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (4 * 12 + 8, 0)


# ---- Ranks that have joined ----


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@pytest.mark.parametrize("first", [True, False])
def test_values_of_joined_ranks_change_no_reduction(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], op: str, first: bool
) -> None:
    """Rank 0 or the last one has joined: an owner, and perhaps the only rank of its host."""
    size = sum(hosts)
    away = 0 if first else size - 1
    chosen = [name for name in DTYPES if op != "average" or name.startswith("float")]

    def values(rank: int, name: str) -> np.ndarray:
        mine = (np.arange(70) + rank) % 2 + 1
        return (-mine if op == "max" and name != "uint8" else mine).astype(name)

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        assert own.allreduce(ONES, "first").tolist() == [size] * 5
        for name in chosen if rank.rank != away else []:
            there = np.array([values(r, name).astype(float) for r in range(size) if r != away])
            expected = {
                "sum": there.sum(axis=0),
                "average": there.sum(axis=0) / size,
                "min": there.min(axis=0),
                "max": there.max(axis=0),
                "product": there.prod(axis=0),
            }[op]
            found = own.allreduce(values(rank.rank, name), name, op)
            np.testing.assert_allclose(found.astype(float), expected, rtol=2e-3, err_msg=name)
        join(rank)
        assert own.allreduce(ONES, "last").tolist() == [size] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)


def test_a_rank_that_has_joined_takes_part_in_connecting_its_host(gpu: Gpu, nccl: Nccl) -> None:
    """In a process set, after it has used its GPU among all ranks."""
    hosts = [2, 2]
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        own = in_two(rank, gpu, nccl)
        assert own.allreduce(ONES).tolist() == [4.0] * 5
        (team,) = add_teams(rank, links, [[0, 1, 2]])
        if rank.rank < 3:
            if rank.rank > 0:
                found = own.run("allreduce", "x", ONES, reduce_op=SUM, team=team)
                assert found.tolist() == [2.0] * 5
            join(rank, team=team)
            assert own.run("allreduce", "y", ONES, reduce_op=SUM, team=team).tolist() == [3.0] * 5
        own.close()

    with Group(hosts) as group:
        group.run(body)
