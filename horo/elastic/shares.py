"""The samples of each rank for the rest of an epoch, and how many of all are done after each batch."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["TAILS", "Share", "Tail", "deal", "shuffled"]

Tail = Literal["pad", "exact", "drop"]
TAILS: tuple[Tail, ...] = ("pad", "exact", "drop")

_T = TypeVar("_T")


def shuffled(length: int, seed: int) -> list[int]:
    """The indices of a dataset in the order of an epoch, the same on all ranks and as in Horovod."""
    indices = list(range(length))
    random.Random(seed).shuffle(indices)
    return indices


def deal(order: Iterable[_T], rank: int, replicas: int, tail: Tail, kept: int | None = None) -> Iterator[_T]:
    """The items of a rank: those at rank, rank + replicas and so on of an order, which may be long and is read once.

    In a last round that has not an item for each rank, ``exact`` gives some ranks none, ``drop`` gives no rank one, and
    ``pad`` begins the order again.

    Args:
        order: The same on all ranks.
        rank: The rank.
        replicas: The number of ranks.
        tail: For the last round.
        kept: How many items ``pad`` keeps to begin again with; None: all that it may need.
    """
    items = iter(order)
    first = list(itertools.islice(items, replicas if kept is None else kept))
    places = itertools.count()
    held: deque[_T] = deque()
    for item, _ in itertools.islice(zip(itertools.chain(first, items), places), rank, None, replicas):  # noqa: B905
        held.append(item)
        if len(held) > (tail == "drop"):
            yield held.popleft()
    last = next(places) % replicas
    if rank >= last or tail != "drop":
        yield from held
    if tail == "pad" and 0 < last <= rank:
        yield first[(rank - last) % len(first)]


@dataclass(frozen=True)
class Share:
    """A partition of the samples that are left of an epoch, as ``deal`` makes it.

    So whenever all ranks have taken equally many, the samples that are done are the first ones.
    """

    remaining: int
    """The number of samples."""
    replicas: int
    tail: Tail
    batch_size: int = 1
    """Of each rank; only ``exact`` depends on it."""

    def count(self, rank: int) -> int:
        """The number of items that ``deal`` gives a rank."""
        rounds, last = divmod(self.remaining, self.replicas)
        return rounds + (last > {"pad": 0, "exact": rank, "drop": self.replicas}[self.tail])

    def positions(self, rank: int) -> list[int]:
        """The places of a rank's samples among those that are left. All ranks have equally many batches.

        ``pad``: some samples come twice at the end, so that all ranks have equally many. ``drop``: up to
        ``replicas - 1`` samples are left out. ``exact``: each comes once; a rank that would lack the last batch has one
        of one sample that is also another rank's, of weight 0.
        """
        own = list(deal(range(self.remaining), rank, self.replicas, self.tail))
        if self.tail == "exact" and self._batches(len(own)) < self._batches(self.count(0)):
            own.append(rank % self.remaining)
        return own

    def done(self, taken: int) -> int:
        """The number of samples that are done when each rank has taken so many of its own, or had no more."""
        last = self.remaining
        if self.tail == "drop":
            last -= last % self.replicas
        return min(taken * self.replicas, last)

    def weight(self, rank: int, taken: int) -> float:
        """The factor of a rank's mean loss over its next batch, with which the mean over ranks is that of all samples.

        Args:
            rank: The rank.
            taken: The number of samples of each rank before that batch.
        """
        if self.tail != "exact":
            return 1.0
        end = taken + self.batch_size
        everyone = self.done(end) - self.done(taken)
        own = len(range(rank, self.remaining, self.replicas)[taken:end])
        return self.replicas * own / everyone if everyone else 0.0

    def _batches(self, samples: int) -> int:
        return -(-samples // self.batch_size)
