"""The kernels that pack for NCCL, compiled for the host by the double of the driver, against the core's arithmetic.

All dtypes and factors, values of every kind, lengths around the borders of blocks, many pieces in one launch.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

import kernel_oracle as oracle
import numpy as np
import pytest
from device_group import Gpu
from kernel_oracle import DTYPES, Array, Dtype
from test_kernel import random_values, special_values

THREADS, BLOCK = 256, 4096
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
HALVES, FLOATS = ["float16", "bfloat16"], ["float16", "bfloat16", "float32", "float64"]
NARROWING = [(wide, half) for wide in ("float32", "float64") for half in HALVES]
PAIRS = [*((name, name) for name in FLOATS + INTEGERS if name != "int16"), *NARROWING, ("int16", "int32")]
LENGTHS = [1, 2, 255, 257, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77]


class Piece(ctypes.Structure):
    """struct hr_pack_piece."""

    _fields_ = (
        ("memory", ctypes.c_uint64),
        ("wire", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("factor", ctypes.c_double),
        ("partial", ctypes.c_double),
        ("divisor", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("wire_dtype", ctypes.c_int),
        ("first_block", ctypes.c_uint),
    )


class Kernels:
    """The kernels as the driver gives them, on a stream."""

    def __init__(self, gpu: Gpu, native: ModuleType) -> None:
        self.gpu, self.native = gpu, native
        self.stream = gpu.stream()

    def launch(self, name: bytes, pieces: list[Piece]) -> None:
        lib, function = self.gpu.lib, ctypes.c_void_p()
        blocks = 0
        for piece in pieces:
            piece.first_block = blocks
            blocks += -(-piece.count // BLOCK)
        table = self.gpu.put(np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8))
        assert lib.cuModuleGetFunction(ctypes.byref(function), None, name) == 0
        address, count = ctypes.c_uint64(table), ctypes.c_uint(len(pieces))
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
        lib.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
        grid = [ctypes.c_uint(n) for n in (blocks, 1, 1, THREADS, 1, 1, 0)]
        assert lib.cuLaunchKernel(function, *grid, ctypes.c_void_p(self.stream), arguments, None) == 0
        lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        self.gpu.synchronize(self.stream)

    def scale(self, dtype: Dtype, values: Array, factor: float, divisor: int = 1) -> Array:
        result = values.copy()
        ffi, lib = self.native.ffi, self.native.lib
        data = ffi.from_buffer(result)
        assert lib.shim_kernel_scale(b"scalar", dtype.code, data, data, len(values), factor, divisor, 0) == 0
        return result

    def convert(self, to: Dtype, origin: Dtype, values: Array, factor: float = 1.0) -> Array:
        result = np.zeros(len(values), to.storage)
        ffi, lib = self.native.ffi, self.native.lib
        source, target = ffi.from_buffer(values), ffi.from_buffer(result)
        assert lib.shim_kernel_convert(b"scalar", to.code, target, origin.code, source, len(values), factor, 0) == 0
        return result

    def packed(self, names: tuple[str, str], values: Array, factor: float, partial: float) -> Array:
        """What the host packs; the partial factor is that of what it sends to another host."""
        dtype, wire = DTYPES[names[0]], DTYPES[names[1]]
        if names[0] == "int16":
            return self.scale(dtype, values, factor).astype(np.int32)
        made = self.scale(wire, values, factor) if dtype == wire else self.convert(wire, dtype, values, factor)
        return made if partial == 1.0 else self.scale(wire, made, partial)

    def unpacked(self, names: tuple[str, str], values: Array, factor: float, divisor: int) -> Array:
        dtype, wire = DTYPES[names[0]], DTYPES[names[1]]
        if names[0] == "int16":
            return self.scale(dtype, values.astype(np.int16), factor, divisor)
        made = self.scale(wire, values, factor, divisor)
        return made if dtype == wire else self.convert(dtype, wire, made)

    def close(self) -> None:
        self.gpu.close(self.stream)


@pytest.fixture
def kernels(gpu: Gpu, native: ModuleType) -> Kernels:
    return Kernels(gpu, native)


def check(actual: Array, expected: Array, dtype: Dtype, note: object) -> None:
    nans = oracle.is_nan(dtype, expected)
    np.testing.assert_array_equal(oracle.is_nan(dtype, actual), nans, err_msg=str(note))
    np.testing.assert_array_equal(oracle.bits(actual)[~nans], oracle.bits(expected)[~nans], err_msg=str(note))


def run_all(kernels: Kernels, names: tuple[str, str], values: list[Array], **factors: float) -> None:
    """Packs the arrays in one launch, and unpacks them to other places in another."""
    gpu, dtype, wire = kernels.gpu, DTYPES[names[0]], DTYPES[names[1]]
    prescale, partial = factors.get("prescale", 1.0), factors.get("partial", 1.0)
    factor, divisor = factors.get("factor", 1.0), int(factors.get("divisor", 1))
    sources = [gpu.put(array) for array in values]
    total = sum(len(array) for array in values)
    guarded = np.full((total + 8) * wire.storage.itemsize, 0xA5, np.uint8)
    buffer = gpu.put(guarded) + 4 * wire.storage.itemsize
    ends = np.cumsum([len(array) for array in values]).tolist()
    places = [buffer + (end - len(array)) * wire.storage.itemsize for end, array in zip(ends, values, strict=True)]
    codes = (dtype.code, wire.code)
    rows = list(zip(sources, places, values, strict=True))
    kernels.launch(b"hr_pack", [Piece(s, p, len(v), prescale, partial, 1, *codes) for s, p, v in rows])
    found = gpu.get(buffer - 4 * wire.storage.itemsize, guarded)
    edge = 4 * wire.storage.itemsize
    assert np.all(found[:edge] == 0xA5)
    assert np.all(found[-edge:] == 0xA5)
    sent = found[edge:-edge].view(wire.storage)
    expected = [kernels.packed(names, array, prescale, partial) for array in values]
    check(sent, np.concatenate(expected), wire, (names, factors))
    targets = [gpu.put(np.zeros_like(array)) for array in values]
    rows = list(zip(targets, places, values, strict=True))
    kernels.launch(b"hr_unpack", [Piece(t, p, len(v), factor, 1.0, divisor, *codes) for t, p, v in rows])
    for target, packed, array in zip(targets, expected, values, strict=True):
        wanted = kernels.unpacked(names, packed, factor, divisor)
        check(gpu.get(target, array), wanted, dtype, (names, factors, len(array)))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_pair_of_dtypes_is_what_the_host_makes_of_it(kernels: Kernels, names: tuple[str, str]) -> None:
    rng = np.random.default_rng(7)
    dtype = DTYPES[names[0]]
    values = [random_values(dtype, length, rng) for length in LENGTHS]
    values.append(np.tile(special_values(dtype), 3))
    run_all(kernels, names, values)
    for factor in (0.37, -3.0, 1e9, 0.0):
        divisor = 3 if names[0] in INTEGERS else 1
        run_all(kernels, names, values, prescale=factor, factor=1 / 3 if factor == 0.0 else factor, divisor=divisor)
    if names[0] in INTEGERS:
        run_all(kernels, names, values, divisor=7)
    if names[1] == "float16":
        run_all(kernels, names, values, prescale=0.7, partial=0.125, factor=1.37)
    kernels.close()


@pytest.mark.parametrize("half", HALVES)
def test_every_16_bit_float_comes_out_and_goes_in_again(kernels: Kernels, half: str) -> None:
    dtype = DTYPES[half]
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    for wide in ("float32", "float64"):
        widened = kernels.convert(DTYPES[wide], dtype, every)
        run_all(kernels, (wide, half), [widened])
        with np.errstate(all="ignore"):
            between = (widened[:-1] + widened[1:]) / 2  # halfway, where rounding is to even
        run_all(kernels, (wide, half), [between, np.nextafter(between, np.inf), np.nextafter(between, -np.inf)])
    run_all(kernels, (half, half), [every], prescale=1.7)
    kernels.close()


def test_bool_is_true_for_any_byte_but_zero(kernels: Kernels) -> None:
    gpu, values = kernels.gpu, np.array([0, 1, 2, 255, 128, 0], np.uint8)
    source, buffer = gpu.put(values), gpu.put(values)
    piece = Piece(source, buffer, len(values), 1.0, 1.0, 1, DTYPES["bool"].code, DTYPES["uint8"].code)
    kernels.launch(b"hr_pack", [piece])
    assert gpu.get(buffer, values).tolist() == [0, 1, 1, 1, 1, 0]
    kernels.launch(b"hr_unpack", [piece])
    assert gpu.get(source, values).tolist() == [0, 1, 1, 1, 1, 0]
    kernels.close()


@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_pieces_of_any_length_and_dtype_are_one_launch(kernels: Kernels, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gpu, pieces, wanted = kernels.gpu, [], []
    for _ in range(int(rng.integers(1, 300))):
        names = PAIRS[rng.integers(len(PAIRS))]
        dtype, wire = DTYPES[names[0]], DTYPES[names[1]]
        count = int(rng.integers(1, 40)) if rng.random() < 0.9 else int(rng.integers(1, 3 * BLOCK))
        values = random_values(dtype, count, rng)
        factor = float(rng.choice([1.0, 0.3, -2.0]))
        place = gpu.put(np.zeros(count, wire.storage))
        pieces.append(Piece(gpu.put(values), place, count, factor, 1.0, 1, dtype.code, wire.code))
        wanted.append((place, kernels.packed(names, values, factor, 1.0), wire))
    before = gpu.counts()["kernels"]
    kernels.launch(b"hr_pack", pieces)
    assert gpu.counts()["kernels"] == before + 1
    for place, expected, wire in wanted:
        check(gpu.get(place, expected), expected, wire, seed)
    kernels.close()
