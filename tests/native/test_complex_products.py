"""Complex numbers: their products are known answers however they travel, and a number is never cut in two."""

from typing import Any

import numpy as np
import pytest
from ranks import NUMPY_OF_COMPLEX, Rank, on_ranks
from test_carry import check_paths
from test_join import join

from horo.core import context
from horo.errors import UnsupportedError

Array = np.ndarray[Any, Any]


def stored(values: Array, dtype: str) -> Array:
    """As an array that the core reduces as this dtype; numpy has no complex32."""
    kind = np.dtype(NUMPY_OF_COMPLEX[dtype])
    if kind.kind == "c":
        return values.astype(kind)
    result = np.empty(values.shape, kind)
    result["real"], result["imag"] = values.real, values.imag
    return result


PRODUCT = context.REDUCE_OPS["product"]

by_dtype = pytest.mark.parametrize("dtype", NUMPY_OF_COMPLEX)


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
    mine = stored(np.ones(4), dtype)
    for op in ("min", "max", "adasum"):
        if (op, kind) == ("adasum", "reducescatter"):
            continue  # refused for all dtypes
        with pytest.raises(
            UnsupportedError,
            match=f"{kind} 'x': this op is not offered for {dtype}; complex numbers can be reduced with Sum, "
            "Average or Product",
        ):
            rank.submit(kind, "x", [mine], outputs=[mine.copy()], reduce_op=context.REDUCE_OPS[op])
