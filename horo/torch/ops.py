# ruff: noqa: PLR0917  (the order of arguments is Horovod's)
"""Collective operations on tensors.

What they have in common:

- Tensors live on the CPU, are dense, of any shape and strides, and of a dtype that the core knows (uint8, int8, int16,
  int32, int64, float16, bfloat16, float32, float64, bool).
- ``name`` ties together what belongs together across ranks. Without one, operations of a kind pair up in the order in
  which each rank starts them. A name can be in progress only once at a time.
- Forms ending in ``_async`` return an integer for ``poll`` and ``synchronize``; until then the tensor belongs to horo.
  Forms with a trailing ``_`` write into their input and are not differentiable; the synchronous others are.
- Every function raises ``NotInitializedError`` before ``init()``, ``UnsupportedError`` for what the core cannot work
  on, ``UsageError`` (a ValueError) for other bad arguments, ``MismatchError`` when ranks disagree about a tensor, and
  another ``GroupError`` (alias ``HorovodInternalError``) when a rank is lost. Asynchronous forms raise the last two
  in ``synchronize``.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence

import torch

from horo import _core
from horo.errors import UnsupportedError, UsageError
from horo.torch._requests import (
    poll,
    publish,
    repeat,
    repeat_async,
    run_allreduce,
    run_barrier,
    run_broadcast,
    start_allgather,
    start_allreduce,
    start_broadcast,
    synchronize,
)
from horo.torch._staging import Spec
from horo.torch.autograd import allgather_all, allreduce_all, broadcast_one
from horo.torch.compression import Compression, Compressor, split
from horo.torch.process_sets import ProcessSet, check_process_set, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]

Average: int = _core.REDUCE_OPS["average"]
"""The sum divided by the number of ranks; integers are rounded towards zero."""
Sum: int = _core.REDUCE_OPS["sum"]
Adasum: int = 2
"""Not supported yet."""
Min: int = _core.REDUCE_OPS["min"]
Max: int = _core.REDUCE_OPS["max"]
Product: int = _core.REDUCE_OPS["product"]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines the tensors of all ranks element by element; differentiable.

    Args:
        tensor: Same shape and dtype on all ranks.
        average: Deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: See the module's text.
        compression: What is sent instead of the tensor, e.g. ``Compression.bf16``.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: Multiplied in before the reduction.
        postscale_factor: Multiplied in after it.
        process_set: ``global_process_set``.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    key = _cache_key("allreduce", average, prescale_factor, postscale_factor, name, op, process_set, compression)
    again = repeat(key, tensor, in_place=False)
    if again is not None:
        return again
    wire, compressor = split(compression)
    spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set, wire)
    if compressor is not Compression.none:
        key = None
    sent, context = compressor.compress(tensor)
    return compressor.decompress(allreduce_all([sent], spec, key)[0], context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what ``allreduce`` does, without compression and not differentiable; returns a handle."""
    key = _cache_key("allreduce_async", average, prescale_factor, postscale_factor, name, op, process_set)
    handle = repeat_async(key, tensor, in_place=False)
    if handle is None:
        spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
        handle = publish(start_allreduce([tensor], spec, key=key), _first)
    return handle


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As ``allreduce``, into ``tensor`` itself, which it returns."""
    key = _cache_key("allreduce_", average, prescale_factor, postscale_factor, name, op, process_set)
    again = repeat(key, tensor, in_place=True)
    if again is not None:
        return again
    spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return run_allreduce([tensor], spec, in_place=True, key=key)[0]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what ``allreduce_`` does; returns a handle."""
    key = _cache_key("allreduce_async_", average, prescale_factor, postscale_factor, name, op, process_set)
    handle = repeat_async(key, tensor, in_place=True)
    if handle is None:
        spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
        handle = publish(start_allreduce([tensor], spec, in_place=True, key=key), _first)
    return handle


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As ``allreduce`` for several tensors (of any dtypes) that start together, all or none; differentiable."""
    wire, compressor = split(compression)
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set, wire)
    sent = [compressor.compress(tensor) for tensor in _some(tensors, spec.kind)]
    reduced = allreduce_all([tensor for tensor, _ in sent], spec)
    return [compressor.decompress(tensor, context) for tensor, (_, context) in zip(reduced, sent, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what ``grouped_allreduce`` does, without compression and not differentiable; returns one handle."""
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return publish(start_allreduce(_some(tensors, spec.kind), spec), tuple)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As ``grouped_allreduce``, into ``tensors`` themselves, which it returns."""
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return list(run_allreduce(_some(tensors, spec.kind), spec, in_place=True))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins what ``grouped_allreduce_`` does; returns one handle."""
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return publish(start_allreduce(_some(tensors, spec.kind), spec, in_place=True), tuple)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the tensors of all ranks along their first dimension, in rank order; differentiable.

    Args:
        tensor: ``[rows, ...]``; the number of rows may differ by rank, the rest is equal.
        name: See the module's text.
        process_set: ``global_process_set``.

    Returns:
        ``[sum of rows, ...]``.
    """
    check_process_set(process_set)
    return allgather_all([tensor], "allgather", name)[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins what ``allgather`` does, not differentiable; returns a handle."""
    check_process_set(process_set)
    request = start_allgather([tensor], "allgather", name)
    return publish(request, lambda gathered: gathered[0].tensor)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """As ``allgather`` for several tensors that start together, all or none; differentiable."""
    check_process_set(process_set)
    return allgather_all(_some(tensors, "grouped_allgather"), "grouped_allgather", name)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins what ``grouped_allgather`` does, not differentiable; returns one handle."""
    check_process_set(process_set)
    kind = "grouped_allgather"
    request = start_allgather(_some(tensors, kind), kind, name)
    return publish(request, lambda gathered: tuple(item.tensor for item in gathered))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gives every rank the tensor of ``root_rank``; differentiable.

    Args:
        tensor: Same shape and dtype on all ranks.
        root_rank: The rank whose values count.
        name: See the module's text.
        process_set: ``global_process_set``.

    Returns:
        A new contiguous tensor.
    """
    key = "broadcast", name, root_rank, process_set
    again = repeat(key, tensor, in_place=False)
    if again is not None:
        return again
    check_process_set(process_set)
    return broadcast_one(tensor, root_rank, name, key)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins what ``broadcast`` does, not differentiable; returns a handle."""
    key = "broadcast_async", name, root_rank, process_set
    handle = repeat_async(key, tensor, in_place=False)
    if handle is None:
        check_process_set(process_set)
        handle = publish(start_broadcast([tensor], root_rank, "broadcast", name, key=key), _first)
    return handle


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As ``broadcast``, into ``tensor`` itself, which it returns."""
    key = "broadcast_", name, root_rank, process_set
    again = repeat(key, tensor, in_place=True)
    if again is not None:
        return again
    check_process_set(process_set)
    return run_broadcast([tensor], root_rank, "broadcast", name, in_place=True, key=key)[0]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins what ``broadcast_`` does; returns a handle."""
    key = "broadcast_async_", name, root_rank, process_set
    handle = repeat_async(key, tensor, in_place=True)
    if handle is None:
        check_process_set(process_set)
        request = start_broadcast([tensor], root_rank, "broadcast", name, in_place=True, key=key)
        handle = publish(request, _first)
    return handle


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have called it."""
    check_process_set(process_set)
    run_barrier()


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """The reduction that ``op`` and the deprecated ``average`` ask for.

    Raises:
        UsageError: Both are given, or ``op`` is none of horo's.
        UnsupportedError: ``Adasum``.
    """
    if average is not None:
        if op is not None:
            raise UsageError("op and average were both given; op replaces average, pass only op")
        warnings.warn("average= is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    if op == Adasum:
        raise UnsupportedError("op=Adasum is not supported yet")
    if op not in (Average, Sum, Min, Max, Product):
        raise UsageError(f"op={op!r} is not a reduction; use hvd.Average, Sum, Min, Max or Product")
    return op


def _cache_key(
    function: str, average: bool | None, prescale_factor: float, postscale_factor: float, *others: object
) -> Hashable:
    """What ``repeat`` knows a call by. None for one that must be looked at each time: a factor may be a tensor."""
    if average is None and type(prescale_factor) is float and type(postscale_factor) is float:
        return function, prescale_factor, postscale_factor, others
    return None  # average= warns


def _spec(
    kind: str,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wire: torch.dtype | None = None,
) -> Spec:
    check_process_set(process_set)
    return Spec(kind, name, resolve_op(op, average), float(prescale_factor), float(postscale_factor), wire)


def _some(tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise UsageError(f"{what}: expected a list of tensors, not one tensor")
    listed = list(tensors)
    if not listed:
        raise UsageError(f"{what}: the list of tensors is empty")
    return listed


def _first(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return results[0]
