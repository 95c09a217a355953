"""A rank's part of what a DataLoader reads: of the order of a sampler, or of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from horo.elastic.shares import Share, Tail, deal
from horo.errors import UsageError

__all__ = ["OrderPart", "Portion", "StreamPart"]


class Portion(NamedTuple):
    """The portion of a rank of what a loader reads."""

    rank: int
    size: int
    tail: Tail

    def count(self, whole: int) -> int:
        """The number of this rank's items among so many."""
        return Share(whole, self.size, self.tail).count(self.rank)


class OrderPart(torch.utils.data.Sampler[Any]):
    """This rank's part of an order of samples, or of batches.

    The loader begins it in each epoch. It is read once then, although torch calls ``iter`` twice for an epoch with
    workers.
    """

    def __init__(self, whole: Any, place: Portion) -> None:
        self.whole = whole
        """The sampler of all ranks."""
        self._place = place
        self._own: Iterator[Any] | None = None

    def begin(self, order: Iterator[Any]) -> None:
        """Begins an epoch, of which this is the order, or what is left of it."""
        self._own = deal(order, *self._place)

    def __iter__(self) -> Iterator[Any]:
        own, self._own = self._own, None
        if own is None:
            raise UsageError(
                "hvd.shard: two iterators of a loader were made before a batch was taken from the first, or its "
                "sampler was iterated over; take a batch from an iterator before you make the next one"
            )
        yield from own

    def __len__(self) -> int:
        return self._place.count(len(self.whole))


class StreamPart(torch.utils.data.IterableDataset[Any]):
    """This rank's part of an iterable dataset, in each worker of what that worker would read alone.

    Other attributes are those of the dataset, also when they are set, as a ``worker_init_fn`` may do.
    """

    whole: Any
    _place: Portion

    def __init__(self, whole: Any, place: Portion) -> None:
        self.__dict__.update(whole=whole, _place=place)

    def __iter__(self) -> Iterator[Any]:
        rank, size, tail = self._place
        return deal(self.whole, rank, size, tail, kept=1)  # a sample may be large

    def __len__(self) -> int:
        return self._place.count(len(self.whole))

    def __getattr__(self, name: str) -> Any:
        if name == "whole" or name.startswith("__"):  # as asked for while a copy of it is made
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.whole, name, value)
