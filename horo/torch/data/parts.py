"""A rank's part of what a DataLoader reads: of the order of a sampler, or of a stream."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from horo.elastic.shares import Share, Tail, deal
from horo.errors import UsageError

__all__ = ["OrderPart", "Portion", "StreamPart", "draw_apart", "in_runs"]


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


def draw_apart(order: Iterable[Any], seed: int, generators: list[torch.Generator], block: int) -> Iterator[Any]:
    """An order that is drawn by a seed, whatever the script draws meanwhile, which goes on as if nothing was drawn.

    While the order is read, a block at a time, this seed is that of ``random``, numpy, torch and these generators.
    """
    generators = [torch.default_generator, *generators]
    sources: list[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate, random.seed),
        *((each.get_state, each.set_state, each.manual_seed) for each in generators),
    ]
    if numbers := getattr(sys.modules.get("numpy"), "random", None):
        sources.append((numbers.get_state, numbers.set_state, lambda seed: numbers.seed(seed % (1 << 32))))
    states: list[Any] = []
    items: Iterator[Any] | None = None
    while True:
        script = [get() for get, _, _ in sources]
        try:
            for number, (_, put, begin) in enumerate(sources):
                put(states[number]) if states else begin(seed)
            if items is None:
                items = iter(order)
            drawn = [_kept(item) for item in itertools.islice(items, block)]
            states = [get() for get, _, _ in sources]
        finally:
            for (_, put, _), state in zip(sources, script, strict=True):
                put(state)
        if not drawn:
            return
        yield from drawn


def _kept(item: Any) -> Any:
    """An item that stays as it is: a sampler may use the object again, or yield what can be read once."""
    if isinstance(item, int):
        return item
    return list(item) if isinstance(item, Iterator) else copy.copy(item)


def in_runs(order: Iterator[Any], length: int, size: int) -> Iterator[Any]:
    """The same order with the items of a step moved, so that each rank gets so many that follow each other.

    If a last step is not a whole one, its items are not moved, and each rank gets its part of it.
    """
    while step := list(itertools.islice(order, length * size)):
        if len(step) < length * size:
            yield from step
        else:
            for place in range(length):
                yield from step[place::length]
