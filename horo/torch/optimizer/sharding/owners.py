"""The shares of parameters: each rank of a host owns some, or a part of a large one, and steps those."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from horo.torch.optimizer.sharding.pages import PAGE

__all__ = ["LOAD_OF_TENSOR", "StepShare", "cut", "is_too_large", "share_out"]

LOAD_OF_TENSOR = 64 << 10
"""The cost of stepping a tensor whatever its size, in bytes that could be stepped in that time."""
_EXCESS = 1.25
"""A parameter is cut if it is larger than so many even shares of all."""


class StepShare(NamedTuple):
    """The part of a cut parameter that one rank steps."""

    owner: int
    """Its place on the host."""
    start: int
    """In elements."""
    end: int


def is_too_large(size: int, total: int, owners: int) -> bool:
    """Whether a parameter of so many bytes, of so many in all, is to be cut: its owner would keep the others waiting.

    An owner of a small part takes as long as one of a whole small tensor.
    """
    return owners > 1 and size * owners > total * _EXCESS and size > LOAD_OF_TENSOR * owners


def cut(numel: int, itemsize: int, loads: list[int]) -> tuple[StepShare, ...]:
    """Equal parts of a parameter for all owners. They begin at pages: vectors of the kernels are whole.

    Args:
        numel: Its elements.
        itemsize: Bytes of one.
        loads: As for ``share_out``.
    """
    step = PAGE // itemsize
    ends = [min(numel, -(-numel * number // (len(loads) * step)) * step) for number in range(len(loads) + 1)]
    for owner in range(len(loads)):
        loads[owner] += (ends[owner + 1] - ends[owner]) * itemsize + LOAD_OF_TENSOR
    return tuple(StepShare(owner, ends[owner], ends[owner + 1]) for owner in range(len(loads)))


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
