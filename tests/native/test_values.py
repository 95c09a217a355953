"""What comes out of allreduces, to the bit: those that travel as 16-bit floats, and averages of integers."""

from typing import Any

import kernel_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
from ranks import NUMPY_OF_DTYPE, Rank, on_ranks, run_ranks

Array = npt.NDArray[Any]
HALVES, WIDES = ["float16", "bfloat16"], ["float32", "float64"]
SEGMENT_ELEMENTS = (1 << 16) // 2  # of 16-bit floats, in a slot as tests/fabric.py makes it
FLAT_ELEMENTS = 4096 // 2  # up to here one host takes one phase
LINE_ELEMENTS = 64 // 2  # shares are whole cache lines
BORDERS = [FLAT_ELEMENTS, SEGMENT_ELEMENTS, 3 * SEGMENT_ELEMENTS, SEGMENT_ELEMENTS + LINE_ELEMENTS]
COUNTS = [0, 1, 7, *(border + step for border in BORDERS for step in (-1, 0, 1))]
RING_ELEMENTS = 200_000
OPS = {**oracle.OPS, "average": oracle.SUM}

by_half = pytest.mark.parametrize("half_name", HALVES)
by_wide = pytest.mark.parametrize("wide_name", WIDES)


def values_of(count: int, rank: int, wide_name: str, seed: int = 0) -> Array:
    """Any magnitude that float16 holds, and some that it does not."""
    rng = np.random.default_rng([seed, rank, count])
    values: Array = (rng.standard_normal(count) * 10.0 ** rng.integers(-8, 6, count)).astype(wide_name)
    return values


def narrowed(half: oracle.Dtype, values: Array, scale: float = 1.0) -> Array:
    return oracle.convert(half, oracle.DTYPES[values.dtype.name], values, scale)


def widened(half: oracle.Dtype, values: Array, wide_name: str) -> Array:
    return oracle.convert(oracle.DTYPES[wide_name], half, values)


def travel(rank: Rank, values: Array, half_name: str, name: str = "x", op: str = "sum", **factors: float) -> Array:
    """Out of place."""
    result = np.full_like(values, 77)
    before = values.copy()
    number = {"average": 0, **oracle.OPS}[op]
    handle = rank.submit("allreduce", name, [values], outputs=[result], wires=[half_name], reduce_op=number, **factors)
    rank.finish(handle)
    assert values.tobytes() == before.tobytes()
    return result


@by_half
@by_wide
@pytest.mark.parametrize("case", [("sum", 1.0, 1.0), *((op, 0.3, -1.7) for op in OPS)], ids=str)
@on_ranks([1], [2], [3], [5])
def test_one_host_rounds_contributions_and_result_and_nothing_between(
    rank: Rank, case: tuple[str, float, float], wide_name: str, half_name: str
) -> None:
    """Factors come before the first rounding and before the last."""
    half, (op, prescale, postscale) = oracle.DTYPES[half_name], case
    for count in COUNTS:
        inputs = [values_of(count, r, wide_name) for r in range(rank.size)]
        result = travel(rank, inputs[rank.rank], half_name, f"x{count}", op, prescale=prescale, postscale=postscale)
        assert rank.is_common(count, result.tobytes())
        if rank.rank > 0:
            continue
        contributions = [narrowed(half, values, prescale) for values in inputs]
        total = oracle.reduce(half, OPS[op], contributions, postscale / (rank.size if op == "average" else 1))
        assert result.tobytes() == widened(half, total, wide_name).tobytes(), count


@by_half
@by_wide
@on_ranks([1, 1], [2, 2], [1, 2])
def test_two_hosts_round_once_more_where_a_sum_travels(
    rank: Rank, hosts: list[int], wide_name: str, half_name: str
) -> None:
    half = oracle.DTYPES[half_name]
    for count in (1, 300, FLAT_ELEMENTS + 1, SEGMENT_ELEMENTS + 1, RING_ELEMENTS):
        inputs = [values_of(count, r, wide_name) for r in range(rank.size)]
        result = travel(rank, inputs[rank.rank], half_name, f"x{count}")
        assert rank.is_common(count, result.tobytes())
        if rank.rank > 0:
            continue
        contributions = [narrowed(half, values) for values in inputs]
        parts = (contributions[: hosts[0]], contributions[hosts[0] :])
        total = oracle.reduce(half, oracle.SUM, [oracle.reduce(half, oracle.SUM, part) for part in parts])
        assert result.tobytes() == widened(half, total, wide_name).tobytes(), count


@pytest.mark.parametrize("count", [10, SEGMENT_ELEMENTS])
@on_ranks([1], [3], [2, 2], [1, 1, 1], [3, 1], [2, 2, 1])
def test_an_average_of_float16_that_fits_does_not_overflow_on_the_way(rank: Rank, count: int) -> None:
    """The sum of any two does; a contribution that does not fit by itself is infinite."""
    for limit in (65504.0, -60000.0):
        average = travel(rank, np.full(count, limit, np.float32), "float16", f"a{limit}", "average")
        np.testing.assert_allclose(average, np.full(count, limit), rtol=2**-10)
        own = np.full(count, limit, np.float16)
        np.testing.assert_allclose(rank.allreduce(own, f"h{limit}", "average"), np.full(count, limit), rtol=2**-10)
    halved = travel(rank, np.full(count, 1e5, np.float32), "float16", "prescaled", prescale=1 / 1024)
    np.testing.assert_allclose(halved, np.full(count, 1e5 / 1024 * rank.size), rtol=2**-9)
    assert np.isinf(travel(rank, np.full(count, 1e5, np.float32), "float16", "inf", "average")).all()
    assert np.isnan(travel(rank, np.full(count, np.nan, np.float32), "float16", "nan", "average")).all()
    small = travel(rank, np.full(count, 1e5, np.float32), "bfloat16", "wide", "average")
    np.testing.assert_allclose(small, np.full(count, 1e5), rtol=2**-6)


@by_half
@on_ranks([1], [2], [1, 2])
def test_in_place_and_at_any_address_gives_the_same_bits(rank: Rank, half_name: str) -> None:
    for count in (100, FLAT_ELEMENTS + 33, SEGMENT_ELEMENTS + 33):
        values = values_of(count, rank.rank, "float32")
        expected = travel(rank, values, half_name, f"out{count}", prescale=0.5)
        for skip in (1, 2, 3, 5):  # bytes: not even a float's own alignment
            room = np.zeros(count * 4 + 16, np.uint8)
            place = room[skip : skip + count * 4].view(np.float32)
            place[:] = values
            rank.allreduce(place, f"in{count}.{skip}", wires=[half_name], prescale=0.5)
            assert place.tobytes() == expected.tobytes()
            assert not room[:skip].any() and not room[skip + count * 4 :].any()


@by_half
@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 1, 1]], ids=str)
def test_a_link_carries_half_the_bytes_of_float32_and_a_quarter_of_float64(hosts: list[int], half_name: str) -> None:
    count = RING_ELEMENTS

    def body(rank: Rank) -> list[int]:
        carried = []
        for wide_name, wire in (("float32", half_name), ("float32", None), ("float64", half_name), ("float64", None)):
            before = rank.context.counters()["link_bytes"]
            rank.allreduce(np.ones(count, wide_name), f"{wide_name} as {wire}", wires=[wire])
            carried.append(rank.context.counters()["link_bytes"] - before)
        return carried

    carried = [sum(of_rank) for of_rank in zip(*run_ranks(body, hosts), strict=True)]
    ring = 2 * (len(hosts) - 1) * count  # elements that cross links in all
    assert carried == [2 * ring, 4 * ring, 2 * ring, 8 * ring]


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
