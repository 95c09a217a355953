"""Algorithms between hosts, reductions that travel as 16-bit floats, averages, Adasum: right values, and no hang."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import kernel_oracle as oracle
import native_build
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_answers import adasum, tolerance
from ranks import NUMPY_OF_DTYPE, Rank, on_ranks, over_every_layout, run_ranks

from horo.core import context

Array = npt.NDArray[Any]
ALGORITHMS = ("ring", "doubling", "tree", "chain", "gather ring", "gather doubling", "scatter ring")
REDUCTIONS, BROADCASTS, GATHERS, SCATTER = ALGORITHMS[:2], ALGORITHMS[2:4], ALGORITHMS[4:6], ALGORITHMS[6]
OK, PEER_LOST = 0, -40
EXAMPLES = 100 if native_build.FLAVOUR else 400
FLOAT32, UINT8 = oracle.DTYPES["float32"], oracle.DTYPES["uint8"]
MIXED_CASES = [
    *((oracle.DTYPES[name], oracle.SUM) for name in ("int64", "float32", "float16", "bfloat16", "uint8")),
    *((dtype, oracle.PRODUCT) for dtype in oracle.COMPLEX.values()),
]


def random_values(dtype: oracle.Dtype, count: int, seed: int) -> Array:
    """Finite values of any kind: whole ranges of integers, floats of mixed magnitude."""
    generator = np.random.default_rng(seed)
    if dtype.name == "bool":
        return generator.integers(0, 2, count).astype(np.uint8)
    if dtype.name in oracle.COMPLEX:
        parts = generator.standard_normal(2 * count)
        return oracle.join_parts(dtype, parts[:count], parts[count:])
    if dtype.is_float:
        floats = generator.standard_normal(count) * 10.0 ** generator.integers(-3, 3, count)
        return oracle.stored_form(dtype, floats.astype(np.float32 if dtype.is_half else dtype.storage))
    limits = np.iinfo(dtype.storage)
    integers: Array = generator.integers(limits.min, limits.max, count, dtype=dtype.storage, endpoint=True)
    return integers


@dataclass
class Case:
    """One call by all members: what each has before, and what it must hold afterwards."""

    native: ModuleType
    algorithm: str
    parts: Sequence[int]
    """Elements that belong to each member; of an algorithm without parts, those of the data, in nearly equal ones."""
    dtype: oracle.Dtype = FLOAT32
    op: int = oracle.SUM
    root: int = 0
    piece_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        self.hosts, self.count = len(self.parts), sum(self.parts)
        self.dtype = UINT8 if self.algorithm in GATHERS else self.dtype
        self.inputs = [random_values(self.dtype, self.count, seed=host) for host in range(self.hosts)]
        self._sizes = self.native.ffi.new("size_t[]", [n * self.dtype.storage.itemsize for n in self.parts])
        values = {
            "algorithm": ALGORITHMS.index(self.algorithm), "host_count": self.hosts, "count": self.count,
            "dtype": self.dtype.code, "reduce_op": self.op, "root_host": self.root, "piece_bytes": self.piece_bytes,
        }  # fmt: skip
        if self.algorithm in (*GATHERS, SCATTER):
            values["part_bytes"] = self._sizes
        self.call = self.native.ffi.new("shim_cross_call *", values)

    def mine(self, host: int) -> slice:
        return slice(sum(self.parts[:host]), sum(self.parts[: host + 1]))

    def result(self, host: int) -> Array:
        """In the documented order of summation, rounded after every hop."""
        if self.algorithm in BROADCASTS:
            return self.inputs[self.root]
        if self.algorithm in GATHERS:
            return np.concatenate([values[self.mine(other)] for other, values in enumerate(self.inputs)])
        if self.algorithm == SCATTER:
            return self._round(host + 1, self.mine(host))
        if self.algorithm == "ring":
            lengths = [self.count // self.hosts + (at < self.count % self.hosts) for at in range(self.hosts)]
            ends = np.cumsum(lengths).tolist()
            slices = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
            return np.concatenate([self._round(first, part) for first, part in enumerate(slices)])
        exchanging = 1 << (self.hosts.bit_length() - 1)
        values = [oracle.reduce(self.dtype, self.op, self.inputs[first::exchanging]) for first in range(exchanging)]
        while len(values) > 1:
            values = [oracle.reduce(self.dtype, self.op, values[at : at + 2]) for at in range(0, len(values), 2)]
        return values[0]

    def _round(self, first: int, part: slice) -> Array:
        value: Array = self.inputs[first % self.hosts][part]
        for hop in range(1, self.hosts):
            value = oracle.reduce(self.dtype, self.op, [value, self.inputs[(first + hop) % self.hosts][part]])
        return value

    def is_right(self, host: int, data: Array) -> bool:
        """Of a reduce-scatter, in its own part; the others hold anything."""
        own = data[self.mine(host)] if self.algorithm == SCATTER else data
        return own.tobytes() == self.result(host).tobytes()

    def simulate(
        self, seed: int = 0, link_piece: int = 0, cut: Sequence[int] = (-1, -1, 0)
    ) -> tuple[list[int], list[int], list[Array]]:
        """All members in one thread in random order: statuses, bytes sent, data afterwards."""
        data = [values.copy() for values in self.inputs]
        addresses = self.native.ffi.new("void *[]", [self.native.ffi.from_buffer(values) for values in data])
        statuses, sent = self.native.ffi.new("int[]", self.hosts), self.native.ffi.new("size_t[]", self.hosts)
        done = self.native.lib.shim_cross_simulate(self.call, addresses, link_piece, seed, *cut, statuses, sent)
        assert done == OK
        return list(statuses), list(sent), data


@pytest.mark.parametrize("algorithm", REDUCTIONS)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_infinities_and_nans_are_the_same_bits_everywhere(native: ModuleType, name: str, algorithm: str) -> None:
    dtype = oracle.DTYPES[name]
    wide = np.float32 if dtype.is_half else dtype.storage
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1e30, -1e-30], dtype=wide)
    for op in oracle.OPS.values():
        case = Case(native, algorithm, [15, 15, 14, 14, 14], dtype, op, piece_bytes=64)
        with np.errstate(over="ignore"):
            case.inputs = [oracle.stored_form(dtype, np.roll(np.repeat(specials, 9), 7 * host)) for host in range(5)]
        statuses, _, data = case.simulate()
        assert statuses == [OK] * 5
        assert len({values.tobytes() for values in data}) == 1
        np.testing.assert_array_equal(oracle.is_nan(dtype, data[0]), oracle.is_nan(dtype, case.result(0)))


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_call_under_any_timing_gives_the_documented_bits(native: ModuleType, data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from(ALGORITHMS), "algorithm")
    hosts = data.draw(st.integers(2, 9 if algorithm in (*REDUCTIONS, SCATTER) else 17), "hosts")
    parts = data.draw(st.lists(st.integers(0, 60), min_size=hosts, max_size=hosts), "parts")
    dtype, op = data.draw(st.sampled_from(MIXED_CASES), "dtype, op")
    root, piece = data.draw(st.integers(0, hosts - 1), "root"), data.draw(st.integers(1, 400), "piece_bytes")
    case = Case(native, algorithm, parts, dtype, op, root, piece)
    seed, link_piece = data.draw(st.integers(0, 2**32), "seed"), data.draw(st.integers(0, 50), "link_piece")
    statuses, sent, results = case.simulate(seed, link_piece)
    assert statuses == [OK] * hosts
    assert all(case.is_right(host, values) for host, values in enumerate(results))
    times = {**dict.fromkeys(ALGORITHMS, hosts - 1), "ring": 2 * (hosts - 1)}[algorithm]
    assert algorithm == "doubling" or sum(sent) == times * case.count * case.dtype.storage.itemsize


@pytest.mark.parametrize(
    ("algorithm", "sends"),
    [
        *(("ring", [2 * (hosts - 1) / hosts] * hosts) for hosts in (2, 3, 5, 8)),
        *(("doubling", sends) for sends in ([1, 1], [2, 1, 1], [2] * 4, [3, 3, 2, 2, 1, 1], [3] * 8)),
        *(("tree", sends) for sends in ([1, 0], [3, 0, 1, 0, 0], [3, 0, 1, 0, 2, 0, 1, 0])),
        *(("chain", [*[1] * (hosts - 1), 0]) for hosts in (2, 5, 8)),
        *((each, [(hosts - 1) / hosts] * hosts) for each in (*GATHERS, SCATTER) for hosts in (2, 3, 5, 8)),
    ],
    ids=str,
)
def test_each_member_sends_so_many_times_the_data(native: ModuleType, algorithm: str, sends: list[float]) -> None:
    case = Case(native, algorithm, [40] * len(sends), piece_bytes=16)
    assert case.simulate()[1] == [round(times * case.count * case.dtype.storage.itemsize) for times in sends]


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_link_cut_at_any_moment_never_hangs_nor_gives_a_wrong_result(native: ModuleType, data: st.DataObject) -> None:
    algorithm = data.draw(st.sampled_from(ALGORITHMS), "algorithm")
    parts = data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=7), "parts")
    cut = data.draw(st.permutations(range(len(parts))), "order")[:2]
    turn, seed = data.draw(st.integers(0, 120), "turn"), data.draw(st.integers(0, 2**32), "seed")
    case = Case(native, algorithm, parts, piece_bytes=data.draw(st.integers(4, 800), "piece_bytes"))
    statuses, _, results = case.simulate(seed, data.draw(st.integers(1, 100), "link_piece"), (*cut, turn))
    assert set(statuses) <= {OK, PEER_LOST}
    assert all(case.is_right(host, results[host]) for host, status in enumerate(statuses) if status == OK)


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


DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 52}
ADASUM_COUNTS = [0, 1, 2, 7, 64, 1001, 30_011]
OP = context.REDUCE_OPS["adasum"]


def parts_of(rank: int, count: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """A part that all ranks have in common, and one of each."""
    common = np.random.default_rng([seed, count]).standard_normal(count)
    return (common + np.random.default_rng([seed, count, rank + 1]).standard_normal(count)).astype(dtype)


def combined(rank: Rank, array: np.ndarray, name: str = "x", **options: Any) -> np.ndarray:
    """Out of place."""
    result, before = np.full_like(array, 77), array.copy()
    rank.finish(rank.submit("allreduce", name, [array], outputs=[result], reduce_op=OP, **options))
    assert array.tobytes() == before.tobytes()
    return result


def check(result: np.ndarray, inputs: Sequence[np.ndarray], dtype: str) -> None:
    allowed = tolerance(inputs, DIGITS[dtype])
    assert np.abs(result.astype(np.float64) - adasum(inputs)).max(initial=0) <= allowed


DTYPES = ["float32", "float64", "float16"]


@over_every_layout
@pytest.mark.parametrize(("dtype", "segment_bytes"), [*itertools.product(DTYPES, [1 << 12, 1 << 18])])
@on_ranks("host_of_rank", "segment_bytes")
def test_any_count_over_any_layout(rank: Rank, dtype: str) -> None:
    """Each alone, out of place and in it, and all as one group; vectors without a common direction are just added."""
    inputs = [[parts_of(r, count, dtype) for r in range(rank.size)] for count in ADASUM_COUNTS]
    group = [of_all[rank.rank].copy() for of_all in inputs]
    for of_all, count in zip(inputs, ADASUM_COUNTS, strict=True):
        result = combined(rank, of_all[rank.rank], str(count))
        check(result, of_all, dtype)
        assert rank.is_common(count, result.tobytes())
        again = of_all[rank.rank].copy()
        rank.allreduce(again, f"{count} in place", "adasum")
        assert again.tobytes() == result.tobytes()
    mixed = np.full(9, 2.0)  # of another dtype than most
    rank.finish(rank.submit("allreduce", "group", [*group, mixed], reduce_op=OP))
    for result, of_all in zip(group, inputs, strict=True):
        check(result, of_all, dtype)
    assert (mixed == 2).all()
    assert (combined(rank, np.full(3000, 60000, dtype)) == 60000).all()  # its square is beyond float16
    apart = np.zeros(5000, dtype)
    apart[rank.rank :: rank.size] = 1.5
    assert (combined(rank, apart, "apart") == 1.5).all()


@on_ranks([2], [3], [4], [2, 1], [2, 2])
def test_zero_vectors_change_nothing_and_what_is_not_finite_spreads(rank: Rank) -> None:
    mine = parts_of(0, 500)
    for holder in range(rank.size):
        array = mine if rank.rank == holder else np.zeros(500)
        assert np.array_equal(combined(rank, array, f"one{holder}"), mine)
    assert not combined(rank, np.zeros(500), "all").any()
    tiny = np.full(500, 1e-160)  # its square is no normal number: it counts as zero, and is added
    array = tiny if rank.rank == 0 else mine * (rank.rank == 1)
    assert np.array_equal(combined(rank, array, "tiny"), mine + tiny)
    for bad in (np.inf, -np.inf, np.nan):  # it spreads over its tensor only
        poisoned, clean = parts_of(rank.rank, 2000), parts_of(rank.rank, 2000, seed=1)
        if rank.rank == rank.size - 1:
            poisoned[1234] = bad
        rank.finish(rank.submit("allreduce", f"{bad}", [poisoned, clean], reduce_op=OP))
        assert np.isnan(poisoned).all()
        check(clean, [parts_of(r, 2000, seed=1) for r in range(rank.size)], "float64")


@on_ranks(host_of_rank=[0, 1, 2, 0, 1, 2, 0])
def test_teams_combine_in_the_order_of_their_members(rank: Rank) -> None:
    for members in ([0, 1, 2, 4, 6], [1, 2, 5], [0, 3, 6]):
        team = rank.add_team(members)
        for count in (3, 5000) if rank.rank in members else ():
            inputs = [parts_of(member, count) for member in members]
            check(combined(rank, inputs[members.index(rank.rank)], team=team), inputs, "float64")
