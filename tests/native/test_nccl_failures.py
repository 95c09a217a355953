"""NCCL fails, or a rank is gone, in each phase of a collective by NCCL; and how ranks leave with it."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, recorded_stderr, wait_for

from horo.core import context
from horo.errors import AbortedError, GroupError, HoroError, PeerLostError

ONES = np.ones(5, np.float32)
RUNNING = "(a collective of NCCL|nccl(AllReduce|GroupEnd|RedOpCreatePreMulSum))"
"""Who tells that what runs has failed: a look, or a call that comes just then."""


def begin(own: OnGpu, name: str = "x") -> int:
    handle: int = own.submit("allreduce", name, ONES, reduce_op=SUM)[0]
    return handle


def ends_with(own: OnGpu, handle: int, error: type[HoroError], match: str) -> None:
    with pytest.raises(error, match=match):
        own.context.wait(handle)
    own.context.release(handle)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)])
@pytest.mark.parametrize("place", ["call", "group end", "run", "scale"])
def test_a_failure_of_nccl_ends_the_group_with_its_words(
    gpu: Gpu,
    nccl: Nccl,
    hosts: tuple[int, ...],
    place: str,
) -> None:
    function = {
        "call": "ncclAllReduce",
        "group end": "ncclGroupEnd",
        "run": RUNNING,
        "scale": "ncclRedOpCreatePreMulSum",
    }[place]
    words = f"ended with a failure of NCCL: {function} failed with code 2: unhandled system error"
    nccl.fail(place, 1)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        with pytest.raises(PeerLostError, match=words):
            for number in range(10_000):  # what runs fails when its call is over
                own.allreduce(ONES, f"x{number}", "average")
        own.gpu.synchronize(own.stream)
        with pytest.raises(PeerLostError, match=words):
            own.allreduce(ONES, "later")
        own.close()

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)
    assert nccl.counts()["destroys"] == 0


def dies(gpu: Gpu, nccl: Nccl, victim: int, hosts: tuple[int, ...], until: Callable[[Rank, OnGpu], Any]) -> None:
    """``until`` brings a rank to where the victim dies, on all ranks; returns when that may happen."""
    there = threading.Barrier(sum(hosts))

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        handle = until(rank, own)
        there.wait(60)
        if rank.rank == victim:
            group.kill(victim)
            own.context.end("its death")  # which its engine, that lives on, does not know of by itself
        gpu.synchronize(own.stream)
        if handle is not None:
            with pytest.raises(GroupError):
                own.context.wait(handle)
            own.context.release(handle)
        with pytest.raises(PeerLostError, match="gone|this rank" if rank.rank == victim else f"^rank {victim} "):
            own.allreduce(ONES, "later")
        own.close()

    with recorded_stderr(), Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_before_it_has_a_tensor_on_a_gpu(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int) -> None:
    dies(gpu, nccl, victim, hosts, lambda rank, own: begin(own) if rank.rank != victim else None)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_while_a_call_is_launched(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], victim: int) -> None:
    def until(rank: Rank, own: OnGpu) -> int:
        own.allreduce(ONES, "first")
        nccl.fail("late launch", rank.rank)
        return begin(own)

    dies(gpu, nccl, victim, hosts, until)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (3,), (2, 1)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_while_kernels_run_and_nobody_waits(
    gpu: Gpu,
    nccl: Nccl,
    hosts: tuple[int, ...],
    victim: int,
) -> None:
    """No thread is in horo: the program may wait for its GPU, which only horo can free."""

    def until(rank: Rank, own: OnGpu) -> None:
        own.allreduce(ONES, "first")
        if rank.rank == victim:
            nccl.fail("hang", victim)
        own.finish(begin(own))

    dies(gpu, nccl, victim, hosts, until)
    assert nccl.counts()["aborts"] == sum(hosts)


def works_behind_gates(gpu: Gpu, nccl: Nccl) -> tuple[Group, list[OnGpu], list[ctypes.c_int]]:
    """Two ranks whose calls are over while their GPUs stand still, until the gates are opened."""
    gates = []

    def body(rank: Rank) -> OnGpu:
        own = on_gpu(rank, gpu, nccl)
        gates.append(gpu.hold(own.stream))
        own.finish(begin(own))
        return own

    group = Group((2,))
    return group, group.run(body), gates


def test_a_rank_that_leaves_waits_for_its_gpu(gpu: Gpu, nccl: Nccl) -> None:
    group, owners, gates = works_behind_gates(gpu, nccl)
    group.destroy_while(lambda: gpu.open(*gates))
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (2, 0)
    for own in owners:
        own.close()


def test_a_rank_leaves_behind_another_while_its_gpu_is_at_work(gpu: Gpu, nccl: Nccl) -> None:
    """Its thread looks after the GPU, and the group has ended in order, when it is told to leave."""
    group, owners, gates = works_behind_gates(gpu, nccl)
    first = threading.Thread(target=group.leave, args=(0,))
    first.start()
    wait_for(lambda: group.contexts[1].health() is not None)
    second = threading.Thread(target=group.leave, args=(1,))
    second.start()
    for gate in gates:
        gpu.open(gate)
    for leaving in (first, second):
        leaving.join(60)
        assert not leaving.is_alive()
    for own in owners:
        own.close()


def test_a_rank_that_leaves_while_others_wait_for_nccl_is_told_of(gpu: Gpu, nccl: Nccl) -> None:
    submitted = threading.Event()

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        if rank.rank == 0:
            handle = begin(own)
            submitted.set()
            ends_with(own, handle, AbortedError, r"rank 1 \(.*\) has shut horo down; pending here: .*'x'")
        else:
            assert submitted.wait(60)
            group.leave(1)
        own.close()

    group = Group((2,))
    group.run(body)
    group.leave(0)


def test_a_job_after_a_job_has_a_communicator_of_its_own(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        assert own.allreduce(ONES).tolist() == [2.0] * 5
        own.close()

    for _ in range(3):
        with Group((2,)) as group:
            group.run(body)
    assert nccl.counts()["destroys"] == 6


# ---- Random schedules ----

CALLS = ("float32", "average", "int16", "broadcast", "rows", "host", "scatter")


@pytest.mark.parametrize("hosts", [(2,), (2, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order_on_any_way(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    size = sum(hosts)
    total = size * (size + 1) / 2

    def one(rank: Rank, own: OnGpu, name: str, length: int) -> Callable[[], None]:
        kind, value = name.partition(":")[0], rank.rank + 1
        mine = np.full((length, 2), value, np.float32)
        if kind == "host":
            kept = mine.copy()
            handle = rank.submit("allreduce", name, [kept], reduce_op=SUM)

            def finish() -> None:
                rank.finish(handle)
                np.testing.assert_array_equal(kept, np.full_like(mine, total))

            return finish
        if kind == "rows":
            handle, _, _ = own.submit("allgather", name, mine)

            def finish_rows() -> None:
                expected = np.repeat(np.arange(size) + 1, length * 2)
                np.testing.assert_array_equal(own.gathered(handle, mine), expected)

            return finish_rows
        output, options, expected = None, {"reduce_op": SUM}, np.full_like(mine, total)
        if kind == "average":
            options, expected = {"reduce_op": context.REDUCE_OPS["average"]}, np.full_like(mine, total / size)
        elif kind == "int16":
            mine, expected = mine.astype(np.int16), expected.astype(np.int16)
        elif kind == "broadcast":
            options, expected = {"root_rank": size - 1}, np.full_like(mine, size)
        elif kind == "scatter":
            share = len(np.array_split(np.arange(length), size)[rank.rank])
            output = np.zeros((share, 2), np.float32)
            expected = np.full_like(output, total)
        op = {"broadcast": "broadcast", "scatter": "reducescatter"}.get(kind, "allreduce")
        handle, _, target = own.submit(op, name, mine, output, **options)

        def finish_target() -> None:
            own.finish(handle)
            gpu.synchronize(own.stream)
            np.testing.assert_allclose(gpu.get(target, expected), expected, rtol=1e-6)

        return finish_target

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        order = random.Random(1000 * seed + rank.rank)
        lengths = random.Random(seed)
        for step in range(3):
            names = [(f"{kind}:{step}:{i}", lengths.randrange(300)) for kind in CALLS for i in range(3)]
            order.shuffle(names)
            finishers = [one(rank, own, name, length) for name, length in names]
            order.shuffle(finishers)
            for finish in finishers:
                finish()
        own.close()

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body)
    assert nccl.counts()["launched"] > 0
