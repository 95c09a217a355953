# ruff: noqa: PLR0917  (the order of arguments is Horovod's)
"""Reductions of which each rank gets some rows: half the bytes of an ``allreduce``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horo.errors import GroupError, UnsupportedError
from horo.torch.engine import runtime
from horo.torch.engine.handles import Handle, first_of
from horo.torch.engine.operation import Operation
from horo.torch.engine.outputs import check_out
from horo.torch.engine.results import fill_out
from horo.torch.engine.submit import list_group, repeat, start_reducescatter, telling
from horo.torch.ops.allreduce import Adasum, Average, split_for
from horo.torch.ops.autograd import reducescatter_all
from horo.torch.ops.compression import Compression, Compressor
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set
from horo.torch.ops.reduce_op import ReduceOp, factor_of, resolve_op

__all__ = ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


class _AdasumError(UnsupportedError, GroupError):
    """``op=Adasum``, where Horovod raises a HorovodInternalError, which is a GroupError here."""


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Combines the tensors of all ranks element by element and gives each rank its rows of the result; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: ``[rows, ...]`` on CPU or GPU, dense, of a dtype that ``allreduce`` takes; same shape and dtype on all
            ranks. The ranks get equally many rows in their order, the first ranks one more if there is a rest.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        compression: As for ``allreduce``.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: The ranks that take part; others do not call it.
        prescale_factor: As for ``allreduce``.
        postscale_factor: As for ``allreduce``.
        out: As for ``allgather``.

    Returns:
        ``[rows of this rank, ...]``, ``out`` or new memory, same dtype. ``allgather`` of it is the result of
        ``allreduce``; so is the gradient of both together.

    Raises:
        UsageError: ``tensor`` is no tensor or has no dimension, or another argument is wrong.
        UnsupportedError: Another device, layout or dtype, or ``op=Adasum``, which is a GroupError as well.
        MismatchError: Ranks gave other shapes, dtypes or options under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        x = torch.full((3, 2), float(hvd.rank()))
        mine = hvd.reducescatter(x, op=hvd.Sum)  # on 2 ranks 1.; [2, 2] on rank 0, [1, 2] on rank 1
    """
    key = "reducescatter", name, compression, op, process_set, prescale_factor, postscale_factor
    again: torch.Tensor | None = repeat(key, tensor, False, out)
    if again is not None:
        return again
    spec = _spec("reducescatter", name, op, process_set, prescale_factor, postscale_factor)
    check_out(out, tensor, spec)
    spec, compressor = split_for(spec, compression)
    sent, context = compressor.compress(tensor)
    is_plain = type(prescale_factor) is float and type(postscale_factor) is float  # True is equal to Sum
    is_kept = is_plain and (op is None or type(op) is ReduceOp) and compressor is Compression.none
    results = reducescatter_all([sent], spec, key if is_kept else None)
    return fill_out(out, compressor.decompress(results[0], context), spec)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Starts a ``reducescatter`` and returns at once, with a handle; without compression, not differentiable.

    Args:
        tensor: As for ``reducescatter``. It must not be changed before ``synchronize``.
        name: As for ``reducescatter``.
        op, process_set, prescale_factor, postscale_factor: As for ``reducescatter``.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns ``[rows of this rank, ...]``.

    Raises:
        As ``reducescatter``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.reducescatter_async(torch.full((4,), float(hvd.rank())))
        mine = hvd.synchronize(handle)  # on 2 ranks [0.5, 0.5]
    """
    spec = _spec("reducescatter", name, op, process_set, prescale_factor, postscale_factor)
    return start_reducescatter([tensor], spec).publish(first_of)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As ``reducescatter`` for several tensors, in one operation; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensors: Each as for ``reducescatter``, of any dtypes; equally many on all ranks.
        name, compression, op, process_set, prescale_factor, postscale_factor: As for ``reducescatter``.

    Returns:
        For each tensor ``[rows of this rank, ...]``.

    Raises:
        As ``reducescatter``; ``UsageError`` also if ``tensors`` is empty.

    Example:
        x = torch.full((4,), float(hvd.rank()))
        mean, square = hvd.grouped_reducescatter([x, x * x])  # on 2 ranks [0.5, 0.5] twice
    """
    spec = _spec("grouped_reducescatter", name, op, process_set, prescale_factor, postscale_factor)
    spec, compressor = split_for(spec, compression)
    sent = [compressor.compress(tensor) for tensor in list_group(tensors, spec)]
    reduced = reducescatter_all([tensor for tensor, _ in sent], spec)
    return [compressor.decompress(tensor, context) for tensor, (_, context) in zip(reduced, sent, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[tuple[torch.Tensor, ...]]:
    """Starts a ``grouped_reducescatter`` and returns at once, with a handle; without compression, not differentiable.

    Args:
        tensors: As for ``grouped_reducescatter``. They must not be changed before ``synchronize``.
        name: As for ``reducescatter_async``.
        op, process_set, prescale_factor, postscale_factor: As for ``reducescatter``.

    Returns:
        One handle for ``poll`` and ``synchronize``; the latter returns a tuple of tensors.

    Raises:
        As ``grouped_reducescatter``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.grouped_reducescatter_async([torch.ones(2), torch.zeros(4)], op=hvd.Sum)
        ones, zeros = hvd.synchronize(handle)  # on 2 ranks [2.] and [0., 0.]
    """
    spec = _spec("grouped_reducescatter", name, op, process_set, prescale_factor, postscale_factor)
    return start_reducescatter(list_group(tensors, spec), spec).publish(tuple)


def _spec(
    kind: str,
    name: str | None,
    op: int | None,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Operation:
    team = resolve_process_set(process_set, kind)
    members = runtime.current().teams.find(team)
    spec = Operation(
        kind,
        name,
        collective="reducescatter",
        team=team,
        place=(members.rank, members.size),
    )
    with telling(spec):
        found = resolve_op(op)
        if found == Adasum:
            raise _AdasumError(f"{kind}: op Adasum is offered by allreduce only")
        return spec._replace(
            reduce_op=found,
            prescale=factor_of(prescale_factor, kind, "prescale_factor"),
            postscale=factor_of(postscale_factor, kind, "postscale_factor"),
        )
