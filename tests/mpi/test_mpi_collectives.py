"""All collectives with data between hosts by MPI; expected values come from arithmetic."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
from adasum_oracle import adasum, tolerance
from mpi_job import MpiRank
from ranks import NUMPY_OF_DTYPE

from horo.core import context
from horo.core.context import RequestBuffer, Tensor
from horo.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = [1, 7, 1000, 70_001]
DTYPES = ["uint8", "float16", "float32", "float64"]
"""One of each width that messages are cut at."""


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    """What a rank contributes: so small that every dtype holds the sums exactly."""
    return (1 + (np.arange(count) * 7 + rank * 3) % 5).astype(NUMPY_OF_DTYPE[dtype])


@functools.cache
def expected(size: int, count: int, dtype: str) -> np.ndarray:
    parts = [values(rank, count, dtype) for rank in range(size)]
    array: np.ndarray = np.sum(parts, axis=0, dtype=NUMPY_OF_DTYPE[dtype])
    array.setflags(write=False)
    return array


def assert_same_bits(rank: MpiRank, array: np.ndarray) -> None:
    assert len({bytes(told) for told in rank.everybody(array.tobytes())}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(rank: MpiRank, dtype: str) -> None:
    for count in COUNTS:
        array = values(rank.rank, count, dtype)
        rank.allreduce(array, name=f"{dtype} {count}")
        assert np.array_equal(array, expected(rank.size, count, dtype))


def test_a_group_of_mixed_tensors_small_and_large(rank: MpiRank) -> None:
    kinds = [("float32", 3), ("int64", 10), ("float32", 300_000), ("float32", 0), ("float16", 11), ("float32", 5)]
    arrays = [values(rank.rank, count, dtype) for dtype, count in kinds]
    rank.finish(rank.submit("allreduce", "mixed", arrays, reduce_op=context.REDUCE_OPS["sum"]))
    for array, (dtype, count) in zip(arrays, kinds, strict=True):
        assert np.array_equal(array, expected(rank.size, count, dtype) if count else array)


def test_large_floats_give_the_sum_and_the_same_bits_everywhere(rank: MpiRank) -> None:
    count = (1 << 20) + 3
    inputs = [np.random.default_rng(r).standard_normal(count, np.float32) for r in range(rank.size)]
    array = inputs[rank.rank].copy()
    rank.allreduce(array, name="large")
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    magnitude = np.sum(np.abs(inputs), axis=0, dtype=np.float64)
    assert np.all(np.abs(array - exact) <= magnitude * rank.size * 2.0**-24)
    assert_same_bits(rank, array)


def test_many_tensors_at_once_are_fused(rank: MpiRank) -> None:
    arrays = [values(rank.rank, 1 + 37 * i, "float32") for i in range(60)]
    sum_op = context.REDUCE_OPS["sum"]
    handles = [rank.submit("allreduce", f"many {i}", [array], reduce_op=sum_op) for i, array in enumerate(arrays)]
    for handle, array in zip(handles, arrays, strict=True):
        rank.finish(handle)
        assert np.array_equal(array, expected(rank.size, array.size, "float32"))


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 11), ("float32", 24), ("float64", 52)])
def test_adasum_of_each_tensor(rank: MpiRank, dtype: str, digits: int) -> None:
    counts = [1, 7, 0, 1000, 70_001]
    seeds = [[[r, n] for n in counts] for r in range(rank.size)]
    inputs = [[np.random.default_rng(seed).standard_normal(seed[1]).astype(dtype) for seed in row] for row in seeds]
    arrays = [array.copy() for array in inputs[rank.rank]]
    rank.finish(rank.submit("allreduce", f"adasum {dtype}", arrays, reduce_op=context.REDUCE_OPS["adasum"]))
    for i, array in enumerate(arrays):
        vectors = [mine[i] for mine in inputs]
        assert np.abs(array - adasum(vectors)).max(initial=0) <= tolerance(vectors, digits)
        assert_same_bits(rank, array)
    lone = values(0, 5000, dtype)  # equal on all ranks
    rank.allreduce(lone, name=f"adasum of equal {dtype}", op="adasum", prescale=2.0, postscale=0.25)
    assert np.array_equal(lone, values(0, 5000, dtype) / 2)


def scattered(rank: MpiRank, whole: np.ndarray) -> np.ndarray:
    """The rows of this rank: the first ranks have one more."""
    return np.array_split(whole, rank.size)[rank.rank]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reducescatter(rank: MpiRank, dtype: str) -> None:
    for count in COUNTS:
        array = values(rank.rank, count, dtype)
        wanted = scattered(rank, expected(rank.size, count, dtype))
        output = np.zeros_like(wanted)
        reduce_op = context.REDUCE_OPS["sum"]
        rank.finish(rank.submit("reducescatter", f"s {dtype} {count}", [array], outputs=[output], reduce_op=reduce_op))
        assert np.array_equal(output, wanted)
        assert np.array_equal(array, values(rank.rank, count, dtype))


@pytest.mark.parametrize("wire", [None, "float16"])
def test_reducescatter_of_a_group_with_factors(rank: MpiRank, wire: str | None) -> None:
    kinds = [("float32", 3, 2), ("float64", 7000, 5), ("float32", 0, 4), ("float32", 1_000_003, 1), ("float64", 1, 9)]
    arrays = [values(rank.rank, rows * columns, dtype).reshape(rows, columns) for dtype, rows, columns in kinds]
    wanted = [
        scattered(rank, expected(rank.size, array.size, str(array.dtype)).reshape(array.shape) * 6 / rank.size)
        for array in arrays
    ]
    outputs = [np.zeros(part.shape, array.dtype) for part, array in zip(wanted, arrays, strict=True)]
    options = {"reduce_op": context.REDUCE_OPS["average"], "prescale": 2.0, "postscale": 3.0}
    wires = [wire] * len(arrays)
    rank.finish(rank.submit("reducescatter", f"group {wire}", arrays, outputs=outputs, wires=wires, **options))
    for output, part in zip(outputs, wanted, strict=True):
        assert np.allclose(output, part, rtol=2e-3 if wire else 1e-6)


@pytest.mark.parametrize("rows", [0, 1, 300, 100_000])
def test_alltoall_of_unequal_splits(rank: MpiRank, rows: int) -> None:
    splits = [[rows * ((s + 2 * d) % 3) for d in range(rank.size)] for s in range(rank.size)]
    array = np.concatenate([np.full((n, 3), 10 * rank.rank + d, np.int16) for d, n in enumerate(splits[rank.rank])])
    tensor = Tensor(array.ctypes.data, 0, array.shape, context.DTYPES["int16"], splits=tuple(splits[rank.rank]))
    for _ in range(2):
        handle = rank.context.submit(RequestBuffer.of(context.OPS["alltoall"], f"exchange {rows}", [tensor]))
        rank.context.wait(handle)
        data, received = rank.context.take_result(handle, 0)
        rank.context.release(handle)
        wanted = [np.full((splits[s][rank.rank], 3), 10 * s + rank.rank, np.int16) for s in range(rank.size)]
        assert received == [len(part) for part in wanted]
        assert np.array_equal(np.frombuffer(data, np.int16).reshape(-1, 3), np.concatenate(wanted))


@pytest.mark.parametrize("count", [0, 1, 1000, 300_001])
def test_broadcast_from_every_rank(rank: MpiRank, count: int) -> None:
    for root in range(rank.size):
        array = values(rank.rank, count, "int64")
        rank.broadcast(array, root, name=f"broadcast {count}")
        assert np.array_equal(array, values(root, count, "int64"))


@pytest.mark.parametrize("rows", [1, 400])
def test_allgather_of_unequal_shares(rank: MpiRank, rows: int) -> None:
    shares = [rows * (r % 3) for r in range(rank.size)]
    array = np.full((shares[rank.rank], 17), rank.rank, np.float32)
    gathered, first_dims = rank.allgather(array, name=f"gather {rows}")
    assert first_dims == shares
    assert np.array_equal(gathered, np.repeat(np.arange(rank.size, dtype=np.float32), shares)[:, None].repeat(17, 1))


def test_groups_whose_rows_differ_each_time_into_memory_of_the_caller(rank: MpiRank) -> None:
    """And into that of the core where an output is too short, which fails on its rank alone."""
    for step in range(6):
        shares = [[(r + step) % 3 * 50, step % 2 * r, 7000 * (r == step % rank.size)] for r in range(rank.size)]
        inputs = [np.full((rows, 3), rank.rank + step, np.int16) for rows in shares[rank.rank]]
        wanted = [
            np.concatenate([np.full((shares[r][i], 3), r + step, np.int16) for r in range(rank.size)]) for i in range(3)
        ]
        outputs = [np.full_like(result, -1) for result in wanted]
        if fails := step == 4 and rank.rank == 1:
            outputs[0] = outputs[0][1:].copy()
        handle = rank.submit("allgather", "rows differ", inputs, outputs=outputs, into=True)
        if fails:
            with pytest.raises(
                UsageError, match=rf"has {wanted[0].nbytes} bytes, but its output has {outputs[0].nbytes}$"
            ):
                rank.finish(handle)
        else:
            rank.finish(handle)
            assert all(np.array_equal(*pair) for pair in zip(outputs, wanted, strict=True))


def test_barriers_and_an_error_that_all_agree_on(rank: MpiRank) -> None:
    rank.barrier()
    with pytest.raises(UsageError, match="rank 0"):
        rank.allreduce(np.zeros(3 + (rank.rank == 0), np.float32), name="shapes differ")
    rank.barrier("afterwards")


def test_nothing_pending_means_no_wake_up(rank: MpiRank) -> None:
    rank.allreduce(np.ones(100_000, np.float32), name="before")
    rank.comm.Barrier()
    sleeps = []
    for _ in range(5):  # on a busy machine a thread may come to rest only in a later round
        before = rank.context.counters()["sleeps"]
        rank.comm.Barrier()  # a round of messages among all ranks: long for a leader that looks every 20 us
        for _ in range(50):
            rank.comm.Barrier()
        sleeps.append(rank.context.counters()["sleeps"] - before)
    assert min(sleeps) <= 2, sleeps


def test_a_forked_child_is_told_and_does_no_harm(rank: MpiRank) -> None:
    child = os.fork()
    if child == 0:
        try:
            rank.allreduce(np.ones(1, np.float32), name="in the child")
        except UsageError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    array = np.ones(100_000, np.float32)
    rank.allreduce(array, name="after the fork")
    assert np.array_equal(array, np.full(100_000, rank.size, np.float32))


def test_data_travels_as_it_was_told_to(rank: MpiRank) -> None:
    before = rank.context.counters()
    rank.allreduce(np.ones(100_000, np.float32), name="counted")
    after = rank.context.counters()
    assert after["link_bytes"] > before["link_bytes"]
    assert after["mpi_stranded"] == 0
