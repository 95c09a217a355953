"""What Adasum must give; proposals of rank 0 and Adasums for ranks over any transport, threads and processes."""

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from horo.core import context

_LEVEL = ["    ADASUM_DOT_PRODUCTS", "    ADASUM_SUM_OF_PRODUCTS", "    ADASUM_COMBINE"]


class Proposals:
    """Values drawn by a seed, for rank 0 to propose."""

    def __init__(self, seed: int, slot: int, sockets: int) -> None:
        self._chance = random.Random(seed)
        self._choices: dict[str, list[int]] = {
            "segment": [4096 << k for k in range(20) if 4096 << k <= slot], "piece": [4096 << k for k in range(11)],
            "sockets": list(range(1, sockets + 1)), "fusion": [0, *(1 << k for k in range(18, 31))],
            "doubling": [1 << k for k in range(10, 21)], "carried": [0, *(1 << k for k in range(9, 15))],
            "cycle": [0, 128, 200], "overlap": [1, 2],
        }  # fmt: skip

    def propose(self, rank: Any) -> None:
        """Other values than before, if this is rank 0."""
        if rank.rank == 0:
            rank.context.propose_tuning({knob: self._chance.choice(of) for knob, of in self._choices.items()})


def adasums(rank: Any) -> None:
    """Adasums named ``alone``, ``two`` (packed) and ``mixed`` (of two dtypes), then an allreduce named ``alone``."""
    op = context.REDUCE_OPS["adasum"]
    ones, one = np.ones((50, 1000), np.float32), np.ones(1, np.float16)
    rank.finish(rank.submit("allreduce", "alone", [ones], outputs=[np.empty_like(ones)], reduce_op=op))
    rank.finish(rank.submit("allreduce", "two", [ones, ones], outputs=[ones * 0, ones * 0], reduce_op=op))
    rank.finish(rank.submit("allreduce", "mixed", [ones, one], outputs=[ones * 0, one * 0], reduce_op=op))
    rank.allreduce(ones, "alone")


def adasum_rows(via: str, levels: int) -> dict[str, list[str]]:
    """What a timeline says of `adasums`, by name, that went by ``SHM``, ``TCP`` or ``MPI``."""
    head = ["NEGOTIATE_ADASUM", "ADASUM", f"  {via}_ADASUM_ALLREDUCE"]
    work = ["    ADASUM_ALLTOALL", *_LEVEL * levels, "    ADASUM_ALLGATHER"]
    return {
        "alone": [*head, *work, "NEGOTIATE_ALLREDUCE", "ALLREDUCE", f"  {via}_ALLREDUCE"],
        "two": [*head, "    MEMCPY_IN_FUSION_BUFFER", *work, "    MEMCPY_OUT_FUSION_BUFFER"],
        "mixed": [*head, *work, *work],
    }


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
