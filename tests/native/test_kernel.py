"""Kernels: every SIMD level gives what the contract says, bit for bit as the scalar one, and touches nothing else."""

import itertools
import platform
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import kernel_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
from kernel_oracle import CASES, COMPLEX, DTYPES, PARTS, Dtype

from horo.core import context

Array = npt.NDArray[Any]

LEVELS = ["scalar", "neon"] if platform.machine() == "aarch64" else ["scalar", "avx2", "avx512"]
GUARD_BYTES = 192
ORDINARY, STREAM = 0, 1
TIES = [65519, 65520, *(k * 2.0**-25 for k in (1, 3)), *(1 + k * 2.0**-n for n in (8, 11) for k in (1, 3)), 3.4e38]
"""Halfway between two numbers of a 16-bit float, and beside the last one that narrows to a finite number."""
COUNTS = [0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 300, 513]
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_float]
INTEGERS = [dtype for dtype in DTYPES.values() if not dtype.is_float and dtype.name != "bool"]
by_store = pytest.mark.parametrize("store", [ORDINARY, STREAM])


class Kernel:
    """One level, with arrays for arguments."""

    def __init__(self, native: ModuleType, level: str) -> None:
        self._lib, self._ffi, self._level = native.lib, native.ffi, level.encode()

    def __repr__(self) -> str:
        return self._level.decode()

    def __call__(self, what: str, *arguments: Any) -> None:
        """``arguments``: of the shim, arrays as their addresses."""
        cast, ffi = self._ffi.cast, self._ffi
        given = [cast("void *", each.ctypes.data) if isinstance(each, np.ndarray) else each for each in arguments]
        given = [
            ffi.new("void *[]", [cast("void *", x.ctypes.data) for x in each]) if isinstance(each, list) else each
            for each in given
        ]
        getattr(self._lib, f"shim_kernel_{what}")(self._level, *given)

    def reduce(
        self, dtype: Dtype, op: int, sources: Sequence[Array], dst: Array, *, copy: Array | None = None, **given: Any
    ) -> None:
        to = self._ffi.NULL if copy is None else copy
        self("reduce", dtype.code, op, dst, to, [*sources], len(sources), len(dst), *self._scale(**given))

    def scale(self, dtype: Dtype, dst: Array, src: Array, **given: Any) -> None:
        self("scale", dtype.code, dst, src, len(src), *self._scale(**given))

    def convert(self, to: Dtype, dst: Array, origin: Dtype, src: Array, **given: Any) -> None:
        scale, _, store = self._scale(**given)
        self("convert", to.code, dst, origin.code, src, len(src), scale, store)

    @staticmethod
    def _scale(scale: float = 1.0, divisor: int = 1, store: int = ORDINARY) -> tuple[float, int, int]:
        return scale, divisor, store

    def dots(self, dtype: Dtype, a: Array, b: Array, before: Sequence[float] = (0, 0, 0)) -> Array:
        sums = np.array(before, np.float64)
        self("dots", dtype.code, a, b, len(a), self._ffi.cast("double *", sums.ctypes.data))
        return sums


@pytest.fixture(scope="module")
def kernels(native: ModuleType) -> list[Kernel]:
    """Of each level that this machine has, the scalar one first."""
    return [Kernel(native, level) for level in LEVELS if native.lib.shim_kernel_name(level.encode()) != native.ffi.NULL]


class Guarded:
    """Room for an array at any misalignment, with bytes around it that nobody may touch."""

    def __init__(self, dtype: Dtype, count: int, misalign_bytes: int, values: Array | None = None) -> None:
        self._room = np.full(count * dtype.storage.itemsize + 2 * GUARD_BYTES, 0xA5, dtype=np.uint8)
        self._begin = GUARD_BYTES - 64 + (-self._room.ctypes.data) % 64 + misalign_bytes
        self._end = self._begin + count * dtype.storage.itemsize
        self.array = self._room[self._begin : self._end].view(dtype.storage)
        if values is not None:
            self.array[:] = values

    def is_intact(self) -> bool:
        return bool((self._room[: self._begin] == 0xA5).all() and (self._room[self._end :] == 0xA5).all())


def placed(dtype: Dtype, values: Array, misalign_bytes: int) -> Array:
    return Guarded(dtype, len(values), misalign_bytes, values).array


def special_values(dtype: Dtype) -> Array:
    if dtype.name == "bool":
        return np.array([0, 1], dtype=np.uint8)
    if not dtype.is_float:
        limits = np.iinfo(dtype.storage)
        return np.array([0, 1, limits.max, limits.min, limits.max - 1, 3], dtype=dtype.storage)
    storage = np.dtype("f4") if dtype.name == oracle.BFLOAT16 else dtype.storage
    limit = np.finfo(storage)
    tiny = float(limit.smallest_subnormal)
    plain = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, tiny, -tiny, 3 * tiny, float(limit.tiny)]
    limits = [float(limit.max), -float(limit.max), float(limit.max) / 2]
    values = np.array([*plain, *limits, *(TIES if storage.itemsize > 2 else ())], dtype=storage)
    return oracle.narrow_bfloat16(values) if dtype.name == oracle.BFLOAT16 else values


def random_values(dtype: Dtype, count: int, rng: np.random.Generator) -> Array:
    """A third plain numbers, a third any bits, a third special ones."""
    if dtype.name in COMPLEX:
        return random_values(PARTS[dtype.name], 2 * count, rng).view(dtype.storage)
    if dtype.name == "bool":
        return rng.choice(np.array([0, 0, 1, 1, 2, 128, 255], np.uint8), count)  # any byte but 0 is true
    any_bits = rng.integers(0, 256, count * dtype.storage.itemsize, dtype=np.uint8).view(dtype.storage)
    plain = rng.integers(-100, 100, count) / (8 if dtype.is_float else 1)
    if dtype.name == oracle.BFLOAT16:
        stored_plain = oracle.narrow_bfloat16(plain.astype(np.float32))
    else:
        stored_plain = plain.astype(np.int64 if not dtype.is_float else dtype.storage).astype(dtype.storage)
    choice = rng.integers(0, 3, count)
    return np.choose(choice, [stored_plain, any_bits, rng.choice(special_values(dtype), count)]).astype(dtype.storage)


def assert_bits(dtype: Dtype, actual: Array, expected: Array, note: object, exact: Array | None = None) -> None:
    """Equal bits; where the result is NaN, another NaN will do (numpy may carry on another payload).

    exact: where not even that may differ; None: nowhere.
    """
    part = PARTS.get(dtype.name, dtype)
    one, two = actual.view(part.storage), expected.view(part.storage)
    same = oracle.bits(one) == oracle.bits(two)
    same |= oracle.is_nan(part, one) & oracle.is_nan(part, two) & (True if exact is None else ~exact.reshape(-1))
    assert same.all(), (note, np.flatnonzero(~same)[:5], one[~same][:5], two[~same][:5])


def test_the_best_level_is_the_one_reported(native: ModuleType) -> None:
    best = native.ffi.string(native.lib.shim_kernel_name(b"best"))
    assert best == native.ffi.string(native.lib.horo_simd_name())
    has = [level for level in LEVELS if native.lib.shim_kernel_name(level.encode()) != native.ffi.NULL]
    assert best.decode() == has[-1]
    assert native.lib.shim_kernel_name(b"mmx") == native.ffi.NULL


def test_dtypes_have_names_and_sizes_and_reduce_but_for_the_average_of_bool(native: ModuleType) -> None:
    average, lib = 0, native.lib
    for name, dtype in (DTYPES | COMPLEX).items():
        assert lib.horo_dtype_bytes(dtype.code) == dtype.storage.itemsize
        assert native.ffi.string(lib.shim_dtype_name(dtype.code)) == name.encode()
        assert lib.shim_dtype_reducible(dtype.code, average) == (name != "bool")
    assert all(lib.shim_dtype_reducible(dtype.code, op) == 1 for dtype, op in CASES)
    refused = [("float8_e5m2", oracle.SUM), ("bits8", oracle.BAND), ("uint8", 2), ("float32", oracle.BXOR)]
    assert all(lib.shim_dtype_reducible(context.DTYPES[name], op) == 0 for name, op in refused)
    for unknown in (-1, max(context.DTYPES.values()) + 1, 1000):
        assert lib.horo_dtype_bytes(unknown) == 0
        assert native.ffi.string(lib.shim_dtype_name(unknown)) == b"unknown"


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_reduce_gives_exact_results_at_all_alignments(kernels: list[Kernel], dtype: Dtype, op: int) -> None:
    """Payload and sign of a NaN are the scalar kernel's, too, but where there were two NaN to choose from."""
    rng = np.random.default_rng([dtype.code, op])
    size = dtype.storage.itemsize
    for count, src_count in itertools.product((*COUNTS, 2000), (1, 2, 3, 5)):
        is_plain = dtype.name == "bool" or op in oracle.BITS
        scale = 1.0 if is_plain else [1.0, 0.5, -1 / 3][(count + src_count) % 3]
        misalign, store = int(rng.integers(0, 64)), [ORDINARY, STREAM][src_count % 2]
        sources = [placed(dtype, random_values(dtype, count, rng), misalign + i) for i in range(src_count)]
        wanted, by_scalar = oracle.reduce(dtype, op, sources, scale), np.empty(count, dtype.storage)
        kernels[0].reduce(dtype, op, sources, by_scalar, scale=scale)
        exact = ~oracle.nan_and_nan(dtype, op, sources, scale)
        odd = size // 2 if dtype.name in COMPLEX and src_count == 5 else 0  # at the alignment of its parts
        odd = int(rng.integers(0, size)) if src_count == 3 else odd  # where it can never be aligned
        for kernel in kernels:
            dst = Guarded(dtype, count, int(rng.integers(0, 64)))
            copy = Guarded(dtype, count, int(rng.integers(0, 63 // size + 1)) * size + odd)
            kernel.reduce(dtype, op, sources, dst.array, copy=copy.array, scale=scale, store=store)
            note = (kernel, count, src_count, scale, store)
            assert_bits(dtype, dst.array, wanted, note)
            assert dst.array.tobytes() == copy.array.tobytes(), note
            assert dst.is_intact() and copy.is_intact(), note
            assert_bits(dtype, dst.array, by_scalar, note, exact)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), *COMPLEX.values()], ids=str)
def test_reduce_in_place_of_any_source(kernels: list[Kernel], dtype: Dtype) -> None:
    op, rng = oracle.PRODUCT if dtype.name in COMPLEX else oracle.SUM, np.random.default_rng(3)
    scales = (1.0,) if dtype.name == "bool" else (1.0, 0.25)
    for count, place, scale in itertools.product((5, 300, 5000), range(3), scales):
        given = [random_values(dtype, count, rng) for _ in range(3)]
        expected = oracle.reduce(dtype, op, given, scale)
        for kernel in kernels:
            sources = [each.copy() for each in given]
            kernel.reduce(dtype, op, sources, sources[place], scale=scale)
            assert_bits(dtype, sources[place], expected, (kernel, count, place, scale))


@by_store
@pytest.mark.parametrize("dtype", [*DTYPES.values(), *COMPLEX.values()], ids=str)
def test_scale_gives_the_exact_result(kernels: list[Kernel], dtype: Dtype, store: int) -> None:
    op, rng = oracle.PRODUCT if dtype.name in COMPLEX else oracle.SUM, np.random.default_rng(4)
    scales = (1.0,) if dtype.name == "bool" else (1.0, 0.1, -2.0)
    for count, scale in itertools.product((*COUNTS, 5000), scales):
        given = random_values(dtype, count, rng)
        expected = given if scale == 1.0 else oracle.reduce(dtype, op, [given], scale)
        for kernel in kernels:
            src = placed(dtype, given, int(rng.integers(0, 8)))
            dst = Guarded(dtype, count, int(rng.integers(0, 64)))
            kernel.scale(dtype, dst.array, src, scale=scale, store=store)
            assert_bits(dtype, dst.array, expected, (kernel, count, scale))
            assert dst.is_intact()
            kernel.scale(dtype, src, src, scale=scale, store=store)
            assert_bits(dtype, src, expected, (kernel, count, scale, "in place"))


@by_store
def test_copy_and_exchange_move_every_byte_and_no_other(kernels: list[Kernel], store: int) -> None:
    """An exchange takes what was in the slot and leaves what is given."""
    byte, rng = DTYPES["uint8"], np.random.default_rng(6)
    counts = [*range(0, 70), 127, 128, 129, 255, 256, 257, 1000, 1279, 1281, 4099]
    for kernel, count, misalign in itertools.product(kernels, counts, (0, 1, 8, 17, 33, 63)):
        given = placed(byte, rng.integers(0, 256, count, dtype=np.uint8), int(rng.integers(0, 64)))
        there = rng.integers(0, 256, count, dtype=np.uint8)
        out, slot = Guarded(byte, count, int(rng.integers(0, 64))), Guarded(byte, count, misalign, there)
        kernel("exchange", out.array, slot.array, given, count, store)
        assert (out.array == there).all() and out.is_intact(), (kernel, count, misalign)
        assert (slot.array == given).all() and slot.is_intact(), (kernel, count, misalign)
        copy = Guarded(byte, count, misalign)
        kernel("copy", copy.array, given, count, store)
        assert (copy.array == given).all() and copy.is_intact(), (kernel, count, misalign)


EVERYTHING = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
"""The bits of every 16-bit float."""
HALVES, WIDES = ["float16", oracle.BFLOAT16], ["float32", "float64"]
CONVERSIONS = [pair for half in HALVES for wide in WIDES for pair in ((half, wide), (wide, half))]


@by_store
@pytest.mark.parametrize(("to_name", "from_name"), CONVERSIONS)
def test_convert_gives_exact_results(kernels: list[Kernel], to_name: str, from_name: str, store: int) -> None:
    """Of values of all kinds, and of every 16-bit float; payload and sign of a NaN are the scalar kernel's."""
    to, origin = DTYPES[to_name], DTYPES[from_name]
    rng = np.random.default_rng([6, to.code, origin.code])
    half = origin if origin.is_half else to
    every = (
        EVERYTHING.view(half.storage) if half is origin else oracle.convert(origin, half, EVERYTHING.view(half.storage))
    )
    for values, scale in itertools.product(
        [*(random_values(origin, count, rng) for count in (*COUNTS, 5000)), every], (1.0, 1 / 3, -2.0, 2.0**-20)
    ):
        src, by_scalar = placed(origin, values, int(rng.integers(0, 8))), np.empty(len(values), to.storage)
        kernels[0].convert(to, by_scalar, origin, src, scale=scale)
        assert_bits(to, by_scalar, oracle.convert(to, origin, src, scale), (len(values), scale))
        for kernel in kernels:
            dst = Guarded(to, len(values), int(rng.integers(0, 64)))
            kernel.convert(to, dst.array, origin, src, scale=scale, store=store)
            assert dst.array.tobytes() == by_scalar.tobytes(), (kernel, len(values), scale)
            assert dst.is_intact()


SCALED = [
    *(("int32", -7, 0.5, 1, -3), ("int32", 2**31 - 1, 2.0, 1, 2**31 - 1), ("int32", -(2**31), 1.5, 1, -(2**31))),
    *(("uint8", 200, -1.0, 1, 0), ("uint8", 255, 1.01, 1, 255), ("int8", -128, -1.0, 1, 127)),
    *(("int64", 2**62, 2.0, 1, 2**63 - 1), ("int64", -(2**62), 4.0, 1, -(2**63)), ("int64", 2**62, 0.5, 1, 2**61)),
    *(("int16", 5, np.nan, 1, 0), ("int16", 5, -np.inf, 1, -(2**15)), ("int64", 0, np.inf, 1, 0)),
    *(("int32", 7, 2.0, 2, 7), ("int32", -7, 0.5, 2, -1)),  # truncated once, not once for each
    *(("int8", 100, 2.0, 2, 100), ("int8", 100, 4.0, 2, 127)),  # what lies between is not held by the type
    *(("int32", 49, 3.0, 49, 3), ("int64", 2**60 + 1, 1.0, 1, 2**60 + 1), ("int64", -(2**63), 1.0, 2, -(2**62))),
]


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_scaled_integers_truncate_once_and_saturate(
    kernels: list[Kernel], case: tuple[str, int, float, int, int]
) -> None:
    dtype_name, value, scale, divisor, expected = case
    dtype = DTYPES[dtype_name]
    src = np.full(77, value, dtype=dtype.storage)
    dst = np.empty_like(src)
    for kernel in kernels:
        kernel.reduce(dtype, oracle.SUM, [src], dst, scale=scale, divisor=divisor)
        assert (dst == expected).all(), kernel
        kernel.scale(dtype, dst, src, scale=scale, divisor=divisor)
        assert (dst == expected).all(), kernel


@by_store
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_divided_as_integers(kernels: list[Kernel], dtype: Dtype, store: int) -> None:
    rng = np.random.default_rng([11, dtype.code])
    for count, divisor in itertools.product((*COUNTS, 5000), (1, 2, 3, 7, 49, 1000, 2**31 - 1)):
        sources = [random_values(dtype, count, rng) for _ in range(3)]
        total = oracle.reduce(dtype, oracle.SUM, sources)
        quotients = [abs(value) // divisor * (1 if value >= 0 else -1) for value in total.tolist()]
        expected = np.array(quotients, dtype=dtype.storage)
        for kernel in kernels:
            dst, copy, own = np.empty(count, dtype.storage), Guarded(dtype, count, 0), total.copy()
            kernel.reduce(dtype, oracle.SUM, sources, dst, copy=copy.array, divisor=divisor, store=store)
            note = (kernel, count, divisor)
            assert (dst == expected).all() and (copy.array == expected).all() and copy.is_intact(), note
            kernel.scale(dtype, own, own, divisor=divisor, store=store)
            assert (own == expected).all(), (*note, "in place")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scalar_products_and_pairs_are_computed_in_double_in_one_order(kernels: list[Kernel], dtype: Dtype) -> None:
    for count, misalign in itertools.product((*COUNTS, 1023, 1024, 1025, 3001), (0, dtype.storage.itemsize)):
        rng = np.random.default_rng([13, dtype.code, count])
        values = [oracle.convert_values(dtype, rng.standard_normal(count)) for _ in range(2)]
        a, b = (placed(dtype, value, misalign) for value in values)
        sums = oracle.dots(dtype, a, b)
        for kernel in kernels:
            assert (kernel.dots(dtype, a, b) == sums).all(), (kernel, count)
            assert (a == values[0]).all() and (b == values[1]).all()
        a, b = (random_values(dtype, count, rng) for _ in range(2))
        for factors in ((1.0, 1.0), (0.5, 0.5), (0.3, -1.7)):
            wanted = oracle.combine_pair(dtype, a, b, factors)
            for kernel in kernels:
                room, other = Guarded(dtype, count, misalign, a), placed(dtype, b, misalign)
                kernel("combine", dtype.code, room.array, other, count, *factors)
                assert room.is_intact() and other.tobytes() == b.tobytes()
                assert_bits(dtype, room.array, wanted, (kernel, count, factors))


def test_scalar_products_are_added_to_what_was_there_and_carry_what_is_not_finite(kernels: list[Kernel]) -> None:
    large = np.full(9, 2.0**100, np.float32)  # its square is beyond float32
    halves = np.full(3000, 60000, np.float16)
    for kernel in kernels:
        sums = kernel.dots(DTYPES["float32"], large, -large, (2.0**200, 0, 1))
        assert sums.tolist() == [-8 * 2.0**200, 9 * 2.0**200, 9 * 2.0**200], kernel
        assert kernel.dots(DTYPES["float16"], halves, halves).tolist() == [3000 * 60000.0**2] * 3, kernel
        for name, at in itertools.product(("float16", "float32", "float64"), (0, 13, 29)):
            a, b = np.ones(30, name), np.ones(30, name)
            a[at] = np.inf
            assert kernel.dots(DTYPES[name], a, b).tolist() == [np.inf, np.inf, 30], kernel
            b[at] = np.nan
            sums = kernel.dots(DTYPES[name], a, b)
            assert np.isnan(sums[[0, 2]]).all() and sums[1] == np.inf, kernel
