"""The shares of parameters: each rank of a host owns some, and steps those."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["LOAD_OF_TENSOR", "share_out"]

LOAD_OF_TENSOR = 64 << 10
"""The cost of stepping a tensor whatever its size, in bytes that could be stepped in that time."""


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each parameter, so that all owners have about equal loads: the largest goes first.

    Args:
        sizes: Bytes of each; 0 for one that is not trained.
        loads: What each owner has already; what it gets is added.
    """
    owners = [0] * len(sizes)
    heap = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, owner = heap[0]
        owners[index] = owner
        load += sizes[index] + LOAD_OF_TENSOR if sizes[index] else 0
        heapq.heapreplace(heap, (load, owner))
    for load, owner in heap:
        loads[owner] = load
    return owners
