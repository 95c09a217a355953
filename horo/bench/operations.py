"""The collective operations that are measured: what their rates count, and known answers that tell a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["OPERATIONS", "Measured", "Part", "busbw_of", "count_wrong", "fill_pattern", "pattern_factor"]

_PERIOD = 3
_ADDING_RANKS = 32
"""More ranks add nothing, so that sums are exact in 16 bits."""
_ROOT_FACTOR = 7
_TOLD_APART = 4


@dataclass(frozen=True)
class Measured:
    """One operation.

    Attributes:
        name: as users call it.
        bus_factor: by the number of ranks, the bytes that must cross the link of the busiest rank for each of its
            tensor.
        in_parts: whether the ranks get or give equal parts of the tensor.
    """

    name: str
    bus_factor: Callable[[int], float]
    in_parts: bool = True


def _other_parts(ranks: int) -> float:
    """The share of a tensor in equal parts that the others have."""
    return (ranks - 1) / ranks


OPERATIONS = {
    each.name: each
    for each in (
        Measured("allreduce", lambda ranks: 2 * _other_parts(ranks), in_parts=False),
        Measured("allgather", _other_parts),
        Measured("reducescatter", _other_parts),
        Measured("alltoall", _other_parts),
        Measured("broadcast", lambda ranks: float(ranks > 1), in_parts=False),
    )
}


def busbw_of(name: str, ranks: int, size_bytes: int, us: float) -> tuple[float, float]:
    """The rates of an operation in GB/s of 1e9 bytes: of the tensor, and of what must cross the busiest link."""
    algbw = size_bytes / us / 1e3
    return algbw, algbw * OPERATIONS[name].bus_factor(ranks)


def pattern_factor(rank: int) -> int:
    """The factor of a rank's pattern in a sum; small, so that sums are exact in every dtype."""
    return rank % 4 + 1 if rank < _ADDING_RANKS else 0


def _pair_factor(origin: int, destination: int) -> int:
    """The factor of ``origin`` in what it gives ``destination``."""
    return origin % _TOLD_APART * _TOLD_APART + destination % _TOLD_APART + 1


def fill_pattern(values: Any, factor: int) -> None:
    """Fills a tensor or an array with ``factor`` times 1, 2, 3, 1, 2, 3, ..."""
    for place in range(_PERIOD):
        values[place::_PERIOD] = factor * (place + 1)


def count_wrong(values: Any, factor: int, first: int = 0) -> int:
    """The number of elements that ``fill_pattern`` would write otherwise with ``factor``, from element ``first`` on."""
    return sum(
        int((values[place::_PERIOD] != factor * ((first + place) % _PERIOD + 1)).sum()) for place in range(_PERIOD)
    )


@dataclass(frozen=True)
class Part:
    """One rank's part in an operation, and the values by which a part in the wrong place is found.

    Attributes:
        operation: its name.
        rank, size: of the job.
        count: elements of the largest tensor on a rank.
    """

    operation: str
    rank: int
    size: int
    count: int

    @property
    def part(self) -> int:
        """Elements of one of equal parts."""
        return self.count // self.size

    @property
    def given(self) -> int:
        """Elements that this rank gives."""
        return self.part if self.operation == "allgather" else self.count

    @property
    def received(self) -> int:
        """Elements of the result on this rank."""
        return self.part if self.operation == "reducescatter" else self.count

    def fill(self, tensor: Any) -> None:
        """Fills the given tensor or array with values of this rank, in an alltoall also of the receiver."""
        if self.operation == "alltoall":
            for to in range(self.size):
                fill_pattern(self._part_of(tensor, to), _pair_factor(self.rank, to))
        elif self.operation == "allgather":
            fill_pattern(tensor, _pair_factor(self.rank, 0))
        elif self.operation == "broadcast":
            fill_pattern(tensor, _ROOT_FACTOR if self.rank == 0 else 1)
        else:
            fill_pattern(tensor, pattern_factor(self.rank))

    def count_wrong(self, result: Any) -> int:
        """The number of wrong elements in the result."""
        if self.operation in ("allreduce", "reducescatter"):
            total = sum(map(pattern_factor, range(self.size)))
            return count_wrong(result, total, self.rank * self.part if self.operation == "reducescatter" else 0)
        if self.operation == "broadcast":
            return count_wrong(result, _ROOT_FACTOR)
        to = 0 if self.operation == "allgather" else self.rank
        return sum(count_wrong(self._part_of(result, rank), _pair_factor(rank, to)) for rank in range(self.size))

    def _part_of(self, tensor: Any, rank: int) -> Any:
        return tensor[rank * self.part : (rank + 1) * self.part]
