"""What a rank of a contestant computes with: one module per library, so that none imports another."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

# Given a value of this rank, the values of all ranks, by way of the driver.
Exchange = Callable[[Any], list[Any]]


class Library(Protocol):
    """One contestant's library, in one rank: the class ``Opened`` of a module here.

    Attributes:
        kind: the name of its module, or of one that is used in the same way: what a workload decides by.
        module: what its user imports: horo.torch, torch.distributed, mpi4py.MPI, horovod.torch; None without a library.
        rank: of this process.
        size: the number of ranks.
    """

    kind: str
    module: Any
    rank: int
    size: int

    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    def versions(self) -> dict[str, str]:
        """What the numbers depend on."""

    def close(self) -> None:
        """Leaves the job in order."""


def open_library(kind: str, rank: int, size: int, exchange: Exchange) -> Library:
    """Imports what ``kind`` needs and joins the job that a launcher has started."""
    opened: Library = importlib.import_module(f"libraries.{kind}").Opened(rank, size, exchange)
    return opened


def check_place(have: tuple[int, int], rank: int, size: int) -> None:
    """Refuses a job in which a library counts its ranks otherwise than the contest does."""
    if have != (rank, size):
        raise RuntimeError(f"the launcher made rank {have[0]} of {have[1]} where rank {rank} of {size} was due")
