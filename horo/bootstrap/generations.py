"""The keys and values by which the driver of an elastic job places workers; hororun writes them, workers read them.

A *worker* is a process of an elastic job; its number is never used again. A *generation* is an ordered list of workers
that form the job for a time; the rank of a worker is its place in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Change", "Seat", "change_key", "seat_key", "seats_of"]


@dataclass(frozen=True)
class Seat:
    """The place of one worker in one generation.

    Attributes:
        generation: its number, from 1.
        rank: of the worker.
        workers: of the generation, by rank.
        local: local rank and size.
        cross: cross rank and size.
    """

    generation: int
    rank: int
    workers: tuple[int, ...]
    local: tuple[int, int]
    cross: tuple[int, int]

    def encode(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Seat:
        """The seat that ``encode`` has written."""
        read = json.loads(value)
        pairs = {name: (int(read[name][0]), int(read[name][1])) for name in ("local", "cross")}
        return cls(int(read["generation"]), int(read["rank"]), tuple(map(int, read["workers"])), **pairs)


@dataclass(frozen=True)
class Change:
    """The workers that have come, or are to leave, since the generation began."""

    added: bool = False
    removed: bool = False

    def encode(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Change:
        """The change that ``encode`` has written."""
        read = json.loads(value)
        return cls(bool(read["added"]), bool(read["removed"]))

    def __bool__(self) -> bool:
        return self.added or self.removed


def seat_key(job_id: str, worker: int, number: int) -> str:
    """The key of the seat that a worker gets as its ``number``-th, from 1."""
    return f"horo/{job_id}/worker {worker}/seat {number}"


def change_key(job_id: str, generation: int, number: int) -> str:
    """The key of the ``number``-th change since a generation began, from 1; it replaces those before."""
    return f"horo/{job_id}/{generation}/change {number}"


def seats_of(generation: int, workers: Sequence[int], hosts: Sequence[int]) -> list[Seat]:
    """The seats of a generation.

    Args:
        generation: its number.
        workers: by rank.
        hosts: the number of the host of each; the ranks of a host follow each other.
    """
    locals_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        locals_of.setdefault(host, []).append(rank)
    seats = []
    for rank, host in enumerate(hosts):
        local_rank, local_size = locals_of[host].index(rank), len(locals_of[host])
        column = [each for each, ranks in locals_of.items() if len(ranks) > local_rank]
        cross = column.index(host), len(column)
        seats.append(Seat(generation, rank, tuple(workers), (local_rank, local_size), cross))
    return seats
