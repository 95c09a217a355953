"""Batches whose results are known, for ranks over any transport and backend: threads and processes alike."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from horo import _core

SIZES = [1, 3, 100, 2000, 4096, 10_000, 70_000]
_LEVEL = ["    ADASUM_DOT_PRODUCTS", "    ADASUM_SUM_OF_PRODUCTS", "    ADASUM_COMBINE"]


def collectives(rank: Any, step: int) -> None:
    """Several operations at once, of sizes that are carried, of one segment, and of many."""
    chance = random.Random(step)
    sizes = [chance.choice(SIZES) for _ in range(4)]
    arrays = [np.arange(size, dtype=np.float64) + rank.rank + k for k, size in enumerate(sizes)]
    handles = [
        rank.submit("allreduce", f"a{k} {size}", [array], reduce_op=_core.REDUCE_OPS["sum"])
        for k, (size, array) in enumerate(zip(sizes, arrays, strict=True))
    ]
    for handle in handles:
        rank.finish(handle)
    for k, array in enumerate(arrays):
        offset = rank.size * (rank.size - 1) / 2 + rank.size * k
        np.testing.assert_array_equal(array, np.arange(array.size, dtype=np.float64) * rank.size + offset)
    root = step % rank.size
    assert set(rank.broadcast(np.full(sizes[0], rank.rank, np.int32), root)) == {root}
    gathered, rows = rank.allgather(np.full(sizes[1] + rank.rank, rank.rank, np.int32))
    assert rows == [sizes[1] + other for other in range(rank.size)]
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(rank.size), rows))
    rank.barrier()


def adasums(rank: Any) -> None:
    """Adasums named ``alone``, ``two`` (packed) and ``mixed`` (of two dtypes), then an allreduce named ``alone``."""
    op = _core.REDUCE_OPS["adasum"]
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
