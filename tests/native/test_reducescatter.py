"""Reduce-scatters: each rank gets its rows of what an allreduce would give all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ranks import Rank, on_ranks

from horo.core import context


def rows_of(rows: int, size: int, rank: int) -> slice:
    """The first ranks have one row more."""
    base, longer = divmod(rows, size)
    first = rank * base + min(rank, longer)
    return slice(first, first + base + (rank < longer))


def scatter(
    rank: Rank, arrays: Sequence[np.ndarray], name: str = "s", op: str = "sum", **options: Any
) -> list[np.ndarray]:
    outputs = [np.full_like(array[rows_of(len(array), rank.size, rank.rank)], 99) for array in arrays]
    kept = [array.copy() for array in arrays]
    options["reduce_op"] = context.REDUCE_OPS[op]
    rank.finish(rank.submit("reducescatter", name, arrays, outputs=outputs, **options))
    for before, array in zip(kept, arrays, strict=True):
        assert np.array_equal(before, array)
    return outputs


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@on_ranks([2], [4], [1, 1], [2, 2])
def test_on_one_host_and_on_two_the_bits_are_those_of_an_allreduce(rank: Rank, dtype: type) -> None:
    for rows in (9, 4097, 60_000):
        values = np.random.default_rng(rank.rank).standard_normal((rows, 3)).astype(dtype)
        for op, prescale in (("sum", 1.0), ("average", 0.3)):
            whole = rank.allreduce(values.copy(), f"a{rows}{op}", op, prescale=prescale)
            (got,) = scatter(rank, [values], f"s{rows}{op}", op, prescale=prescale)
            assert np.array_equal(got, whole[rows_of(rows, rank.size, rank.rank)])


@on_ranks([70], [40, 30], segment_bytes=1 << 12, spin_us=0)
def test_more_ranks_than_a_slot_has_lines(rank: Rank) -> None:
    for rows in (3, 141, 4000):
        (got,) = scatter(rank, [np.arange(rows) * (rank.rank + 1)], f"{rows}")
        total = rank.size * (rank.size + 1) // 2
        assert np.array_equal(got, np.arange(rows)[rows_of(rows, rank.size, rank.rank)] * total)
