"""A DataLoader that yields one rank's part: each ``iter()`` is an epoch, which may begin where a state was saved."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from horo.elastic.shares import Share
from horo.errors import UsageError
from horo.torch.data.parts import OrderPart, Portion, draw_apart, in_runs
from horo.torch.engine import topology
from horo.torch.functions.objects import gather_objects
from horo.torch.ops.process_set import ProcessSet

__all__ = ["ShardedLoader", "Sharing"]

_T_co = TypeVar("_T_co", covariant=True)

_SEEDED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that shuffle by a generator and nothing else."""
_SEEDS = 1 << 62
_COMPARED = 1024
"""The number of items, of the order of another sampler, that ranks compare in each epoch."""
_ADVICE = {
    "length": "give all ranks the whole dataset, of which hvd.shard takes a part; without hvd.shard if each has a part",
    "epoch": "call iter() of the loader equally often on all ranks, also for a look at the first batch",
    "position": "give all ranks one state: loader.load_state_dict(hvd.broadcast_object(state))",
    "order": "let it draw in its __iter__, from random, numpy.random, torch or the torch.Generator in its attribute "
    "generator, which have one seed on all ranks there; or give what it draws from one",
    "samples": "draw splits and weights by one seed on all ranks, as after torch.manual_seed(0); without hvd.shard if "
    "each has a part",
}
_OTHER_ADVICE = "make the loader alike on all ranks"


class Sharing(NamedTuple):
    """The way in which a loader is shared among ranks."""

    place: Portion
    process_set: ProcessSet
    part: OrderPart | None
    """This rank's part of the order; None: the dataset is a stream."""
    batch_items: int
    """The number of items of the order in a batch."""
    generator: torch.Generator | None
    """The user's, for the seed; None: torch's own."""


class _Progress:
    """The progress of an epoch."""

    def __init__(self, epoch: int, begin: int = 0, head: int | None = None) -> None:
        self.epoch = epoch
        self.begin = begin
        """The number of items of the order of all ranks before the first; of a stream, of batches of each rank."""
        self.head = head
        """A checksum of the begin of the order of a sampler that torch does not have."""
        self.batches = 0
        """The number of batches that this rank has taken since."""


class ShardedLoader(DataLoader[_T_co]):
    """The DataLoader that ``hvd.shard`` returns: that of the script, with this rank's part of the samples.

    Each ``iter()`` begins an epoch. It waits for all ranks, and compares what is to be equal.
    """

    _sharing: Sharing
    _seed: int | None
    _next: _Progress
    _now: _Progress | None

    def share(self, sharing: Sharing) -> None:
        """Called once, for the copy of a loader."""
        self._sharing = sharing
        self._seed = None
        self._next, self._now = _Progress(0), None

    @property
    def epoch(self) -> int:
        """The number of the epoch in progress, else of the next one, from 0."""
        return (self._now or self._next).epoch

    def set_epoch(self, epoch: int) -> None:
        """Has the next ``iter()`` begin this epoch: for scripts that count epochs themselves.

        If a state has brought back a part of this very epoch, the loader goes on in it.
        """
        if epoch != self._next.epoch:
            self._next, self._now = _Progress(epoch), None

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the position after the batches that the loop has taken; the same on all ranks."""
        now = self._now or self._next
        return {**self._kind(), "epoch": now.epoch, "done": self._done(now), "seed": self._seed, "order": now.head}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next ``iter()`` go on where ``state_dict()`` was called. All ranks load the same state.

        The number of ranks and the batch size may have changed, except for a stream.

        Raises:
            UsageError: The dataset has another length by now; or it is a stream, and ranks or workers are others.
        """
        for name, own in self._kind().items():
            if name not in state_dict:
                raise UsageError(f"hvd.shard: the state lacks {name!r}; is it one of a sharded loader?")
            if state_dict[name] != own:
                raise UsageError(
                    f"hvd.shard: the loader cannot go on from a state with {state_dict[name]} {name}: it has {own}"
                )
        self._seed = state_dict["seed"]
        progress = _Progress(state_dict["epoch"], state_dict["done"], state_dict.get("order"))
        self._next, self._now = progress, None

    def __iter__(self) -> Any:
        sharing, progress = self._sharing, self._next
        self._refuse_other_ranks()
        if self._seed is None:
            # Each rank draws, so that ranks whose generators are alike keep them alike.
            self._seed = int(torch.empty((), dtype=torch.int64).random_(generator=sharing.generator)) % _SEEDS
        if sharing.place.size > 1:
            self._seed = self._agree(progress)
        generator = torch.Generator().manual_seed(self._seed + progress.epoch)
        whole: Any = self.dataset if sharing.part is None else sharing.part
        whole = whole.whole
        for item in (whole, getattr(whole, "sampler", None)):
            if (set_epoch := getattr(item, "set_epoch", None)) is not None:
                set_epoch(progress.epoch)
        if sharing.part is None:
            self.generator = generator  # of the seeds of workers: those of all ranks are to read the same stream
        elif _is_torchs(whole):
            sharing.part.begin(itertools.islice(_seeded(whole, generator), progress.begin, None))
        else:
            rest = itertools.islice(self._own_order(whole, progress), progress.begin, None)
            sharing.part.begin(in_runs(rest, sharing.batch_items, sharing.place.size))
        self._next, self._now = _Progress(progress.epoch + 1), progress
        batches = super().__iter__()
        if sharing.part is None:
            for _ in itertools.islice(batches, progress.begin):
                pass
        return _Batches(self, progress, batches)

    def end(self, progress: _Progress) -> None:
        """Called at the end of an epoch."""
        if self._now is progress:
            self._now = None

    def _refuse_other_ranks(self) -> None:
        """Refuses to go on when the place of this rank is another one than when the loader was made.

        Raises:
            NotInitializedError: There is no job.
            UsageError: It is.
        """
        topology.size()
        place, ranks = self._sharing.place, self._sharing.process_set
        if (ranks.rank(), ranks.size()) != (place.rank, place.size):
            raise UsageError(
                f"hvd.shard: this was rank {place.rank} of {place.size} when the loader was made, and is rank "
                f"{ranks.rank()} of {ranks.size()} now; call hvd.shard again on all ranks, or use "
                "hvd.elastic.ElasticSampler in an elastic job"
            )

    def _own_order(self, whole: Any, progress: _Progress) -> Iterator[Any]:
        """The order of a sampler of the script's own, the same on all ranks.

        Raises:
            UsageError: It is another one on another rank, or than when the state was saved that the epoch begins from.
        """
        sharing = self._sharing
        found = (getattr(item, "generator", None) for item in (whole, getattr(whole, "sampler", None)))
        generators = [each for each in found if isinstance(each, torch.Generator)]
        block = sharing.batch_items * sharing.place.size
        order, compared = itertools.tee(draw_apart(whole, cast("int", self._seed) + progress.epoch, generators, block))
        head = _checksum(itertools.islice(compared, _COMPARED))
        if sharing.place.size > 1:
            self._compare({"order": head})
        if progress.begin and progress.head not in {None, head}:
            raise UsageError(
                f"hvd.shard: the order of {type(whole).__name__} in epoch {progress.epoch} is another one than when "
                "the state was saved, as it depends on more than seed and epoch; save states between epochs, or begin "
                f"the next one: loader.set_epoch({progress.epoch + 1})"
            )
        progress.head = head
        return order

    def _agree(self, progress: _Progress) -> int:
        """Compares the loaders of all ranks, and returns the seed of the first.

        Raises:
            UsageError: They differ.
        """
        sharing = self._sharing
        whole = None if sharing.part is None else sharing.part.whole
        own = {
            **self._kind(),
            "length": None if whole is None else _length(whole),
            "samples": _checksum(_chosen(self.dataset, whole)),
            "batch size": self.batch_size or sharing.batch_items,
            "drop_last": self.drop_last,
            "tail": sharing.place.tail,
            "sampler": type(whole).__name__,
            "epoch": progress.epoch,
            "position": progress.begin,
        }
        return self._compare(own)

    def _compare(self, own: dict[str, Any]) -> int:
        """Refuses to go on when these values differ between ranks. Returns the seed of the first rank."""
        sharing, seed = self._sharing, cast("int", self._seed)
        everyone: dict[int, tuple[dict[str, Any], int]]
        everyone = gather_objects((own, seed), "hvd.shard", sharing.process_set)
        first, (ours, seed) = next(iter(everyone.items()))
        for rank, (theirs, _) in everyone.items():
            for name, value in ours.items():
                if theirs.get(name) != value:
                    values = "" if name in {"order", "samples"} else f" ({value} and {theirs.get(name)})"
                    raise UsageError(
                        f"hvd.shard: the loaders of rank {first} and rank {rank} differ in their {name}{values}; "
                        f"{_ADVICE.get(name, _OTHER_ADVICE)}"
                    )
        return seed

    def _kind(self) -> dict[str, Any]:
        """The things that a state has in common with the loaders that can go on from it."""
        sharing = self._sharing
        if sharing.part is None:
            return {"ranks": sharing.place.size, "workers": self.num_workers, "batch size": self.batch_size}
        whole = sharing.part.whole
        return {"length": _length(whole if _is_torchs(whole) else self.dataset)}  # those of an epoch may be others

    def _done(self, progress: _Progress) -> int:
        """The number of items, of the order of all ranks, that they have taken; of a stream, of batches of each."""
        sharing = self._sharing
        if sharing.part is None:
            return progress.begin + progress.batches
        whole = sharing.part.whole
        length = _length(whole) if _is_torchs(whole) else None  # it may be an estimate
        taken = progress.batches * sharing.batch_items
        if length is None:
            return progress.begin + taken * sharing.place.size
        share = Share(length - progress.begin, sharing.place.size, sharing.place.tail)
        return progress.begin + share.done(taken)


class _Batches(Iterator[Any]):
    """The batches of an epoch, counted."""

    def __init__(self, loader: ShardedLoader[Any], progress: _Progress, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._progress = progress
        self._batches = batches

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader.end(self._progress)
            raise
        self._progress.batches += 1
        return batch


def _length(order: Any) -> int | None:
    """The number of items of an order; None: it has no length."""
    try:
        return len(order)
    except (TypeError, NotImplementedError):
        return None


def _chosen(dataset: Any, whole: Any) -> Iterator[Any]:
    """The samples that the script has chosen beforehand, as by ``random_split``, and weights."""
    while isinstance(dataset, Subset):
        yield _plain(dataset.indices)
        dataset = dataset.dataset
    if type(whole) is SubsetRandomSampler:
        yield _plain(whole.indices)
    elif type(whole) is WeightedRandomSampler:
        yield _plain(whole.weights)


def _plain(values: Any) -> list[Any]:
    """As a list, of which nothing is left out when it is printed, as of a tensor."""
    plain: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return plain


def _checksum(values: Iterable[Any]) -> int:
    return zlib.crc32(repr(list(values)).encode())


def _is_torchs(sampler: Any) -> bool:
    return type(sampler) in {SequentialSampler, *_SEEDED}


def _seeded(sampler: Any, generator: torch.Generator) -> Iterator[Any]:
    """The order of one of torch's samplers, by this generator."""
    sampler = copy.copy(sampler)
    if type(sampler) in _SEEDED:
        sampler.generator = generator
    return iter(sampler)
