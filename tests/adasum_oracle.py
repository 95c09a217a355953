"""What Adasum gives, in float64: the formula of its paper, pair by pair."""

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

_ZERO = float(np.sqrt(sys.float_info.min))
"""Squares of norms below are those of vectors without a direction."""


def _factor(product: float, square: float) -> float:
    return 1 - product / (2 * square) if square >= _ZERO else 1.0


def _pair(a: Vector, b: Vector) -> Vector:
    product = float(np.sum(a * b))
    return a * _factor(product, float(np.sum(a * a))) + b * _factor(product, float(np.sum(b * b)))


def adasum(vectors: Sequence[npt.NDArray[np.floating]]) -> Vector:
    """Of the ranks' vectors, in their order: neighbours first, then what came of them; who has no partner goes on."""
    nodes = [np.asarray(vector, np.float64) for vector in vectors]
    while len(nodes) > 1:
        pairs = [_pair(*nodes[i : i + 2]) for i in range(0, len(nodes) - 1, 2)]
        nodes = [*pairs, *nodes[len(nodes) & ~1 :]]
    return nodes[0]


def tolerance(vectors: Sequence[npt.NDArray[np.floating]], digits: int) -> float:
    """How far an element may be off where each level of the tree rounds once to ``digits`` binary digits."""
    levels = (len(vectors) - 1).bit_length() + 1
    size = max((float(np.abs(np.asarray(vector, np.float64)).max(initial=0)) for vector in vectors), default=0.0)
    return levels * 2.0 ** (1 - digits) * size * levels
