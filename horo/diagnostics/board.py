"""The last steps of the ranks of a host, in memory that they share: each writes its own, and any may read all.

Nobody waits and nothing is sent. A reader that meets a writer gets an old step or one that is half new; it takes only
steps that all ranks have, so one such step changes nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from horo.diagnostics.slowest import Slowest, slowest_of

__all__ = ["BOARD_BYTES", "Board", "LastSteps"]

_STEPS = 64
_STEP = struct.Struct("<IIII")
"""Number, microseconds of waiting, of loading, and in all."""
BOARD_BYTES = _STEPS * _STEP.size
"""Of each rank."""
_U32 = (1 << 32) - 1


@dataclass(frozen=True)
class LastSteps:
    """The last steps of all ranks of a board at one time.

    Attributes:
        ranks: in the order of their places.
        rows: as they lie in the memory.
    """

    ranks: tuple[int, ...]
    rows: bytes

    def slowest(self) -> Slowest | None:
        """The rank that the others have waited for; None: there is none, or there are too few steps."""
        steps = {rank: self._of(place) for place, rank in enumerate(self.ranks)}
        if not all(steps.values()):
            return None
        samples = {rank: [row[:3] for row in rows] for rank, rows in steps.items()}
        return slowest_of(samples, fmean(row[3] for rows in steps.values() for row in rows) / 1e6)

    def _of(self, place: int) -> list[tuple[int, int, int, int]]:
        rows = _STEP.iter_unpack(self.rows[BOARD_BYTES * place : BOARD_BYTES * (place + 1)])
        return [(number, waiting, loading, us) for number, waiting, loading, us in rows if number]


class Board:
    """Of one rank.

    Args:
        fd: of the memory, which is closed.
        rank: this one.
        ranks: of the host, in the order of their places in the memory.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, fd: int, rank: int, ranks: Sequence[int]) -> None:
        try:
            self._memory: mmap.mmap | bytearray = mmap.mmap(fd, BOARD_BYTES * len(ranks))
        finally:
            os.close(fd)
        self._ranks = tuple(ranks)
        self._at = BOARD_BYTES * self._ranks.index(rank)

    def add(self, number: int, waiting_us: int, loading_us: int, us: int) -> None:
        """This rank has done a step."""
        at = self._at + number % _STEPS * _STEP.size
        _STEP.pack_into(self._memory, at, number & _U32, min(waiting_us, _U32), min(loading_us, _U32), min(us, _U32))

    def look(self) -> LastSteps:
        """The steps as they are now."""
        return LastSteps(self._ranks, bytes(self._memory))

    def close(self) -> None:
        """Gives the memory back; another thread may still be in a step, or look."""
        memory, self._memory = self._memory, bytearray(BOARD_BYTES * len(self._ranks))
        if isinstance(memory, mmap.mmap):
            memory.close()
