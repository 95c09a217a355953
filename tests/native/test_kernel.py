"""Kernels: every SIMD level gives what the contract says, bit for bit, and touches nothing else."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
from kernel_oracle import DTYPES, OPS, Dtype
from native_build import ROOT, native_build
from skips import apt_install

from horo.core import context

Array = npt.NDArray[Any]

LEVELS = ["scalar", "neon"] if platform.machine() == "aarch64" else ["scalar", "avx2", "avx512"]
GUARD_BYTES = 192
ORDINARY, STREAM = 0, 1
COUNTS = [0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 300, 513]


class Kernel:
    """One level, with arrays for arguments."""

    def __init__(self, native: ModuleType, level: str) -> None:
        self._lib, self._ffi, self._level = native.lib, native.ffi, level.encode()

    def _address(self, array: Array) -> Any:
        return self._ffi.cast("void *", array.ctypes.data)

    def reduce(
        self,
        dtype: Dtype,
        op: int,
        sources: Sequence[Array],
        dst: Array,
        *,
        copy: Array | None = None,
        scale: float = 1.0,
        divisor: int = 1,
        store: int = ORDINARY,
    ) -> None:
        addresses = self._ffi.new("void *[]", [self._address(s) for s in sources])
        to = self._ffi.NULL if copy is None else self._address(copy)
        arguments = (to, addresses, len(sources), len(dst), scale, divisor, store)
        assert self._lib.shim_kernel_reduce(self._level, dtype.code, op, self._address(dst), *arguments) == 0

    def scale(self, dtype: Dtype, dst: Array, src: Array, scale: float, store: int, *, divisor: int = 1) -> None:
        arguments = (self._address(dst), self._address(src), len(src), scale, divisor, store)
        assert self._lib.shim_kernel_scale(self._level, dtype.code, *arguments) == 0

    def convert(
        self, to: Dtype, dst: Array, origin: Dtype, src: Array, *, scale: float = 1.0, store: int = ORDINARY
    ) -> None:
        arguments = (to.code, self._address(dst), origin.code, self._address(src), len(src), scale, store)
        assert self._lib.shim_kernel_convert(self._level, *arguments) == 0

    def copy(self, dst: Array, src: Array, store: int) -> None:
        assert self._lib.shim_kernel_copy(self._level, self._address(dst), self._address(src), src.nbytes, store) == 0

    def exchange(self, out: Array, slot: Array, src: Array, store: int) -> None:
        arguments = (self._address(out), self._address(slot), self._address(src), src.nbytes, store)
        assert self._lib.shim_kernel_exchange(self._level, *arguments) == 0

    def dots(self, dtype: Dtype, a: Array, b: Array, before: Sequence[float] = (0, 0, 0)) -> Array:
        sums = np.array(before, np.float64)
        arguments = (self._address(a), self._address(b), len(a), self._ffi.cast("double *", sums.ctypes.data))
        assert self._lib.shim_kernel_dots(self._level, dtype.code, *arguments) == 0
        return sums

    def combine(self, dtype: Dtype, a: Array, b: Array, factors: tuple[float, float]) -> None:
        arguments = (self._address(a), self._address(b), len(a), *factors)
        assert self._lib.shim_kernel_combine(self._level, dtype.code, *arguments) == 0


@pytest.fixture(params=[*LEVELS, "best"])
def kernel(request: pytest.FixtureRequest, native: ModuleType) -> Kernel:
    if native.lib.shim_kernel_name(request.param.encode()) == native.ffi.NULL:
        pytest.skip(f"this machine has no {request.param}")
    return Kernel(native, request.param)


class Guarded:
    """Room for an array at any misalignment, with bytes around it that nobody may touch."""

    def __init__(self, dtype: Dtype, count: int, misalign_bytes: int) -> None:
        self._room = np.full(count * dtype.storage.itemsize + 2 * GUARD_BYTES, 0xA5, dtype=np.uint8)
        self._begin = GUARD_BYTES - 64 + (-self._room.ctypes.data) % 64 + misalign_bytes
        self._end = self._begin + count * dtype.storage.itemsize
        self.array = self._room[self._begin : self._end].view(dtype.storage)

    def is_intact(self) -> bool:
        return bool((self._room[: self._begin] == 0xA5).all() and (self._room[self._end :] == 0xA5).all())


def placed(dtype: Dtype, values: Array, misalign_bytes: int) -> Array:
    room = Guarded(dtype, len(values), misalign_bytes)
    room.array[:] = values
    return room.array


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
    values = np.array([*plain, float(limit.max), -float(limit.max), float(limit.max) / 2], dtype=storage)
    return oracle.narrow_bfloat16(values) if dtype.name == oracle.BFLOAT16 else values


def random_values(dtype: Dtype, count: int, rng: np.random.Generator) -> Array:
    """A third plain numbers, a third any bits, a third special ones."""
    size = dtype.storage.itemsize
    if dtype.name == "bool":
        return rng.integers(0, 2, count).astype(np.uint8)
    any_bits = rng.integers(0, 256, count * size, dtype=np.uint8).view(dtype.storage)
    plain = rng.integers(-100, 100, count) / (8 if dtype.is_float else 1)
    if dtype.name == oracle.BFLOAT16:
        stored_plain = oracle.narrow_bfloat16(plain.astype(np.float32))
    else:
        stored_plain = plain.astype(np.int64 if not dtype.is_float else dtype.storage).astype(dtype.storage)
    choice = rng.integers(0, 3, count)
    return np.choose(choice, [stored_plain, any_bits, rng.choice(special_values(dtype), count)]).astype(dtype.storage)


def assert_bits(dtype: Dtype, actual: Array, expected: Array, note: object) -> None:
    """Equal bits; where the result is NaN, another NaN will do (numpy may carry on another payload)."""
    same = oracle.bits(actual) == oracle.bits(expected)
    same |= oracle.is_nan(dtype, actual) & oracle.is_nan(dtype, expected)
    assert same.all(), (note, np.flatnonzero(~same)[:5], actual[~same][:5], expected[~same][:5])


def test_the_best_level_is_the_one_reported(native: ModuleType) -> None:
    best = native.ffi.string(native.lib.shim_kernel_name(b"best"))
    assert best == native.ffi.string(native.lib.horo_simd_name())
    has = [level for level in LEVELS if native.lib.shim_kernel_name(level.encode()) != native.ffi.NULL]
    assert best.decode() == has[-1]
    assert native.lib.shim_kernel_name(b"mmx") == native.ffi.NULL


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 asks the processor for its levels")
def test_choosing_a_level_does_not_ask_the_processor(tmp_path: Path) -> None:
    """In a virtual machine every cpuid is a trap of microseconds, and MPI's reductions choose anew in each call."""
    if reason := apt_install({"gcc": "gcc"}):
        pytest.skip(reason)
    compiler = "gcc"
    if int(subprocess.check_output([compiler, "-dumpversion"]).split(b".")[0]) < 11:
        pytest.skip("no gcc whose table of features has f16c")
    source, assembly = ROOT / "native/src/kernel/kernel.c", tmp_path / "kernel.s"
    includes = [f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src'}"]
    subprocess.run([compiler, *native_build.COMPILE_FLAGS, *includes, "-S", source, "-o", assembly], check=True)
    text = assembly.read_text()
    assert "hr_kernel_best" in text and "cpuid" not in text


def test_dtypes_have_their_names_and_sizes(native: ModuleType) -> None:
    for name, dtype in DTYPES.items():
        assert native.lib.horo_dtype_bytes(dtype.code) == dtype.storage.itemsize
        assert native.ffi.string(native.lib.shim_dtype_name(dtype.code)) == name.encode()
    for unknown in (-1, max(context.DTYPES.values()) + 1, 1000):
        assert native.lib.horo_dtype_bytes(unknown) == 0
        assert native.ffi.string(native.lib.shim_dtype_name(unknown)) == b"unknown"


def test_every_dtype_reduces_except_the_average_of_bool(native: ModuleType) -> None:
    average = 0
    for dtype in DTYPES.values():
        for op in OPS.values():
            assert native.lib.shim_dtype_reducible(dtype.code, op) == 1
        assert native.lib.shim_dtype_reducible(dtype.code, average) == (dtype.name != "bool")
    assert native.lib.shim_dtype_reducible(len(DTYPES), oracle.SUM) == 0
    assert native.lib.shim_dtype_reducible(0, 2) == 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_reduce_gives_the_exact_result_for_all_counts_alignments_and_scales(
    kernel: Kernel, dtype_name: str, op: str
) -> None:
    dtype = DTYPES[dtype_name]
    rng = np.random.default_rng([dtype.code, OPS[op]])
    scales = [1.0] if dtype_name == "bool" else [1.0, 0.5, -1 / 3]
    for count in COUNTS:
        for src_count in (1, 2, 3, 5):
            scale = scales[(count + src_count) % len(scales)]
            misalign = int(rng.integers(0, 64))
            sources = [placed(dtype, random_values(dtype, count, rng), misalign + i) for i in range(src_count)]
            dst = Guarded(dtype, count, int(rng.integers(0, 64)))
            copy = Guarded(dtype, count, int(rng.integers(0, 64 // dtype.storage.itemsize)) * dtype.storage.itemsize)
            store = STREAM if src_count % 2 == 0 else ORDINARY
            kernel.reduce(dtype, OPS[op], sources, dst.array, copy=copy.array, scale=scale, store=store)
            note = (count, src_count, scale, store)
            assert_bits(dtype, dst.array, oracle.reduce(dtype, OPS[op], sources, scale), note)
            assert dst.array.tobytes() == copy.array.tobytes(), note
            assert dst.is_intact() and copy.is_intact(), note


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_levels_agree_with_scalar_bit_for_bit(native: ModuleType, kernel: Kernel, dtype_name: str, op: str) -> None:
    """Payload and sign of a NaN included, except where a sum or product has two NaN to choose from."""
    dtype = DTYPES[dtype_name]
    rng = np.random.default_rng([7, dtype.code, OPS[op]])
    scalar = Kernel(native, "scalar")
    for count in (*COUNTS, 2000):
        for src_count in (1, 2, 4):
            sources = [placed(dtype, random_values(dtype, count, rng), i) for i in range(src_count)]
            undefined = oracle.nan_and_nan(dtype, OPS[op], sources)
            for scale in (1.0, 0.3) if dtype_name != "bool" else (1.0,):
                expected = np.empty(count, dtype.storage)
                actual = np.empty(count, dtype.storage)
                scalar.reduce(dtype, OPS[op], sources, expected, scale=scale)
                kernel.reduce(dtype, OPS[op], sources, actual, scale=scale)
                assert oracle.is_nan(dtype, actual[undefined]).all()
                different = (oracle.bits(actual) != oracle.bits(expected)) & ~undefined
                assert not different.any(), (count, src_count, scale, [s[different][:3] for s in sources])


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_reduce_in_place_of_any_source(kernel: Kernel, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    rng = np.random.default_rng(3)
    for count in (5, 300, 5000):
        for place in range(3):
            for scale in (1.0,) if dtype_name == "bool" else (1.0, 0.25):
                sources = [random_values(dtype, count, rng) for _ in range(3)]
                expected = oracle.reduce(dtype, oracle.SUM, sources, scale)
                kernel.reduce(dtype, oracle.SUM, sources, sources[place], scale=scale)
                assert_bits(dtype, sources[place], expected, (count, place, scale))


@pytest.mark.parametrize("store", [ORDINARY, STREAM])
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_scale_gives_the_exact_result(kernel: Kernel, dtype_name: str, store: int) -> None:
    dtype = DTYPES[dtype_name]
    rng = np.random.default_rng(4)
    for count in (*COUNTS, 5000):
        for scale in (1.0,) if dtype_name == "bool" else (1.0, 0.1, -2.0):
            src = placed(dtype, random_values(dtype, count, rng), int(rng.integers(0, 8)))
            expected = src.copy() if scale == 1.0 else oracle.reduce(dtype, oracle.SUM, [src], scale)
            dst = Guarded(dtype, count, int(rng.integers(0, 64)))
            kernel.scale(dtype, dst.array, src, scale, store)
            assert_bits(dtype, dst.array, expected, (count, scale))
            assert dst.is_intact()
            kernel.scale(dtype, src, src, scale, store)
            assert_bits(dtype, src, expected, (count, scale, "in place"))


@pytest.mark.parametrize("store", [ORDINARY, STREAM])
def test_copy_copies_every_byte_and_no_other(kernel: Kernel, store: int) -> None:
    byte = DTYPES["uint8"]
    rng = np.random.default_rng(5)
    for count in [*range(0, 70), 127, 128, 129, 255, 256, 257, 1000, 4099]:
        for misalign in (0, 1, 8, 17, 33, 63):
            src = placed(byte, rng.integers(0, 256, count, dtype=np.uint8), int(rng.integers(0, 64)))
            dst = Guarded(byte, count, misalign)
            kernel.copy(dst.array, src, store)
            assert (dst.array == src).all() and dst.is_intact(), (count, misalign)


@pytest.mark.parametrize("store", [ORDINARY, STREAM])
def test_exchange_takes_what_was_there_and_leaves_what_is_given(kernel: Kernel, store: int) -> None:
    byte = DTYPES["uint8"]
    rng = np.random.default_rng(6)
    for count in [*range(0, 70), 127, 128, 129, 255, 256, 257, 1000, 1279, 1281, 4099]:
        for misalign in (0, 1, 8, 17, 33, 63):
            given = placed(byte, rng.integers(0, 256, count, dtype=np.uint8), int(rng.integers(0, 64)))
            there = rng.integers(0, 256, count, dtype=np.uint8)
            out, slot = Guarded(byte, count, int(rng.integers(0, 64))), Guarded(byte, count, misalign)
            slot.array[:] = there
            kernel.exchange(out.array, slot.array, given, store)
            assert (out.array == there).all() and out.is_intact(), (count, misalign)
            assert (slot.array == given).all() and slot.is_intact(), (count, misalign)


HALVES, WIDES = ["float16", oracle.BFLOAT16], ["float32", "float64"]
CONVERSIONS = [pair for half in HALVES for wide in WIDES for pair in ((half, wide), (wide, half))]


@pytest.mark.parametrize("store", [ORDINARY, STREAM])
@pytest.mark.parametrize(("to_name", "from_name"), CONVERSIONS)
def test_convert_gives_the_exact_result(kernel: Kernel, to_name: str, from_name: str, store: int) -> None:
    to, origin = DTYPES[to_name], DTYPES[from_name]
    rng = np.random.default_rng([6, to.code, origin.code])
    for count in (*COUNTS, 5000):
        for scale in (1.0, 1 / 3, -2.0, 2.0**-20):
            src = placed(origin, random_values(origin, count, rng), int(rng.integers(0, 8)))
            dst = Guarded(to, count, int(rng.integers(0, 64)))
            kernel.convert(to, dst.array, origin, src, scale=scale, store=store)
            assert_bits(to, dst.array, oracle.convert(to, origin, src, scale), (count, scale))
            assert dst.is_intact()


@pytest.mark.parametrize(("to_name", "from_name"), CONVERSIONS)
def test_levels_convert_as_scalar_does_bit_for_bit(
    native: ModuleType, kernel: Kernel, to_name: str, from_name: str
) -> None:
    """Payload and sign of a NaN included."""
    to, origin = DTYPES[to_name], DTYPES[from_name]
    rng = np.random.default_rng([8, to.code, origin.code])
    scalar = Kernel(native, "scalar")
    for count in (*COUNTS, 20_000):
        for scale in (1.0, 0.3):
            src = random_values(origin, count, rng)
            expected, actual = np.empty(count, to.storage), np.empty(count, to.storage)
            scalar.convert(to, expected, origin, src, scale=scale)
            kernel.convert(to, actual, origin, src, scale=scale)
            assert (oracle.bits(actual) == oracle.bits(expected)).all(), (count, scale)


@pytest.mark.parametrize("wide_name", WIDES)
@pytest.mark.parametrize("half_name", HALVES)
def test_every_16_bit_float_survives_being_widened_and_narrowed(kernel: Kernel, half_name: str, wide_name: str) -> None:
    half, wide = DTYPES[half_name], DTYPES[wide_name]
    everything = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(half.storage)
    widened, back = np.empty(1 << 16, wide.storage), np.empty_like(everything)
    kernel.convert(wide, widened, half, everything)
    kernel.convert(half, back, wide, widened)
    assert_bits(half, back, everything, "round trip")
    plain = widened[np.isfinite(widened)]
    assert len(np.unique(plain)) == len(plain) - 1  # the two zeros


@pytest.mark.parametrize(
    ("half_name", "value", "expected"),
    [
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, np.inf),
        ("float16", 2.0**-25, 0.0),
        ("float16", 3 * 2.0**-25, 2.0**-23),
        ("float16", 1 + 2.0**-11, 1.0),
        ("float16", 1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (oracle.BFLOAT16, 1e38, 1.171875 * 2.0**126),
        (oracle.BFLOAT16, 3.4e38, np.inf),
        (oracle.BFLOAT16, 1 + 2.0**-8, 1.0),
        (oracle.BFLOAT16, 1 + 3 * 2.0**-8, 1 + 2.0**-6),
    ],
)
def test_known_values_are_narrowed_to_nearest_even(
    kernel: Kernel, half_name: str, value: float, expected: float
) -> None:
    half = DTYPES[half_name]
    for wide_name in WIDES:
        wide = DTYPES[wide_name]
        src = np.full(100, value, wide.storage)
        dst, back = np.empty(100, half.storage), np.empty(100, wide.storage)
        kernel.convert(half, dst, wide, src)
        kernel.convert(wide, back, half, dst)
        assert (back == expected).all(), back[0]


def test_every_float16_survives_and_every_narrowing_rounds_to_nearest_even(kernel: Kernel) -> None:
    """x times 1 is not multiplied, so a factor of 1 +- 2^-11 or 2^-24 drives all of them through the rounding."""
    dtype = DTYPES["float16"]
    everything = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    result = np.empty_like(everything)
    kernel.reduce(dtype, oracle.SUM, [everything], result)
    assert_bits(dtype, result, everything, "identity")
    for scale in (1 + 2**-11, 1 - 2**-11, 2**-1, 2**-10, 2**-24, 3 * 2**-12, 1.001, 2.0, 1e5):
        kernel.scale(dtype, result, everything, scale, ORDINARY)
        assert_bits(dtype, result, oracle.reduce(dtype, oracle.SUM, [everything], scale), scale)


def test_every_bfloat16_survives_and_every_narrowing_rounds_to_nearest_even(kernel: Kernel) -> None:
    dtype = DTYPES[oracle.BFLOAT16]
    everything = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    result = np.empty_like(everything)
    kernel.reduce(dtype, oracle.SUM, [everything], result)
    assert_bits(dtype, result, everything, "identity")
    for scale in (1 + 2**-8, 1 - 2**-8, 2**-1, 2**-10, 3 * 2**-9, 1.001, 2.0, 1e30):
        kernel.scale(dtype, result, everything, scale, ORDINARY)
        assert_bits(dtype, result, oracle.reduce(dtype, oracle.SUM, [everything], scale), scale)


@pytest.mark.parametrize(
    ("dtype_name", "value", "scale", "expected"),
    [
        ("int32", -7, 0.5, -3),
        ("int32", 2**31 - 1, 2.0, 2**31 - 1),
        ("int32", -(2**31), 1.5, -(2**31)),
        ("uint8", 200, -1.0, 0),
        ("uint8", 255, 1.01, 255),
        ("int8", -128, -1.0, 127),
        ("int64", 2**62, 2.0, 2**63 - 1),
        ("int64", -(2**62), 4.0, -(2**63)),
        ("int64", 2**62, 0.5, 2**61),
        ("int16", 5, float("nan"), 0),
        ("int16", 5, float("-inf"), -(2**15)),
        ("int64", 0, float("inf"), 0),
    ],
)
def test_scaled_integers_truncate_and_saturate(
    kernel: Kernel, dtype_name: str, value: int, scale: float, expected: int
) -> None:
    dtype = DTYPES[dtype_name]
    src = np.full(77, value, dtype=dtype.storage)
    dst = np.empty_like(src)
    kernel.reduce(dtype, oracle.SUM, [src], dst, scale=scale)
    assert (dst == expected).all()
    kernel.scale(dtype, dst, src, scale, ORDINARY)
    assert (dst == expected).all()


INTEGERS = [name for name, dtype in DTYPES.items() if not dtype.is_float and name != "bool"]


def quotient(value: int, divisor: int) -> int:
    """Truncated toward zero."""
    return abs(value) // divisor * (1 if value >= 0 else -1)


@pytest.mark.parametrize("store", [ORDINARY, STREAM])
@pytest.mark.parametrize("dtype_name", INTEGERS)
def test_integers_are_divided_as_integers(kernel: Kernel, dtype_name: str, store: int) -> None:
    dtype = DTYPES[dtype_name]
    rng = np.random.default_rng([11, dtype.code])
    for count in (*COUNTS, 5000):
        for divisor in (1, 2, 3, 7, 49, 1000, 2**31 - 1):
            sources = [random_values(dtype, count, rng) for _ in range(3)]
            total = oracle.reduce(dtype, oracle.SUM, sources)
            expected = np.array([quotient(value, divisor) for value in total.tolist()], dtype=dtype.storage)
            dst, copy = np.empty(count, dtype.storage), Guarded(dtype, count, 0)
            kernel.reduce(dtype, oracle.SUM, sources, dst, copy=copy.array, divisor=divisor, store=store)
            assert (dst == expected).all() and (copy.array == expected).all() and copy.is_intact(), (count, divisor)
            kernel.scale(dtype, dst, total, 1.0, store, divisor=divisor)
            assert (dst == expected).all(), (count, divisor)
            kernel.scale(dtype, total, total, 1.0, store, divisor=divisor)
            assert (total == expected).all(), (count, divisor, "in place")


@pytest.mark.parametrize(
    ("dtype_name", "value", "scales", "expected"),
    [
        ("int32", 7, (2.0, 2), 7),  # truncated once, not once for each
        ("int32", -7, (0.5, 2), -1),
        ("int8", 100, (2.0, 2), 100),  # what lies between is not held by the type
        ("int8", 100, (4.0, 2), 127),
        ("int32", 49, (3.0, 49), 3),
        ("int64", 2**60 + 1, (1.0, 1), 2**60 + 1),
        ("int64", -(2**63), (1.0, 2), -(2**62)),
        ("int16", 5, (float("nan"), 3), 0),
    ],
)
def test_a_factor_and_a_divisor_of_integers_truncate_once(
    kernel: Kernel, dtype_name: str, value: int, scales: tuple[float, int], expected: int
) -> None:
    dtype = DTYPES[dtype_name]
    src = np.full(77, value, dtype=dtype.storage)
    dst = np.empty_like(src)
    kernel.reduce(dtype, oracle.SUM, [src], dst, scale=scales[0], divisor=scales[1])
    assert (dst == expected).all(), dst[0]


def test_any_byte_but_zero_is_true(kernel: Kernel) -> None:
    dtype = DTYPES["bool"]
    a = np.array([0, 0, 2, 2, 1, 255] * 50, dtype=np.uint8)
    b = np.array([0, 4, 0, 1, 1, 128] * 50, dtype=np.uint8)
    dst = np.empty_like(a)
    for op in (oracle.SUM, oracle.MAX):
        kernel.reduce(dtype, op, [a, b], dst)
        assert (dst == ((a != 0) | (b != 0))).all()
    for op in (oracle.PRODUCT, oracle.MIN):
        kernel.reduce(dtype, op, [a, b], dst)
        assert (dst == ((a != 0) & (b != 0))).all()


def test_streaming_to_an_address_that_can_never_be_aligned_still_works(kernel: Kernel) -> None:
    dtype = DTYPES["float64"]
    values = np.arange(100, dtype=np.float64)
    dst, copy = Guarded(dtype, 100, 0), Guarded(dtype, 100, 3)
    kernel.reduce(dtype, oracle.SUM, [values, values], dst.array, copy=copy.array, store=STREAM)
    assert (copy.array == 2 * values).all() and copy.is_intact()


FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float]


@pytest.mark.parametrize("dtype_name", FLOATS)
def test_scalar_products_add_in_one_order_on_every_level(kernel: Kernel, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    for count in (*COUNTS, 1023, 1024, 1025, 3001):
        for misalign_bytes in (0, dtype.storage.itemsize):
            rng = np.random.default_rng([13, dtype.code, count])
            values = [oracle.convert_values(dtype, rng.standard_normal(count)) for _ in range(2)]
            a, b = (placed(dtype, value, misalign_bytes) for value in values)
            assert (kernel.dots(dtype, a, b) == oracle.dots(dtype, a, b)).all(), count
            assert (a == values[0]).all() and (b == values[1]).all()


def test_scalar_products_are_in_double_and_are_added_to_what_was_there(kernel: Kernel) -> None:
    large = np.full(9, 2.0**100, np.float32)  # its square is beyond float32
    assert kernel.dots(DTYPES["float32"], large, -large, (2.0**200, 0, 1)).tolist() == [
        -8 * 2.0**200,
        9 * 2.0**200,
        9 * 2.0**200,
    ]
    halves = np.full(3000, 60000, np.float16)
    assert kernel.dots(DTYPES["float16"], halves, halves).tolist() == [3000 * 60000.0**2] * 3


def test_scalar_products_carry_what_is_not_finite(kernel: Kernel) -> None:
    for dtype_name in ("float16", "float32", "float64"):
        dtype = DTYPES[dtype_name]
        for at in (0, 13, 29):
            a, b = np.ones(30, dtype.storage), np.ones(30, dtype.storage)
            a[at] = np.inf
            assert kernel.dots(dtype, a, b).tolist() == [np.inf, np.inf, 30]
            b[at] = np.nan
            sums = kernel.dots(dtype, a, b)
            assert np.isnan(sums[[0, 2]]).all() and sums[1] == np.inf


@pytest.mark.parametrize("dtype_name", FLOATS)
def test_a_pair_is_combined_in_double_and_rounded(kernel: Kernel, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    for count in (*COUNTS, 1023, 1024, 1025, 3001):
        for misalign_bytes in (0, dtype.storage.itemsize):
            rng = np.random.default_rng([17, dtype.code, count])
            a, b = (random_values(dtype, count, rng) for _ in range(2))
            for factors in ((1.0, 1.0), (0.5, 0.5), (0.3, -1.7)):
                room = Guarded(dtype, count, misalign_bytes)
                room.array[:] = a
                other = placed(dtype, b, misalign_bytes)
                kernel.combine(dtype, room.array, other, factors)
                assert room.is_intact() and oracle.bits(other).tolist() == oracle.bits(b).tolist()
                assert_bits(dtype, room.array, oracle.combine_pair(dtype, a, b, factors), (count, factors))
