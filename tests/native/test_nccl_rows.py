"""Allgather and alltoall by NCCL: results whose size is known only when all ranks have called."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, describe, recorded_stderr

from horo import _core
from horo._core_libraries import copy_back, copy_result
from horo.errors import GroupError, PeerLostError, UsageError

HOSTS = [(2,), (1, 1), (3,), (2, 1)]
DTYPES: dict[str, Any] = {"bool": np.bool_, "int16": np.int16, "float64": np.float64, "float32": np.float32}


def both(hosts: tuple[int, ...], body: Callable[[Rank], None]) -> None:
    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("rows", [(2, 2, 2), (1, 0, 3), (0, 5000, 1), (0, 0, 0)], ids=str)
def test_rows_of_all_ranks_in_their_order(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], rows: tuple[int, ...]) -> None:
    size = sum(hosts)
    expected = np.concatenate([np.full((rows[r], 3), r + 1) for r in range(size)])

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for name, dtype in DTYPES.items():
            mine = np.full((rows[rank.rank], 3), rank.rank + 1, dtype)
            handle, _, _ = own.submit("allgather", name, mine)
            found = own.taken(handle, expected.size, mine)
            np.testing.assert_array_equal(found.reshape(-1, 3), expected.astype(dtype))
            own.context.release(handle)
        own.close()

    both(hosts, body)
    equal = len(set(rows[:size])) == 1
    calls = 0 if not any(rows[:size]) else 1 if equal else sum(n > 0 for n in rows[:size])
    assert nccl.counts()["launched"] == size * calls * len(DTYPES)
    assert gpu.counts()["pinned_ever"] == 0


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_for_each_rank(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], seed: int) -> None:
    size = sum(hosts)
    chance = random.Random(seed)
    splits = [[chance.choice((0, 1, 2, 700)) for _ in range(size)] for _ in range(size)]
    pieces = [[np.full((splits[s][d], 2), 10 * s + d, np.float32) for d in range(size)] for s in range(size)]

    def body(rank: Rank) -> None:
        own, r = on_gpu(rank, gpu, nccl), rank.rank
        mine = np.concatenate(pieces[r])
        expected = np.concatenate([pieces[s][r] for s in range(size)])
        handle, _, _ = own.submit("alltoall", "x", mine, splits=splits[r])
        found = own.taken(handle, expected.size, mine)
        np.testing.assert_array_equal(found.reshape(-1, 2), expected)
        own.context.release(handle)
        own.close()

    both(hosts, body)
    assert nccl.counts()["launched"] == 2 * sum(n > 0 for row in splits for n in row)
    assert gpu.counts()["pinned_ever"] == 0


def submit_group(own: OnGpu, op: str, arrays: list[np.ndarray], splits: tuple[int, ...] = ()) -> int:
    tensors = [
        tensor._replace(input=own.gpu.put(array), output=0, splits=splits)
        for tensor, array in zip(describe(arrays, arrays), arrays, strict=True)
    ]
    request = _core.RequestBuffer.of(_core.OPS[op], op, tensors, device=own.device + 1, stream=own.stream)
    return int(own.context.submit(request))


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 1)])
def test_grouped_forms(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own, r = on_gpu(rank, gpu, nccl), rank.rank
        arrays = [np.full(r, r, np.int64), np.full((1, 5), r, np.float32), np.zeros((0, 2), np.int8)]
        handle = submit_group(own, "allgather", arrays)
        rows = np.repeat(np.arange(size), np.arange(size))
        np.testing.assert_array_equal(own.taken(handle, rows.size, arrays[0]), rows)
        np.testing.assert_array_equal(own.taken(handle, 5 * size, arrays[1], 1), np.repeat(np.arange(size), 5))
        assert own.taken(handle, 0, arrays[2], 2).size == 0
        own.context.release(handle)
        arrays = [10 * r + np.arange(size), np.stack([np.full(3, 100 * r + d, np.float64) for d in range(size)])]
        handle = submit_group(own, "alltoall", arrays, (1,) * size)
        np.testing.assert_array_equal(own.taken(handle, size, arrays[0]), 10 * np.arange(size) + r)
        np.testing.assert_array_equal(
            own.taken(handle, 3 * size, arrays[1], 1), np.repeat(100.0 * np.arange(size) + r, 3)
        )
        own.context.release(handle)
        own.close()

    both(hosts, body)


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 1)])
def test_rows_of_a_group_that_travel_in_many_pieces_stay_apart(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...]) -> None:
    """Each rank sends each other one twice in a group of calls."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own, r = on_gpu(rank, gpu, nccl), rank.rank
        arrays = [np.repeat(100 * r + np.arange(size), 3000), np.repeat(0.5 + 100 * r + np.arange(size), 3000)]
        handle = submit_group(own, "alltoall", arrays, (3000,) * size)
        for i, array in enumerate(arrays):
            expected = np.repeat(0.5 * i + 100 * np.arange(size) + r, 3000)
            np.testing.assert_array_equal(own.taken(handle, 3000 * size, array, i), expected)
        own.context.release(handle)
        own.close()

    both(hosts, body)


def test_no_thread_waits_and_results_are_there_behind_any_stream(gpu: Gpu, nccl: Nccl) -> None:
    """The rank takes a result twice, on streams that stand still; what is released then is behind both copies."""

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = np.full(1000, rank.rank, np.float32)
        gates = [gpu.hold(own.stream)]
        handle, _, _ = own.submit("allgather", "x", mine)
        own.context.wait(handle)
        other = gpu.stream()
        gates.append(gpu.hold(other))
        targets = [gpu.put(np.zeros(2000, np.float32)) for _ in range(2)]
        for target, stream in zip(targets, (other, own.stream), strict=True):
            copy_result(own.context, handle, 0, target, stream)
        own.context.release(handle)
        for gate in gates:
            gpu.open(gate)
        for target, stream in zip(targets, (other, own.stream), strict=True):
            gpu.synchronize(stream)
            np.testing.assert_array_equal(gpu.get(target, np.zeros(2000, np.float32)), np.repeat([0, 1], 1000))
        gpu.close(other)
        own.close()

    both((2,), body)


def test_results_that_nobody_takes_are_given_back(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for number in range(3):
            handle, _, _ = own.submit("allgather", f"x{number}", np.ones(10, np.float32))
            own.context.wait(handle)
            if number == 0:
                copy_back(own.context, handle, own.stream)
            if number < 2:
                own.context.release(handle)  # the last one ends with the job
        assert own.allreduce(np.ones(4, np.float32)).tolist() == [2.0] * 4
        own.close()

    both((2,), body)  # and the double has nothing left


def test_a_gpu_without_memory_has_the_host_stand_in(gpu: Gpu, nccl: Nccl) -> None:
    gpu.limit_rooms(100)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        for number in range(3):
            mine = np.full(1000, rank.rank + number, np.int32)
            handle, _, _ = own.submit("allgather", "x", mine)
            np.testing.assert_array_equal(own.taken(handle, 2000, mine), np.repeat([number, 1 + number], 1000))
            own.context.release(handle)
        own.close()

    both((2,), body)
    assert nccl.counts()["launched"] == 2 * 3
    assert gpu.counts()["pinned_ever"] > 0


def test_what_stands_in_is_used_again_when_the_results_have_been_copied(gpu: Gpu, nccl: Nccl) -> None:
    """Their copy waits for a stream that stands still, while the next call wants pinned memory."""
    gpu.limit_rooms(100)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        mine = np.arange(1000, dtype=np.float32)
        handle, _, _ = own.submit("allgather", "x", mine)
        own.context.wait(handle)
        other = gpu.stream()
        gate = gpu.hold(other)
        target = gpu.put(np.zeros(1000, np.float32))
        copy_result(own.context, handle, 0, target, other)
        own.context.release(handle)
        assert np.all(own.run("allreduce", "y", np.full(2000, 5, np.int16), reduce_op=0) == 5)
        gpu.open(gate)
        gpu.synchronize(other)
        np.testing.assert_array_equal(gpu.get(target, mine), mine)
        gpu.close(other)
        own.close()

    both((1,), body)


def test_no_memory_at_all_ends_the_group_with_the_size(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(np.ones(4, np.float32))
        gpu.limit_rooms(100)
        gpu.fail(host_bytes=100)
        handle, _, _ = own.submit("allgather", "x", np.ones(1000, np.float32))
        with pytest.raises(PeerLostError, match=r"a failure of NCCL: no 8000 bytes on the GPU for values: cuMemAlloc"):
            own.context.wait(handle)
        own.context.release(handle)
        own.close()

    with recorded_stderr():
        both((2,), body)


@pytest.mark.parametrize("op", ["allgather", "alltoall"])
@pytest.mark.parametrize("place", ["call", "group end", "run", "late launch", "hang"])
def test_a_call_that_fails_or_never_comes_ends_the_group_and_gives_memory_back(
    gpu: Gpu, nccl: Nccl, op: str, place: str
) -> None:
    splits = (5, 5) if op == "alltoall" else ()

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        own.allreduce(np.ones(4, np.float32))
        if rank.rank == 1:
            nccl.fail(place, 1)
        rank.barrier("armed")

        def call(name: str) -> None:
            handle, _, _ = own.submit(op, name, np.ones(10, np.float32), splits=splits)
            try:
                own.context.wait(handle)
                copy_back(own.context, handle, own.stream)
            finally:
                own.context.release(handle)

        with pytest.raises(GroupError):
            call("first")  # of a rank whose call has been launched it is done
            if rank.rank == 0 and place in ("late launch", "hang"):
                own.context.end("giving up")
            for number in range(10_000):
                call(f"x{number}")
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr():
        both((2,), body)


def test_pinned_memory_is_used_again_only_behind_the_copies_from_it(gpu: Gpu, nccl: Nccl) -> None:
    """However many results wait there for a stream that stands still, while another one goes on."""
    gpu.limit_rooms(100)

    def body(rank: Rank) -> None:
        own, other = on_gpu(rank, gpu, nccl), gpu.stream()
        arrays = [np.full(1000, number, np.float32) for number in range(8)]
        begun = [own.submit("allgather", f"x{number}", array)[0] for number, array in enumerate(arrays)]
        targets = [gpu.put(np.zeros_like(array)) for array in arrays]
        for handle in begun:
            own.context.wait(handle)
        gate = gpu.hold(own.stream)
        for handle, target in zip(begun, targets, strict=True):
            copy_result(own.context, handle, 0, target, own.stream)
            own.context.release(handle)
        for number, array in enumerate(arrays):
            handle, _, _ = own.submit("allgather", f"y{number}", array + 100, stream=other)
            own.context.wait(handle)
            copy_result(own.context, handle, 0, gpu.put(array), other)
            gpu.synchronize(other)
            own.context.release(handle)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        for target, array in zip(targets, arrays, strict=True):
            np.testing.assert_array_equal(gpu.get(target, array), array)
        gpu.close(other)
        own.close()

    both((1,), body)


def test_results_that_are_not_there_are_refused(gpu: Gpu, nccl: Nccl) -> None:
    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        handle, _, _ = own.submit("allgather", "x", np.ones(10, np.float32))
        own.context.wait(handle)
        for index in (-1, 1):
            with pytest.raises(UsageError, match=f"handle {handle} has no result {index} on a GPU"):
                copy_result(own.context, handle, index, 0, own.stream)
        own.context.release(handle)
        staged, _, _ = own.submit("allreduce", "y", np.ones(10, np.float32), reduce_op=_core.REDUCE_OPS["adasum"])
        with pytest.raises(UsageError, match="has no result 0 on a GPU"):
            copy_result(own.context, staged, 0, 0, own.stream)
        own.finish(staged)
        own.close()

    both((1,), body)
