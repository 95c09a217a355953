"""The kernels of Adasum for GPUs, run on the host by the double of the driver: sums to the bit, and what combines."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import ModuleType

import kernel_oracle as oracle
import numpy as np
import pytest
from adasum_oracle import adasum
from device_group import Gpu
from kernel_oracle import DTYPES, Array, Dtype
from test_device_kernels import THREADS, check
from test_kernel import special_values

PER_THREAD, THREADS_MAX, PRODUCTS = 64, 1 << 16, 3
FLOATS = ["float16", "bfloat16", "float32", "float64"]
LENGTHS = [1, 2, 63, 64, 65, 0, 1000, PER_THREAD * THREADS - 1, PER_THREAD * THREADS, PER_THREAD * THREADS + 1, 40_000]


class Piece(ctypes.Structure):
    """struct hr_adasum_piece."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("values", "stride", "count")),
        *((name, ctypes.c_uint) for name in ("first_partial", "first_block", "threads")),
        ("dtype", ctypes.c_int),
    )


class Batch(ctypes.Structure):
    """struct hr_adasum_batch."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("pieces", "partials", "sums")),
        *((name, ctypes.c_uint) for name in ("count", "size", "block_count", "partial_count")),
    )


@dataclass
class Tensor:
    dtype: Dtype
    of_rank: list[Array]

    @property
    def threads(self) -> int:
        return min(-(-len(self.of_rank[0]) // PER_THREAD), THREADS_MAX)

    def wide(self, rank: int) -> Array:
        wide: Array = oracle.compute_form(self.dtype, self.of_rank[rank]).astype(np.float64)
        return wide


class OnGpu:
    """A batch whose tensors lie apart, those of a rank behind those of the one before, between bytes that stay."""

    def __init__(self, gpu: Gpu, tensors: list[Tensor], size: int) -> None:
        self.gpu, self.tensors, self.size = gpu, tensors, size
        self.stream = gpu.stream()
        pieces, partials, blocks = [], 0, 0
        self.places = []
        for tensor in tensors:
            row = tensor.of_rank[0]
            stride = -(-row.nbytes // 64) * 64 + 64
            held = np.full(stride * size, 0xA5, np.uint8)
            for r, values in enumerate(tensor.of_rank):
                held[r * stride : r * stride + row.nbytes] = values.view(np.uint8)
            self.places.append((gpu.put(held), stride, held))
            threads = tensor.threads
            pieces.append(Piece(self.places[-1][0], stride, len(row), partials, blocks, threads, tensor.dtype.code))
            partials += threads
            blocks += -(-threads // THREADS)
        self.pieces, self.blocks = pieces, blocks
        pairs = size // 2
        self.sums = np.full((pairs, len(tensors), PRODUCTS), 77.0)
        self.at_sums = gpu.put(self.sums)
        table = gpu.put(np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8))
        room = gpu.put(np.full(pairs * partials * PRODUCTS, np.nan))
        batch = Batch(table, room, self.at_sums, len(tensors), size, blocks, partials)
        self.batch = gpu.put(np.frombuffer(bytes(batch), np.uint8))

    def launch(self, name: bytes, distance: int, blocks: int) -> None:
        lib, function = self.gpu.lib, ctypes.c_void_p()
        if blocks == 0:
            return
        assert lib.cuModuleGetFunction(ctypes.byref(function), None, name) == 0
        address, number = ctypes.c_uint64(self.batch), ctypes.c_uint(distance)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(number))
        lib.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
        grid = [ctypes.c_uint(n) for n in (blocks, 1, 1, THREADS, 1, 1, 0)]
        assert lib.cuLaunchKernel(function, *grid, ctypes.c_void_p(self.stream), arguments, None) == 0
        lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        self.gpu.synchronize(self.stream)

    def level(self, distance: int) -> tuple[Array, list[list[Array]]]:
        """The sums, and what all ranks' places hold of each tensor when pairs are combined by them."""
        pairs = -(-(self.size - distance) // (2 * distance))
        self.launch(b"hr_adasum_multiply", distance, pairs * self.blocks)
        self.launch(b"hr_adasum_fold", distance, pairs * len(self.tensors))
        self.launch(b"hr_adasum_total", distance, -(-pairs * len(self.tensors) * PRODUCTS // THREADS))
        sums = self.gpu.get(self.at_sums, self.sums)
        assert np.all(sums[pairs:] == self.sums[pairs:])
        self.sums = sums
        self.launch(b"hr_adasum_combine", distance, pairs * self.blocks)
        return sums[:pairs], [self.held(i) for i in range(len(self.tensors))]

    def held(self, i: int) -> list[Array]:
        place, stride, held = self.places[i]
        row = self.tensors[i].of_rank[0]
        found = self.gpu.get(place, held)
        for r in range(self.size):
            assert np.all(found[r * stride + row.nbytes : (r + 1) * stride] == 0xA5)
        return [found[r * stride : r * stride + row.nbytes].view(row.dtype) for r in range(self.size)]


def summed(x: Array, y: Array, threads: int) -> float:
    """In the order of the kernels."""
    partials = np.zeros(threads)
    for at in range(0, len(x), max(threads, 1)):
        step = x[at : at + threads] * y[at : at + threads]
        partials[: len(step)] += step
    folded = np.zeros(min(threads, THREADS))
    for at in range(0, threads, THREADS):
        step = partials[at : at + THREADS]
        folded[: len(step)] += step
    total = 0.0
    for value in folded:
        total += value
    return float(total)


def host_combined(native: ModuleType, tensor: Tensor, a: Array, b: Array, sums: Array) -> Array:
    ffi, lib = native.ffi, native.lib
    result, other = a.copy(), b.copy()
    factors = [1 - sums[0] / (2 * square) if square >= 2.0**-511 else 1.0 for square in sums[1:]]
    data = ffi.from_buffer(result), ffi.from_buffer(other)
    assert lib.shim_kernel_combine(b"scalar", tensor.dtype.code, *data, len(a), *factors) == 0
    return result


def check_levels(gpu: Gpu, native: ModuleType, tensors: list[Tensor], size: int) -> None:
    batch = OnGpu(gpu, tensors, size)
    distance = 1
    while distance < size:
        with np.errstate(all="ignore"):
            expected = [
                [
                    [summed(x, y, tensor.threads) for x, y in ((a, b), (a, a), (b, b))]
                    for tensor in tensors
                    for a, b in [(tensor.wide(low), tensor.wide(low + distance))]
                ]
                for low in range(0, size - distance, 2 * distance)
            ]
            sums, held = batch.level(distance)
            np.testing.assert_array_equal(sums, expected)
            for i, tensor in enumerate(tensors):
                for pair, low in enumerate(range(0, size - distance, 2 * distance)):
                    a, b = tensor.of_rank[low], tensor.of_rank[low + distance]
                    tensor.of_rank[low] = host_combined(native, tensor, a, b, sums[pair][i])
                for r in range(size):
                    check(held[i][r], tensor.of_rank[r], tensor.dtype, (size, distance, i, r))
        distance *= 2
    gpu.close(batch.stream)


def tensors_of(lengths: list[int], names: list[str], size: int, seed: int) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    tensors = []
    for i, length in enumerate(lengths):
        dtype = DTYPES[names[i % len(names)]]
        common = rng.standard_normal(length)
        drawn = [oracle.convert_values(dtype, common + rng.standard_normal(length)) for _ in range(size)]
        tensors.append(Tensor(dtype, drawn))
    return tensors


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("size", [2, 5])
def test_every_length_has_its_sums_and_is_combined_as_on_the_host(
    gpu: Gpu, native: ModuleType, name: str, size: int
) -> None:
    check_levels(gpu, native, tensors_of(LENGTHS, [name], size, 1), size)


def test_a_piece_has_an_end_of_threads(gpu: Gpu, native: ModuleType) -> None:
    check_levels(gpu, native, tensors_of([PER_THREAD * THREADS_MAX + 70_001, 5], ["float32"], 2, 2), 2)


@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_tensors_of_all_dtypes_are_one_launch(gpu: Gpu, native: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 12))
    lengths = [int(n) for n in np.where(rng.random(150) < 0.2, 0, rng.integers(0, 400, 150))]
    check_levels(gpu, native, tensors_of(lengths, FLOATS, size, seed), size)


@pytest.mark.parametrize("name", FLOATS)
def test_values_of_every_kind(gpu: Gpu, native: ModuleType, name: str) -> None:
    """What is not finite makes its own tensor a NaN; zeros and what squares to less than a double are added."""
    dtype = DTYPES[name]
    special = special_values(dtype)
    finite = special[np.isfinite(oracle.compute_form(dtype, special))]
    zeros = np.zeros_like(finite)
    tensors = [
        Tensor(dtype, [special, special[::-1].copy()]),
        Tensor(dtype, [finite, finite.copy()]),
        Tensor(dtype, [finite, zeros]),
        Tensor(dtype, [zeros, zeros.copy()]),
    ]
    check_levels(gpu, native, tensors, 2)


def test_all_levels_together_are_adasum(gpu: Gpu, native: ModuleType) -> None:
    for size in (2, 3, 6, 7, 8):
        (tensor,) = tensors_of([3000], ["float64"], size, size)
        expected = adasum(tensor.of_rank)
        check_levels(gpu, native, [tensor], size)
        np.testing.assert_allclose(tensor.of_rank[0], expected, rtol=1e-9, atol=1e-12)
