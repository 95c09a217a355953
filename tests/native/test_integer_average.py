"""The average of integers is the quotient of integers, truncated toward zero, wherever the ranks are."""

import numpy as np
import pytest
from ranks import NUMPY_OF_DTYPE, Rank, on_ranks

INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
SIZES = [5, 5000]
"""Elements: in one phase, and shared out among the ranks."""


def held(dtype: str, rank: int) -> list[int]:
    """What a rank contributes: small and large values of both signs, as far as the dtype holds them."""
    limits = np.iinfo(dtype)
    values = [1, 10 - rank, rank * 1000003 - 7, limits.max - rank, limits.min + 2 * rank]
    return [value if limits.min <= value <= limits.max else value % 100 for value in values]


def average(dtype: str, ranks: int, place: int) -> int:
    """Of a sum as the dtype holds it: modulo 2^bits."""
    limits = np.iinfo(dtype)
    total = sum(held(dtype, rank)[place] for rank in range(ranks))
    total = (total - limits.min) % (1 << limits.bits) + limits.min
    return abs(total) // ranks * (1 if total >= 0 else -1)


@pytest.mark.parametrize("dtype", INTEGERS)
@on_ranks([1], [3], [7], [1, 1, 1], [4, 3])
def test_the_average_of_integers_is_exact(rank: Rank, dtype: str) -> None:
    expected = [average(dtype, rank.size, place) for place in range(5)]
    assert expected[0] == 1
    for size in SIZES:
        mine = np.resize(np.array(held(dtype, rank.rank), NUMPY_OF_DTYPE[dtype]), size)
        result = rank.allreduce(mine, f"x{size}", "average")
        assert np.array_equal(result, np.resize(np.array(expected, NUMPY_OF_DTYPE[dtype]), size))
