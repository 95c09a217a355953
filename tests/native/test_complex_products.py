"""Complex numbers: their products are known answers however they travel, and a number is never cut in two."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from ranks import NUMPY_OF_COMPLEX, Rank, on_ranks
from test_carry import check_paths
from test_join import join
from test_reducescatter import rows_of, scatter

from horo.core import context
from horo.errors import UnsupportedError

Array = np.ndarray[Any, Any]

UNITS = np.array([1, 1j, -1, -1j])
POWERS = np.array([1, 1 + 1j, 2j, -2 + 2j, -4, -4 - 4j, -8j, 8 - 8j, 16, 16 + 16j, 32j, -32 + 32j, -64])
"""Of 1 + i."""


def _exponents(rank: int, count: int, salt: int) -> tuple[Array, Array]:
    index = np.arange(count) + salt
    return (index + rank * (index % 5)) % 4, (index // 3 + rank) % 3 == 0


def factor(rank: int, count: int, salt: int = 0) -> Array:
    """The contribution of a rank, as complex128."""
    of_i, of_other = _exponents(rank, count, salt)
    result: Array = UNITS[of_i] * POWERS[of_other.astype(int)]
    return result


def product(ranks: Iterable[int], count: int, salt: int = 0) -> Array:
    """What these ranks give together, as complex128."""
    of_i, of_other = np.zeros(count, int), np.zeros(count, int)
    for rank in ranks:
        more = _exponents(rank, count, salt)
        of_i += more[0]
        of_other += more[1]
    result: Array = UNITS[of_i % 4] * POWERS[of_other]
    return result


def stored(values: Array, dtype: str) -> Array:
    """As an array that the core reduces as this dtype; numpy has no complex32."""
    kind = np.dtype(NUMPY_OF_COMPLEX[dtype])
    if kind.kind == "c":
        return values.astype(kind)
    result = np.empty(values.shape, kind)
    result["real"], result["imag"] = values.real, values.imag
    return result


def read(array: Array) -> Array:
    """The inverse: complex128."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array["real"].astype(np.float64) + 1j * array["imag"].astype(np.float64)


PRODUCT = context.REDUCE_OPS["product"]

by_dtype = pytest.mark.parametrize("dtype", NUMPY_OF_COMPLEX)


@by_dtype
@on_ranks([1], [2], [3], [1, 1], [2, 2], [1, 1, 1])
def test_factors_multiply_both_parts(rank: Rank, dtype: str) -> None:
    for count in (5, 3000):
        for prescale, postscale in ((0.5, 1.0), (1.0, -2.0), (0.5, 4.0)):
            wanted = product(range(rank.size), count) * prescale**rank.size * postscale
            options = {"prescale": prescale, "postscale": postscale}
            mine = stored(factor(rank.rank, count), dtype)
            (rows,) = scatter(rank, [mine], f"s{count} {options}", "product", **options)
            got = rank.allreduce(mine, f"{count} {options}", "product", **options)
            assert np.array_equal(read(got), wanted)
            assert np.array_equal(read(rows), wanted[rows_of(count, rank.size, rank.rank)])


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 2]], ids=str)
@by_dtype
def test_on_two_hosts_the_bits_do_not_depend_on_the_path(hosts: list[int], dtype: str) -> None:
    random = np.random.default_rng(7)
    inputs = [stored(random.standard_normal(300) + 1j * random.standard_normal(300), dtype) for _ in range(sum(hosts))]
    wanted: dict[str, Any] = {"reduce_op": PRODUCT, "prescale": 0.3, "postscale": 0.7}
    check_paths(hosts, inputs, wanted)


@on_ranks([2])
def test_one_of_a_joined_rank_multiplies_by_the_formula(rank: Rank) -> None:
    """(inf + 0i)(1 + 0i) is (inf * 1 - 0 * 0) + (inf * 0 + 0 * 1)i: no factor keeps the zero beside infinity."""
    if rank.rank == 0:
        got = rank.allreduce(np.full(3, complex(np.inf, 0)), "x", "product")
        assert np.all(got.real == np.inf) and np.all(np.isnan(got.imag))
    join(rank)


@pytest.mark.parametrize("kind", ["allreduce", "reducescatter"])
@by_dtype
@on_ranks([2])
def test_what_has_no_meaning_is_refused(rank: Rank, dtype: str, kind: str) -> None:
    mine = stored(factor(rank.rank, 4), dtype)
    for op in ("min", "max", "adasum"):
        if (op, kind) == ("adasum", "reducescatter"):
            continue  # refused for all dtypes
        with pytest.raises(
            UnsupportedError,
            match=f"{kind} 'x': this op is not offered for {dtype}; complex numbers can be reduced with Sum, "
            "Average or Product",
        ):
            rank.submit(kind, "x", [mine], outputs=[mine.copy()], reduce_op=context.REDUCE_OPS[op])
