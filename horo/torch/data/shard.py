"""``hvd.shard``: one rank's part of a DataLoader."""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar, cast

import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from horo.elastic.shares import TAILS, Tail
from horo.errors import UnsupportedError, UsageError
from horo.torch.data.loader import ShardedLoader, Sharing
from horo.torch.data.parts import OrderPart, Portion, StreamPart
from horo.torch.engine.runtime import begin_first_job
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["shard"]

_T = TypeVar("_T")

_PIPES = tuple(
    getattr(torch.utils.data, name) for name in ("IterDataPipe", "MapDataPipe") if hasattr(torch.utils.data, name)
)
"""Torch's deprecated datasets that are made of parts."""


def shard(
    loader: DataLoader[_T], *, tail: Tail = "pad", process_set: ProcessSet = global_process_set
) -> ShardedLoader[_T]:
    """Gives each rank its part of a DataLoader: a loader of the same class and options that yields only that.

    The batch size stays that of each rank, so N ranks take N times as many samples per step. ``len()`` is the number of
    this rank's batches. Workers, ``collate_fn`` and the rest stay as they are, as does the given loader. The call
    returns at once.

    Each ``iter()`` begins an epoch, without ``set_epoch``: all ranks call it, and wait for each other. They compare
    lengths, options, epochs, ``Subset``'s indices, weights, and the first 1024 indices of other samplers than torch's;
    a difference is an error on all. Each epoch is shuffled anew, by a seed that the first rank draws in the first
    ``iter()``: from the generator of the loader or sampler, else from torch's own. So ``torch.manual_seed`` on that
    rank makes a run repeatable.

    A sampler or batch sampler of the script's own yields the whole order on every rank; each takes whole batches. While
    it draws, ``random``, numpy, torch and its ``generator`` have the epoch's seed; other draws of the script do not
    change. Its ``set_epoch``, if any, is called for each epoch.

    Of an ``IterableDataset`` each rank reads everything, in each worker what that worker reads, and keeps its part. The
    stream has to be the same on all ranks. Random numbers in workers are, by the seed; without workers the dataset
    needs a seed of its own. All ranks have equally many batches, unless ``tail="exact"``.

    ``loader.state_dict()`` is the epoch and the position, the same on all ranks, after the batches that the loop has
    taken. After ``load_state_dict`` the next ``iter()`` goes on there, with any number of ranks; of a stream only with
    as many, and it reads again what comes before. ``len()`` stays that of a whole epoch.

    Args:
        loader: A ``torch.utils.data.DataLoader`` over the whole dataset, made alike on all ranks.
        tail: For the end of an epoch, if samples (or batches of a batch sampler) cannot be shared out evenly. ``"pad"``
            repeats some, and ``"drop"`` leaves out up to ``size - 1``: all ranks have equally many batches.
            ``"exact"`` yields each sample once: for measurements with ``MetricAverage``. Some ranks may have a batch
            less; if they train, they call ``join()`` after the loop of each epoch.
        process_set: The ranks that share the loader; others do not call it.

    Raises:
        UsageError: It is no DataLoader, or is sharded already; ``tail`` is another word, or ``"exact"`` with
            ``drop_last=True``.
        UnsupportedError: The dataset is a DataPipe.
        NotInitializedError: After ``shutdown()``. Without any ``init()``, this calls it.

    Example:
        dataset = torch.utils.data.TensorDataset(torch.randn(100, 4))
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
        loader = hvd.shard(loader)
    """
    _check(loader, tail)
    begin_first_job()
    resolve_process_set(process_set, "shard")
    place = Portion(cast("int", process_set.rank()), cast("int", process_set.size()), tail)
    part: Any = copy.copy(loader)
    kind: Any = type(loader)
    part.__class__ = ShardedLoader if kind is DataLoader else _sharded_class(kind)
    own, batch_items = vars(part), 1  # a DataLoader refuses to be changed by assignments
    own["_iterator"] = None  # of workers that persist
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        own["dataset"], order = StreamPart(loader.dataset, place), None
    elif type(batches) is BatchSampler:
        order, batch_items = OrderPart(batches.sampler, place), batches.batch_size
        own["sampler"], own["batch_sampler"] = order, BatchSampler(order, batch_items, batches.drop_last)
    else:
        name = "sampler" if batches is None else "batch_sampler"
        own[name] = order = OrderPart(own[name], place)
    generator = getattr(None if order is None else order.whole, "generator", None)
    if not isinstance(generator, torch.Generator):  # None, or numpy's
        generator = loader.generator
    part.share(Sharing(place, process_set, order, batch_items, generator))
    return cast("ShardedLoader[_T]", part)


def _check(loader: Any, tail: Any) -> None:
    kind = type(loader).__name__
    if tail not in TAILS:
        raise UsageError(f"shard(tail={tail!r}): expected 'pad', 'exact' or 'drop'")
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"shard: expected a torch.utils.data.DataLoader, not {kind}; give each rank its own files instead, as "
            "urls[hvd.rank()::hvd.size()]"
        )
    if isinstance(loader, ShardedLoader):
        raise UsageError("shard: this loader is sharded already, and a rank would get a part of its part")
    batches: Any = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            raise UsageError(
                f"shard: the loader has a {type(sampler).__name__}, which gives each rank its part already; make the "
                "loader without it, with shuffle=True, or leave hvd.shard out"
            )
    if isinstance(loader.dataset, _PIPES):
        raise UnsupportedError(
            f"shard: the dataset is a DataPipe ({type(loader.dataset).__name__}); put .sharding_filter() into it, and "
            "call torch.utils.data.graph_settings.apply_sharding(pipe, hvd.size(), hvd.rank())"
        )
    drops = loader.drop_last or getattr(batches, "drop_last", False)
    if tail == "exact" and drops:
        raise UsageError(
            "shard: tail='exact' yields every sample, and drop_last=True leaves some out; make the loader with "
            "drop_last=False, or take tail='drop'"
        )


@functools.cache
def _sharded_class(kind: type) -> type:
    """The class of the sharded loaders of another class than torch's."""
    return type(f"Sharded{kind.__name__}", (ShardedLoader, kind), {})
