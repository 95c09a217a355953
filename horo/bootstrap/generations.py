"""The keys and values by which the driver of an elastic job places workers; hororun writes them, workers read them.

A *worker* is a process of an elastic job; its number is never used again. A *generation* is an ordered list of workers
that form the job for a time; the rank of a worker is its place in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Change", "Seat", "change_key", "members_key", "seat_entries", "seat_key", "seats_of"]


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
        """For the store, without the workers: those are in one entry for all."""
        return json.dumps([self.generation, self.rank, *self.local, *self.cross]).encode()

    @classmethod
    def decode(cls, value: bytes, members_of: Callable[[int], bytes]) -> Seat:
        """The seat that ``encode`` has written; ``members_of``: gives the entry of the workers of a generation."""
        generation, rank, local_rank, local_size, cross_rank, cross_size = map(int, json.loads(value))
        workers = tuple(map(int, json.loads(members_of(generation))))
        return cls(generation, rank, workers, (local_rank, local_size), (cross_rank, cross_size))


@dataclass(frozen=True)
class Change:
    """The workers that have come, or are to leave, since the generation began.

    Attributes:
        added: some wait for the next generation.
        removed: some are to leave.
        leave: all are to leave, and the job ends.
    """

    added: bool = False
    removed: bool = False
    leave: bool = False

    def encode(self) -> bytes:
        """For the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Change:
        """The change that ``encode`` has written."""
        read = json.loads(value)
        return cls(**{name: bool(read.get(name)) for name in ("added", "removed", "leave")})

    def __bool__(self) -> bool:
        return self.added or self.removed or self.leave


def seat_key(job_id: str, worker: int, number: int) -> str:
    """The key of the seat that a worker gets as its ``number``-th, from 1."""
    return f"horo/{job_id}/worker {worker}/seat {number}"


def members_key(job_id: str, generation: int) -> str:
    """The key of the workers of a generation."""
    return f"horo/{job_id}/{generation}/workers"


def change_key(job_id: str, generation: int, number: int) -> str:
    """The key of the ``number``-th change since a generation began, from 1; it replaces those before."""
    return f"horo/{job_id}/{generation}/change {number}"


def seat_entries(
    job_id: str, generation: int, workers: Sequence[int], hosts: Sequence[int], numbers: Sequence[int]
) -> list[tuple[str, bytes]]:
    """The keys and values that seat workers in a generation, in the order in which they are to be written.

    Args:
        job_id: names the keys.
        generation: its number.
        workers: by rank.
        hosts: as for ``seats_of``.
        numbers: which seat it is of each worker's, from 1.
    """
    seats = seats_of(generation, workers, hosts)
    own = zip(workers, numbers, seats, strict=True)
    return [
        (members_key(job_id, generation), json.dumps(list(workers)).encode()),
        *((seat_key(job_id, worker, number), seat.encode()) for worker, number, seat in own),
    ]


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
