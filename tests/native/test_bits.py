"""Bit by bit: BAND, BOR and BXOR of integers and bool, in every reduction."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from ranks import NUMPY_OF_DTYPE, Rank, describe, on_ranks

from horo.core import context
from horo.errors import MismatchError, UnsupportedError

OPS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
DTYPES = [name for name, dtype in NUMPY_OF_DTYPE.items() if np.dtype(dtype).kind in "iub"]


def values(dtype: str, rank: int, count: int) -> np.ndarray:
    drawn = np.random.default_rng([rank, count]).integers(0, 256, count * 8, np.uint8)
    return drawn[:count] > 127 if dtype == "bool" else drawn.view(dtype)[:count]


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks([1], [3], [1, 1], [2, 1, 2], segment_bytes=1 << 12)
def test_every_reduction_has_the_bits_of_numpy(rank: Rank, dtype: str) -> None:
    for count in (1, 5, 4099, 20_000):
        every = [values(dtype, r, count) for r in range(rank.size)]
        for op, function in OPS.items():
            wanted = functools.reduce(function, every)
            assert np.array_equal(rank.allreduce(every[rank.rank].copy(), f"a{count}", op), wanted)
            got = np.zeros_like(wanted)
            tensors = describe([every[rank.rank]], [got])
            reduce_op = context.REDUCE_OPS[op]
            rank.context.run(context.RequestBuffer.of(context.OPS["reduce"], "r", tensors, reduce_op=reduce_op))
            assert rank.rank != 0 or np.array_equal(got, wanted)


@on_ranks([3], [1, 2])
def test_a_rank_that_has_joined_changes_no_bit(rank: Rank) -> None:
    if rank.rank != 1:
        for op, function in OPS.items():
            for dtype in DTYPES:
                mine = [values(dtype, r, 9) for r in (0, 2)]
                got = rank.allreduce(mine[rank.rank // 2].copy(), f"{op} {dtype}", op)
                assert np.array_equal(got, function(*mine)), (op, dtype)
    rank.context.finish(rank.context.start_join(0))


@on_ranks([2])
def test_what_has_no_bits_is_refused(rank: Rank) -> None:
    one, two = np.ones(2, np.float32), np.ones(2, np.int32)
    with pytest.raises(UnsupportedError, match="allreduce 'x': this op is not offered for float32; bits are those of"):
        rank.allreduce(one, "x", "band")
    with pytest.raises(UnsupportedError, match="allreduce 'y': bits cannot be scaled"):
        rank.allreduce(two, "y", "bxor", postscale=2.0)
    with pytest.raises(MismatchError, match=r"op BAND, rank 1 .* op BOR"):
        rank.allreduce(two, "z", ["band", "bor"][rank.rank])
