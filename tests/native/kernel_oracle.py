"""What the kernels must give: the contract of kernel.h as numpy arithmetic, element by element and source by source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BFLOAT16 = "bfloat16"
SUM, MIN, MAX, PRODUCT, BAND, BOR, BXOR = 1, 3, 4, 5, 6, 7, 8
OPS = {"sum": SUM, "min": MIN, "max": MAX, "product": PRODUCT}
BITS = (BAND, BOR, BXOR)


@dataclass(frozen=True)
class Dtype:
    """One dtype of the core; `storage` is how numpy holds its bits (numpy has no bfloat16)."""

    code: int
    name: str
    storage: np.dtype[Any]

    def __str__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.name == BFLOAT16 or self.storage.kind == "f"

    @property
    def is_half(self) -> bool:
        return self.name in {BFLOAT16, "float16"}


_STORAGE = {
    "uint8": "u1", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8",
    "float16": "f2", BFLOAT16: "u2", "float32": "f4", "float64": "f8", "bool": "u1",
    "uint16": "u2", "uint32": "u4", "uint64": "u8",
}  # fmt: skip
DTYPES = {name: Dtype(code, name, np.dtype(storage)) for code, (name, storage) in enumerate(_STORAGE.items())}

COMPLEX = {
    "complex32": Dtype(13, "complex32", np.dtype("u4")),  # numpy has none
    "complex64": Dtype(14, "complex64", np.dtype("c8")),
    "complex128": Dtype(15, "complex128", np.dtype("c16")),
}
CASES = [
    *((dtype, op) for dtype in DTYPES.values() for op in OPS.values()),
    *((dtype, op) for dtype in DTYPES.values() for op in BITS if not dtype.is_float),
    *((dtype, PRODUCT) for dtype in COMPLEX.values()),
]
"""What can be reduced how, without scales."""
PARTS = {"complex32": DTYPES["float16"], "complex64": DTYPES["float32"], "complex128": DTYPES["float64"]}
"""Of complex numbers the dtype of their real and imaginary parts, which follow each other."""


def widen_bfloat16(bits: Array) -> Array:
    """uint16 bits -> float32 of the same value."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: Array) -> Array:
    """float32 -> uint16 bits, by comparing distances as integers: nearest, ties to even, NaN stays NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    below = bits & 0xFFFF0000
    above = below + 0x10000
    odd = (bits >> 16) & 1
    up = (above - bits < bits - below) | ((above - bits == bits - below) & (odd == 1))
    nearest = np.where(up, above, below) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, nearest).astype(np.uint16)


def compute_form(dtype: Dtype, values: Array) -> Array:
    """Stored values as what they are reduced in: 16-bit floats as float32, bool as 0 and 1."""
    if dtype.name == BFLOAT16:
        return widen_bfloat16(values)
    if dtype.name == "float16":
        return np.asarray(values, dtype=np.float32)
    if dtype.name == "bool":
        return np.not_equal(values, 0).astype(np.uint8)
    return values


def combine(dtype: Dtype, op: int, a: Array, b: Array) -> Array:
    """One step of a reduction, a being the earlier value."""
    if op in BITS:
        return {BAND: a & b, BOR: a | b, BXOR: a ^ b}[op]
    if dtype.name == "bool":
        return a | b if op in {SUM, MAX} else a & b
    if op == SUM:
        return a + b
    if op == PRODUCT:
        return a * b
    wins = b < a if op == MIN else b > a
    return np.where(wins | np.isnan(b), b, a) if dtype.is_float else np.where(wins, b, a)


def scale_integers(values: Array, scale: float) -> Array:
    """Integers times a double, truncated toward zero, saturating; NaN gives 0."""
    limits = np.iinfo(values.dtype)
    product = np.nan_to_num(values.astype(np.float64) * np.float64(scale), nan=0.0, posinf=np.inf, neginf=-np.inf)
    low, high = int(limits.min), int(limits.max)
    return np.array([high if x >= high else low if x <= low else int(x) for x in product.tolist()], dtype=values.dtype)


def stored_form(dtype: Dtype, values: Array) -> Array:
    """The inverse of compute_form, rounding once."""
    if dtype.name == BFLOAT16:
        return narrow_bfloat16(values)
    return values.astype(dtype.storage)


def reduce(dtype: Dtype, op: int, sources: Sequence[Array], scale: float = 1.0) -> Array:
    """The result of hr_kernel.reduce as stored values, of the sources' length."""
    if dtype.name in COMPLEX:
        return multiply(dtype, sources, scale)[0]
    with np.errstate(all="ignore"):
        value = compute_form(dtype, sources[0])
        for source in sources[1:]:
            value = combine(dtype, op, value, compute_form(dtype, source))
        if scale != 1.0 and dtype.is_float:
            value = value * value.dtype.type(scale)
        elif scale != 1.0 and dtype.name != "bool":
            value = scale_integers(value, scale)
        return stored_form(dtype, value)


def parts_of(dtype: Dtype, values: Array) -> tuple[Array, Array]:
    """Stored complex numbers as their real and imaginary parts, as what they are multiplied in."""
    part = PARTS[dtype.name]
    parts = values.view(part.storage)
    return compute_form(part, parts[0::2]), compute_form(part, parts[1::2])


def multiply(dtype: Dtype, sources: Sequence[Array], scale: float = 1.0) -> tuple[Array, Array]:
    """The product of stored complex numbers by hr_kernel.reduce, and where it has met two NaN, of each part."""
    with np.errstate(all="ignore"):
        a, b = parts_of(dtype, sources[0])
        both_nan = np.zeros((len(sources[0]), 2), dtype=bool)
        for source in sources[1:]:
            c, d = parts_of(dtype, source)
            factors = ((a, c), (b, d)), ((a, d), (b, c))
            for part, (first, second) in enumerate(factors):
                nans = [np.isnan(x) & np.isnan(y) for x, y in (first, second)]
                both_nan[:, part] |= nans[0] | nans[1]
                both_nan[:, part] |= np.isnan(first[0] * first[1]) & np.isnan(second[0] * second[1])
            a, b = a * c - b * d, a * d + b * c
        if scale != 1.0:
            a, b = a * a.dtype.type(scale), b * b.dtype.type(scale)
        return join_parts(dtype, a, b), both_nan


def join_parts(dtype: Dtype, real: Array, imaginary: Array) -> Array:
    """The inverse of parts_of, rounding once."""
    parts = np.empty(2 * len(real), PARTS[dtype.name].storage)
    with np.errstate(all="ignore"):
        parts[0::2], parts[1::2] = real, imaginary
    return parts.view(dtype.storage)


def convert(to: Dtype, origin: Dtype, values: Array, scale: float = 1.0) -> Array:
    """The result of hr_kernel.convert as stored values: multiplied in the wider dtype; float64 goes through float32."""
    with np.errstate(all="ignore"):
        wide = compute_form(origin, values)
        if to.name == "float64":
            wide = wide.astype(np.float64)
        if scale != 1.0:
            wide = wide * wide.dtype.type(scale)
        return stored_form(to, wide.astype(np.float32) if to.is_half else wide)


def convert_values(dtype: Dtype, values: Array) -> Array:
    """Any floats as stored values of a floating dtype."""
    return stored_form(dtype, values.astype(np.float32) if dtype.is_half else values)


def dots(dtype: Dtype, a: Array, b: Array) -> Array:
    """The sums of hr_kernel.dots: eight running ones take the elements in turn, and are added in their order."""
    result = np.zeros(3)
    step = 1024 if dtype.is_half else max(len(a), 1)
    for i in range(0, len(a), step):
        x, y = (compute_form(dtype, v[i : i + step]).astype(np.float64) for v in (a, b))
        for number, products in enumerate((x * y, x * x, y * y)):
            lanes = np.zeros(8)
            for at in range(0, len(products), 8):
                part = products[at : at + 8]
                lanes[: len(part)] += part
            for lane in lanes:
                result[number] += lane
    return result


def combine_pair(dtype: Dtype, a: Array, b: Array, factors: tuple[float, float]) -> Array:
    """The result of hr_kernel.combine as stored values."""
    with np.errstate(all="ignore"):
        x, y = (compute_form(dtype, v).astype(np.float64) for v in (a, b))
        value = x * factors[0] + y * factors[1]
        return stored_form(dtype, value if dtype.name == "float64" else value.astype(np.float32))


def nan_and_nan(dtype: Dtype, op: int, sources: Sequence[Array], scale: float = 1.0) -> Array:
    """Where a sum or product adds or multiplies two NaN, as bool: the result is NaN, and no more is promised."""
    if dtype.name in COMPLEX:
        return multiply(dtype, sources, scale)[1]
    both_nan = np.zeros(len(sources[0]), dtype=bool)
    if not dtype.is_float or op in {MIN, MAX}:
        return both_nan
    with np.errstate(all="ignore"):
        value = compute_form(dtype, sources[0])
        for source in sources[1:]:
            following = compute_form(dtype, source)
            both_nan |= np.isnan(value) & np.isnan(following)
            value = combine(dtype, op, value, following)
    return both_nan


def is_nan(dtype: Dtype, values: Array) -> Array:
    """Where stored values are NaN, as bool."""
    if not dtype.is_float:
        return np.zeros(len(values), dtype=bool)
    return np.isnan(widen_bfloat16(values) if dtype.name == BFLOAT16 else values)


def bits(values: Array) -> Array:
    """The values as unsigned integers of the same size."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))
