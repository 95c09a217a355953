"""Kernels of complex numbers: the product of whole numbers, bit for bit the same on every SIMD level."""

from __future__ import annotations

from types import ModuleType

import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_oracle import COMPLEX, PARTS, Dtype
from test_kernel import COUNTS, ORDINARY, STREAM, Array, Guarded, Kernel, assert_bits, kernel, placed, random_values

__all__ = ["kernel"]

by_dtype = pytest.mark.parametrize("dtype", COMPLEX.values(), ids=COMPLEX.keys())
UNITS = np.array([1, 1j, -1, -1j])


def any_numbers(dtype: Dtype, count: int, rng: np.random.Generator) -> Array:
    return random_values(PARTS[dtype.name], 2 * count, rng).view(dtype.storage)


def stored(dtype: Dtype, values: Array) -> Array:
    return oracle.join_parts(dtype, np.real(values), np.imag(values))


def read(dtype: Dtype, values: Array) -> Array:
    real, imaginary = oracle.parts_of(dtype, values)
    return real + 1j * imaginary


def assert_parts(dtype: Dtype, actual: Array, expected: Array, note: object) -> None:
    part = PARTS[dtype.name]
    assert_bits(part, actual.view(part.storage), expected.view(part.storage), note)


@by_dtype
def test_units_multiply_to_the_sum_of_their_angles(kernel: Kernel, dtype: Dtype) -> None:
    for count in COUNTS:
        angles = [(np.arange(count) * (3 * s + 1) + s) % 4 for s in range(5)]
        sources = [stored(dtype, UNITS[angle] * (1 + s)) for s, angle in enumerate(angles)]
        dst = np.zeros(count, dtype.storage)
        kernel.reduce(dtype, oracle.PRODUCT, sources, dst, scale=0.25)
        assert np.array_equal(read(dtype, dst), UNITS[sum(angles) % 4] * 30)


@by_dtype
def test_product_gives_the_exact_result_for_all_counts_alignments_and_scales(kernel: Kernel, dtype: Dtype) -> None:
    rng = np.random.default_rng([19, dtype.code])
    bytes_each = dtype.storage.itemsize
    for count in COUNTS:
        for src_count in (1, 2, 3, 5):
            scale = [1.0, 0.5, -1 / 3][(count + src_count) % 3]
            misalign = int(rng.integers(0, 64))
            sources = [placed(dtype, any_numbers(dtype, count, rng), misalign + i) for i in range(src_count)]
            dst = Guarded(dtype, count, int(rng.integers(0, 64)))
            for copy_at in (int(rng.integers(0, 64 // bytes_each)) * bytes_each, bytes_each // 2):
                copy = Guarded(dtype, count, copy_at)
                for store in (ORDINARY, STREAM):
                    kernel.reduce(dtype, oracle.PRODUCT, sources, dst.array, copy=copy.array, scale=scale, store=store)
                    note = (count, src_count, scale, store)
                    assert_parts(dtype, dst.array, oracle.multiply(dtype, sources, scale)[0], note)
                    assert dst.array.tobytes() == copy.array.tobytes(), note
                    assert dst.is_intact() and copy.is_intact(), note


@by_dtype
def test_levels_agree_with_scalar_bit_for_bit(native: ModuleType, kernel: Kernel, dtype: Dtype) -> None:
    """Payload and sign of a NaN included, except where there were two NaN to choose from."""
    part = PARTS[dtype.name]
    rng = np.random.default_rng([23, dtype.code])
    scalar = Kernel(native, "scalar")
    for count in (*COUNTS, 2000):
        for src_count in (1, 2, 4):
            sources = [placed(dtype, any_numbers(dtype, count, rng), i) for i in range(src_count)]
            for scale in (1.0, 0.3):
                undefined = oracle.multiply(dtype, sources, scale)[1].reshape(-1)
                expected, actual = np.empty(count, dtype.storage), np.empty(count, dtype.storage)
                scalar.reduce(dtype, oracle.PRODUCT, sources, expected, scale=scale)
                kernel.reduce(dtype, oracle.PRODUCT, sources, actual, scale=scale)
                one, two = (oracle.bits(values.view(part.storage)) for values in (actual, expected))
                assert oracle.is_nan(part, actual.view(part.storage)[undefined]).all()
                different = (one != two) & ~undefined
                assert not different.any(), (count, src_count, scale, np.flatnonzero(different)[:3])


@by_dtype
def test_either_order_of_two_factors_gives_the_same_bits(kernel: Kernel, dtype: Dtype) -> None:
    rng = np.random.default_rng([29, dtype.code])
    part = PARTS[dtype.name]
    for count in COUNTS:
        factors = [
            stored(dtype, rng.standard_normal(count) * 10.0 ** rng.integers(-2, 2, count) + 1j * rng.random(count))
            for _ in range(2)
        ]
        one, two = np.empty(count, dtype.storage), np.empty(count, dtype.storage)
        kernel.reduce(dtype, oracle.PRODUCT, factors, one)
        kernel.reduce(dtype, oracle.PRODUCT, factors[::-1], two)
        assert one.tobytes() == two.tobytes()
        assert not oracle.is_nan(part, one.view(part.storage)).any()


@by_dtype
def test_product_in_place_of_any_source(kernel: Kernel, dtype: Dtype) -> None:
    rng = np.random.default_rng([31, dtype.code])
    for count in (5, 300, 5000):
        for place in range(3):
            for scale in (1.0, 0.25):
                sources = [any_numbers(dtype, count, rng) for _ in range(3)]
                expected = oracle.multiply(dtype, sources, scale)[0]
                kernel.reduce(dtype, oracle.PRODUCT, sources, sources[place], scale=scale)
                assert_parts(dtype, sources[place], expected, (count, place, scale))


@pytest.mark.parametrize("store", [ORDINARY, STREAM])
@by_dtype
def test_scale_multiplies_both_parts(kernel: Kernel, dtype: Dtype, store: int) -> None:
    rng = np.random.default_rng([37, dtype.code])
    for count in (*COUNTS, 5000):
        for scale in (1.0, 0.1, -2.0):
            src = placed(dtype, any_numbers(dtype, count, rng), int(rng.integers(0, 8)))
            expected = src.copy() if scale == 1.0 else oracle.multiply(dtype, [src], scale)[0]
            dst = Guarded(dtype, count, int(rng.integers(0, 64)))
            kernel.scale(dtype, dst.array, src, scale, store)
            assert_parts(dtype, dst.array, expected, (count, scale))
            assert dst.is_intact()
            kernel.scale(dtype, src, src, scale, store)
            assert_parts(dtype, src, expected, (count, scale, "in place"))


def test_halves_are_multiplied_in_float32(kernel: Kernel) -> None:
    """300 * 300 is beyond float16, and comes back; 1 + 2^-10 squared and cubed is rounded once."""
    dtype = COMPLEX["complex32"]
    sources = [stored(dtype, np.full(77, value)) for value in (300j, 300j, 2.0**-10 - 2.0**-12 * 1j)]
    dst = np.empty(77, dtype.storage)
    kernel.reduce(dtype, oracle.PRODUCT, sources, dst)
    assert np.array_equal(read(dtype, dst), np.full(77, complex(np.float16(-90000 / 1024), np.float16(90000 / 4096))))
    near = 1 + 2.0**-10
    kernel.reduce(dtype, oracle.PRODUCT, [stored(dtype, np.full(77, near))] * 3, dst)
    assert np.array_equal(read(dtype, dst), np.full(77, np.float16(near**3), np.complex128))


@by_dtype
def test_infinity_times_zero_is_what_the_formula_says(kernel: Kernel, dtype: Dtype) -> None:
    """inf * 0 is NaN, in whichever part it is."""
    for pair in ((complex(np.inf, 0), complex(1, 0)), (complex(0, np.inf), complex(0, 1))):
        dst = np.zeros(77, dtype.storage)
        kernel.reduce(dtype, oracle.PRODUCT, [stored(dtype, np.full(77, value)) for value in pair], dst)
        real, imaginary = oracle.parts_of(dtype, dst)
        assert np.isinf(real).all() and np.isnan(imaginary).all()
