# ruff: noqa: PLR0917  (the order of arguments is Horovod's)
"""Reductions over all ranks: a tensor of each rank becomes one result, which all ranks get.

Rules for all of them:

- Tensors are on the CPU or on a CUDA device, dense, of any shape and strides; ranks may have them on different devices.
  Dtypes: uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, bool, complex. A GPU tensor is ordered
  by torch's current stream, which waits for the result. It travels through host memory, so the waiting thread is
  blocked until the ranks have exchanged it. Operations cannot be captured into CUDA graphs.
- Forms that end in ``_async`` return a ``Handle``, an integer as Horovod's, with ``wait()`` and ``done()``; until then
  the tensor must not be changed. Keep the handle itself, not a copy of its number: once the handle is garbage and the
  operation done, the result may go. Forms with a trailing ``_`` write into their input and are not differentiable; the
  other synchronous forms are.
- Functions raise ``UnsupportedError`` for tensors that the core cannot take, ``UsageError`` (a ValueError) for other
  bad arguments, and ``MismatchError`` if ranks disagree about a tensor. Asynchronous forms raise this and
  ``GroupError`` in ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from horo.torch.engine.handles import Handle, first_of, poll, synchronize
from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import list_group, repeat, repeat_async, run_allreduce, start_allreduce, telling
from horo.torch.ops.autograd import allreduce_all
from horo.torch.ops.compression import Compression, Compressor, split
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set
from horo.torch.ops.reduce_op import ReduceOp, factor_of, resolve_op

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]

Average: ReduceOp = ReduceOp.Average
"""The sum divided by the number of ranks; integers are rounded towards zero."""
Sum: ReduceOp = ReduceOp.Sum
Adasum: ReduceOp = ReduceOp.Adasum
"""Of floats, each tensor by itself, pairs of ranks as a tree: a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)."""
Min: ReduceOp = ReduceOp.Min
Max: ReduceOp = ReduceOp.Max
Product: ReduceOp = ReduceOp.Product
"""Of complex numbers by the plain formula, (ac - bd) + (ad + bc)i, also where a part of it is infinite or NaN."""


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

    Blocks until all ranks have called it.

    Args:
        tensor: ``[...]`` on CPU or GPU, dense; uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64,
            bool (without ``Average``), or complex (``Average``, ``Sum`` and ``Product``). Same shape and dtype on all
            ranks.
        average: Deprecated; True is ``op=Average``, False is ``op=Sum``.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        compression: The format in which the tensor is sent, e.g. ``Compression.bf16``.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product``, or ``Adasum`` of floats.
        prescale_factor: Multiplied in before the reduction.
        postscale_factor: Multiplied in after it.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A new contiguous tensor of the same shape and dtype.

    Raises:
        UsageError: ``tensor`` is no tensor, or another argument is wrong.
        UnsupportedError: Another device, layout or dtype, or one that ``op`` is not for; or the gradient of ``Adasum``.
        MismatchError: Ranks gave other shapes, dtypes or options under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        x = torch.full((2,), float(hvd.rank()))
        mean = hvd.allreduce(x)  # on 2 ranks [0.5, 0.5]
    """
    key = "allreduce", average, op, prescale_factor, postscale_factor, name, process_set, compression
    again: torch.Tensor | None = repeat(key, tensor, False, None)
    if again is not None:
        return again
    spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    spec, compressor = split_for(spec, compression)
    sent, context = compressor.compress(tensor)
    results = allreduce_all([sent], spec, _plain(key) if compressor is Compression.none else None)
    return compressor.decompress(results[0], context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As ``allreduce``, but writes into ``tensor`` itself; not differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: As for ``allreduce``; no tensor that autograd has computed.
        average, name, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        ``tensor``.

    Raises:
        As ``allreduce``.

    Example:
        x = torch.full((2,), float(hvd.rank()))
        hvd.allreduce_(x, op=hvd.Sum)  # on 2 ranks x is [1., 1.] now
    """
    key = "allreduce_", average, op, prescale_factor, postscale_factor, name, process_set
    again: torch.Tensor | None = repeat(key, tensor, True, None)
    if again is not None:
        return again
    spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return run_allreduce([tensor], spec, in_place=True, key=_plain(key))[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts an ``allreduce`` and returns at once, with a handle; without compression, not differentiable.

    Args:
        tensor: As for ``allreduce``. It must not be changed before ``synchronize``.
        average, name, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns a new tensor.

    Raises:
        As ``allreduce``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.allreduce_async(torch.full((2,), float(hvd.rank())))
        mean = hvd.synchronize(handle)  # on 2 ranks [0.5, 0.5]
    """
    return _begin_allreduce(
        "allreduce_async", tensor, False, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Starts an ``allreduce_`` and returns at once, with a handle.

    Args:
        tensor: As for ``allreduce_``. It must not be read or changed before ``synchronize``.
        average, name, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns ``tensor``.

    Raises:
        As ``allreduce``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        x = torch.full((2,), float(hvd.rank()))
        hvd.synchronize(hvd.allreduce_async_(x))  # on 2 ranks x is [0.5, 0.5] now
    """
    return _begin_allreduce(
        "allreduce_async_", tensor, True, average, name, op, prescale_factor, postscale_factor, process_set
    )


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
    """As ``allreduce`` for several tensors, in one operation; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensors: Each as for ``allreduce``, of any dtypes; equally many on all ranks.
        average, name, compression, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        For each tensor a new contiguous one of the same shape and dtype.

    Raises:
        As ``allreduce``; ``UsageError`` also if ``tensors`` is empty.

    Example:
        x = torch.full((2,), float(hvd.rank()))
        mean, square = hvd.grouped_allreduce([x, x * x])  # on 2 ranks [0.5, 0.5] twice
    """
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    spec, compressor = split_for(spec, compression)
    sent = [compressor.compress(tensor) for tensor in list_group(tensors, spec)]
    reduced = allreduce_all([tensor for tensor, _ in sent], spec)
    return [compressor.decompress(tensor, context) for tensor, (_, context) in zip(reduced, sent, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As ``grouped_allreduce``, but writes into ``tensors`` themselves; not differentiable.

    Blocks until all ranks have called it.

    Args:
        tensors: Each as for ``allreduce_``; equally many on all ranks.
        average, name, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        ``tensors``, in a list.

    Raises:
        As ``grouped_allreduce``.

    Example:
        x, y = torch.full((2,), float(hvd.rank())), torch.ones(1)
        hvd.grouped_allreduce_([x, y], op=hvd.Sum)  # on 2 ranks x is [1., 1.] and y is [2.] now
    """
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return list(run_allreduce(list_group(tensors, spec), spec, in_place=True))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, ...]]:
    """Starts a ``grouped_allreduce`` and returns at once, with a handle; without compression, not differentiable.

    Args:
        tensors: As for ``grouped_allreduce``. They must not be changed before ``synchronize``.
        average, name, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        One handle for ``poll`` and ``synchronize``; the latter returns a tuple of new tensors.

    Raises:
        As ``grouped_allreduce``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.grouped_allreduce_async([torch.ones(2), torch.zeros(3)], op=hvd.Sum)
        ones, zeros = hvd.synchronize(handle)  # on 2 ranks [2., 2.] and [0., 0., 0.]
    """
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return start_allreduce(list_group(tensors, spec), spec).publish(tuple)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, ...]]:
    """Starts a ``grouped_allreduce_`` and returns at once, with a handle.

    Args:
        tensors: As for ``grouped_allreduce_``. They must not be read or changed before ``synchronize``.
        average, name, op, prescale_factor, postscale_factor, process_set: As for ``allreduce``.

    Returns:
        One handle for ``poll`` and ``synchronize``; the latter returns a tuple of ``tensors``.

    Raises:
        As ``grouped_allreduce``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        x = torch.full((2,), float(hvd.rank()))
        hvd.synchronize(hvd.grouped_allreduce_async_([x]))  # on 2 ranks x is [0.5, 0.5] now
    """
    spec = _spec("grouped_allreduce", average, name, op, prescale_factor, postscale_factor, process_set)
    return start_allreduce(list_group(tensors, spec), spec, in_place=True).publish(tuple)


def _plain(key: tuple[Any, ...]) -> Hashable:
    """The key of a call, by which it is kept; None if it must be checked each time.

    A factor may be a tensor, and ``op`` be equal to a reduction without being one: ``True`` is equal to ``Sum``.
    """
    _, average, op, prescale_factor, postscale_factor, *_ = key
    is_plain = type(prescale_factor) is float and type(postscale_factor) is float
    return key if average is None and is_plain and (op is None or type(op) is ReduceOp) else None  # average= warns


def _begin_allreduce(
    function: str,
    tensor: torch.Tensor,
    in_place: bool,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Handle[torch.Tensor]:
    key = _plain((function, average, op, prescale_factor, postscale_factor, name, process_set))
    handle = repeat_async(key, tensor, in_place=in_place)
    if handle is not None:
        return handle
    spec = _spec("allreduce", average, name, op, prescale_factor, postscale_factor, process_set, stacklevel=5)
    return start_allreduce([tensor], spec, in_place=in_place, key=key).publish(first_of)


def _spec(
    kind: str,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    stacklevel: int = 4,
) -> Operation:
    team = resolve_process_set(process_set, kind)
    spec = Operation(kind, name, team=team)
    with telling(spec):
        return spec._replace(
            reduce_op=resolve_op(op, average, stacklevel),
            prescale=factor_of(prescale_factor, kind, "prescale_factor"),
            postscale=factor_of(postscale_factor, kind, "postscale_factor"),
        )


def split_for(spec: Operation, compression: type[Compressor]) -> tuple[Operation, type[Compressor]]:
    """``split`` for an operation: how it travels is in the spec then.

    Raises:
        UsageError: It is no compressor; the call of the other ranks fails, too.
    """
    with telling(spec):
        wire, compressor = split(compression)
    return spec._replace(wire=wire), compressor
