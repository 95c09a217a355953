"""Complex numbers whose products are known exactly, for ranks over any transport and backend.

Each is a power of i times a power of 1 + i, so that a product is known by adding exponents, and is so small that every
dtype holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from ranks import NUMPY_OF_COMPLEX

Array = np.ndarray[Any, Any]

UNITS = np.array([1, 1j, -1, -1j])
POWERS = np.array([1, 1 + 1j, 2j, -2 + 2j, -4, -4 - 4j, -8j, 8 - 8j, 16, 16 + 16j, 32j, -32 + 32j, -64])
"""Of 1 + i."""


def _exponents(rank: int, count: int, salt: int) -> tuple[Array, Array]:
    index = np.arange(count) + salt
    return (index + rank * (index % 5)) % 4, (index // 3 + rank) % 3 == 0


def factor(rank: int, count: int, salt: int = 0) -> Array:
    """The contribution of a rank, as complex128."""
    of_i, of_other = _exponents(rank, count, salt)
    result: Array = UNITS[of_i] * POWERS[of_other.astype(int)]
    return result


def product(ranks: Iterable[int], count: int, salt: int = 0) -> Array:
    """What these ranks give together, as complex128."""
    of_i, of_other = np.zeros(count, int), np.zeros(count, int)
    for rank in ranks:
        more = _exponents(rank, count, salt)
        of_i += more[0]
        of_other += more[1]
    result: Array = UNITS[of_i % 4] * POWERS[of_other]
    return result


def stored(values: Array, dtype: str) -> Array:
    """As an array that the core reduces as this dtype; numpy has no complex32."""
    kind = np.dtype(NUMPY_OF_COMPLEX[dtype])
    if kind.kind == "c":
        return values.astype(kind)
    result = np.empty(values.shape, kind)
    result["real"], result["imag"] = values.real, values.imag
    return result


def read(array: Array) -> Array:
    """The inverse: complex128."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array["real"].astype(np.float64) + 1j * array["imag"].astype(np.float64)


def multiplied(factors: Sequence[Array]) -> Array:
    """The product, in complex128."""
    result = factors[0].astype(np.complex128)
    for other in factors[1:]:
        result = result * other
    return result
