"""The samples of each rank for the rest of an epoch, and how many of all are done after each batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

__all__ = ["Share", "Tail", "shuffled"]

Tail = Literal["pad", "exact", "drop"]


def shuffled(length: int, seed: int) -> list[int]:
    """The indices of a dataset in the order of an epoch, the same on all ranks and as in Horovod."""
    indices = list(range(length))
    random.Random(seed).shuffle(indices)
    return indices


@dataclass(frozen=True)
class Share:
    """A partition of the samples that are left of an epoch. Rank r takes those at r, r + replicas and so on.

    So whenever all ranks have taken equally many, the samples that are done are the first ones.
    """

    remaining: int
    """The number of samples."""
    replicas: int
    tail: Tail
    batch_size: int = 1
    """Of each rank; only ``exact`` depends on it."""

    def positions(self, rank: int) -> list[int]:
        """The places of a rank's samples among those that are left. All ranks have equally many batches.

        ``pad``: some samples come twice at the end, so that all ranks have equally many. ``drop``: up to
        ``replicas - 1`` samples are left out. ``exact``: each comes once; a rank that would lack the last batch has one
        of one sample that is also another rank's, of weight 0.
        """
        if self.tail == "exact":
            own = list(range(rank, self.remaining, self.replicas))
            if self._batches(len(own)) < self._batches(-(-self.remaining // self.replicas)):
                own.append(rank % self.remaining)
            return own
        rounds = self.remaining // self.replicas
        if self.tail == "pad":
            rounds = -(-self.remaining // self.replicas)
        return [place % self.remaining for place in range(rank, rounds * self.replicas, self.replicas)]

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
