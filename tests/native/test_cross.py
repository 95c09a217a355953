"""The algorithms between hosts: right data in the promised order, the same bits everywhere, and never a hang."""

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
