"""Collectives by NCCL on tensors of GPUs. Doubles of the CUDA driver and of NCCL stand for both."""

from typing import Any

import numpy as np
import pytest
from device_group import Gpu, Nccl, on_gpu
from ranks import SUM, Rank, on_ranks, run_ranks

from horo.core import context

MIN, HALF = context.REDUCE_OPS["min"], context.DTYPES["float16"]
HOSTS = [(2,), (1, 1), (3,), (2, 1)]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("length", [0, 1, 1000, 70_001])
def test_nccl_takes_values_behind_the_programs_work_and_it_goes_on_behind_the_result(
    gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], length: int
) -> None:
    """No value passes the host, and no thread waits for the GPU: the call is over while the GPU stands still."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        own = on_gpu(rank, gpu, nccl)
        array = np.full(length, rank.rank, np.float32)
        gate = gpu.hold_stream(own.stream)
        gpu.add_floats(own.stream, gpu.put(array), array.nbytes, 1.0)
        handle, source, target = own.submit("allreduce", "x", array, reduce_op=SUM)
        own.finish(handle)
        gpu.add_floats(own.stream, target, array.nbytes, 0.5)
        np.testing.assert_array_equal(gpu.get(source, array), array)
        gpu.open(gate)
        gpu.synchronize(own.stream)
        own.close()
        np.testing.assert_array_equal(gpu.get(source, array), np.full(length, size * (size - 1) / 2 + 0.5))

    run_ranks(body, hosts)
    assert gpu.counts()["pinned_ever"] == 0
    assert nccl.counts()["launched"] == (size if length else 0)
    assert (nccl.counts()["destroys"], nccl.counts()["aborts"]) == (size, 0)


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@on_ranks((2,), (1, 1, 1))
def test_every_reduction_of_every_dtype_of_nccl(rank: Rank, gpu: Gpu, nccl: Nccl, op: str) -> None:
    """Averages of integers are staged: NCCL divides what it sums as floats only."""
    size = rank.size
    numbers = [np.arange(50) % 5 * 4 + 4 * (r + 1) for r in range(size)]  # of which an average is exact in all dtypes
    if op == "product":
        numbers = [each // 4 for each in numbers]
    integers = ["uint8", "int8", "int32", "int64"]
    expected = {
        "sum": sum(numbers), "average": sum(numbers) / size, "min": np.min(numbers, axis=0),
        "max": np.max(numbers, axis=0), "product": np.prod(numbers, axis=0),
    }[op]  # fmt: skip
    chosen = [*(integers if op != "product" else integers[2:]), "float16", "float32", "float64"]
    own = on_gpu(rank, gpu, nccl)
    for name in chosen:
        values = own.allreduce(numbers[rank.rank].astype(name), name, op)
        tolerance = 2e-3 if name == "float16" and op == "average" else 1e-6
        np.testing.assert_allclose(values.astype(float), expected.astype(name), rtol=tolerance, err_msg=name)
    own.close()
    rank.meet()
    assert nccl.counts()["launched"] == size * (3 if op == "average" else len(chosen))


@on_ranks((3, 1))
def test_factors_are_one_premultiplied_sum(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    own = on_gpu(rank, gpu, nccl)
    for dtype in ("float16", "float32", "float64"):
        mine = np.full(9, rank.rank + 1, dtype)
        assert own.allreduce(mine, dtype, "average", prescale=2.0, postscale=8.0).tolist() == [40.0] * 9
    bits = np.array([0x3F80, 0x4000], np.int16)  # 1 and 2
    scaled = {"dtype": context.DTYPES["bfloat16"], "prescale": 0.5, "postscale": 3.0}
    assert own.allreduce(bits, "bfloat16", **scaled).view(np.uint16).tolist() == [0x40C0, 0x4140]  # 6 and 12
    own.close()
    rank.meet()
    assert nccl.counts()["launched"] == 16


CALLS = 900


@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
@on_ranks((3,), cycle_time_us=200_000)
def test_a_batch_of_many_calls_is_one_launch(rank: Rank, gpu: Gpu, nccl: Nccl, op: str) -> None:
    """A reduction of rows that cannot be equally many is a call for each rank."""
    own = on_gpu(rank, gpu, nccl)
    mine = np.arange(4, dtype=np.float32)
    output = np.zeros(2 if rank.rank == 0 else 1, np.float32) if op == "reducescatter" else np.zeros_like(mine)
    begun = [own.submit(op, f"x{n}", mine, output, reduce_op=SUM) for n in range(CALLS)]
    for handle, _, target in begun:
        own.finish(handle)
        first = 0 if op == "allreduce" or rank.rank == 0 else rank.rank + 1
        gpu.synchronize(own.stream)
        assert gpu.get(target, output).tolist() == (mine * 3)[first : first + len(output)].tolist()
    own.close()
    rank.meet()
    assert nccl.counts()["launched"] == CALLS * 3 * (3 if op == "reducescatter" else 1)


@on_ranks(*HOSTS)
def test_broadcast_and_reducescatter(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    """The rows of a reduce-scatter need not be equally many."""
    size, own = rank.size, on_gpu(rank, gpu, nccl)
    for root in range(size):
        got = own.run("broadcast", f"b{root}", np.full(3, 10 * rank.rank, np.int16), root_rank=root)
        np.testing.assert_array_equal(got, np.full(3, 10 * root))
    got = own.run("broadcast", "elsewhere", np.full(3, rank.rank, np.int16), np.zeros(3, np.int16))
    np.testing.assert_array_equal(got, np.zeros(3))
    for rows in (size, size + 1, 1, 0, 2 * size):
        mine = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
        wanted = np.array_split(mine * (size * (size + 1) / 2), size)[rank.rank]
        got = own.run("reducescatter", f"r{rows}", mine * (rank.rank + 1), np.zeros_like(wanted), reduce_op=SUM)
        np.testing.assert_array_equal(got, wanted)
    own.close()
    assert gpu.counts()["pinned_ever"] == 0


V = np.arange(8) % 3 + 1
"""Of rank 0; rank 1 has twice as much."""
STAGED = {
    "a dtype that it has not": ("allreduce", np.int16, {"reduce_op": SUM}, 3 * V),
    "bool": ("allreduce", np.bool_, {"reduce_op": MIN}, V > 0),
    "an average of integers": ("allreduce", np.int32, {"reduce_op": context.REDUCE_OPS["average"]}, 3 * V // 2),
    "a factor of integers": ("reducescatter", np.int32, {"reduce_op": SUM, "postscale": 3.0}, 9 * V),
    "a factor beside a minimum": ("allreduce", np.float32, {"reduce_op": MIN, "prescale": 3.0}, 3 * V),
    "values that travel as float16": ("allreduce", np.float32, {"reduce_op": SUM, "wire_dtype": HALF}, 3 * V),
    "a product of complex numbers": (
        "allreduce",
        np.complex64,
        {"reduce_op": context.REDUCE_OPS["product"]},
        2 * V * V,
    ),
    "Adasum": ("allreduce", np.float32, {"reduce_op": context.REDUCE_OPS["adasum"]}, 1.5 * V),
    "allgather": ("allgather", np.float32, {}, np.concatenate([V, 2 * V])),
    "alltoall": ("alltoall", np.float32, {"splits": (4, 4)}, np.concatenate([V[:4], 2 * V[:4], V[4:], 2 * V[4:]])),
}
"""What NCCL cannot do as horo means it, or with results whose size only all ranks together know."""


@pytest.mark.parametrize("case", STAGED.values(), ids=STAGED)
@on_ranks((1, 1))
def test_what_nccl_lacks_is_staged(
    rank: Rank, gpu: Gpu, nccl: Nccl, case: tuple[str, type, dict[str, Any], np.ndarray]
) -> None:
    op, dtype, options, expected = case
    own = on_gpu(rank, gpu, nccl)
    mine = (V * (rank.rank + 1)).astype(dtype)
    output = mine[:4].copy() if op == "reducescatter" else None
    if op in ("allgather", "alltoall"):
        found = own.gathered(own.submit(op, "x", mine, **options)[0], mine)
    else:
        found = own.run(op, "x", mine, output, **options)
    if op in ("reducescatter", "alltoall"):  # each rank has a part
        expected = np.split(expected, 2)[rank.rank]
    np.testing.assert_array_equal(found, expected.astype(dtype))
    own.close()
    rank.meet()
    assert nccl.counts()["launched"] == 0
    assert gpu.counts()["pinned_ever"] > 0
