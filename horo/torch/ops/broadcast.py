"""Broadcast: the tensor of one rank on all."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from horo.torch.engine.handles import Handle, first_of
from horo.torch.engine.operation import Operation
from horo.torch.engine.outputs import check_out
from horo.torch.engine.results import fill_out
from horo.torch.engine.submit import (
    repeat,
    repeat_async,
    run_broadcast,
    start_broadcast,
)
from horo.torch.ops.autograd import broadcast_one
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gives every rank the tensor of ``root_rank``; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: ``[...]`` on CPU or GPU, dense, of any dtype that is not quantized: complex, float8 and uint64, too.
            Same shape and dtype on all ranks.
        root_rank: The rank whose values all get, by its number in the job also in a process set; equal on all ranks.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.
        out: As for ``allgather``.

    Returns:
        ``out`` or a new contiguous tensor, of the same shape and dtype.

    Raises:
        UsageError: ``tensor`` is no tensor, there is no rank ``root_rank``, or ``out`` does not fit.
        UnsupportedError: Another device, layout or dtype.
        MismatchError: Ranks gave other shapes, dtypes or roots under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        x = torch.full((2,), hvd.rank())
        y = hvd.broadcast(x, root_rank=0)  # on all ranks [0, 0]
    """
    key = "broadcast", name, root_rank, process_set
    again: torch.Tensor | None = repeat(key, tensor, False, out)
    if again is not None:
        return again
    team = resolve_process_set(process_set, "broadcast")
    spec = Operation("broadcast", name, collective="broadcast", team=team)
    check_out(out, tensor, spec)
    return fill_out(out, broadcast_one(tensor, root_rank, name, _plain(key), team), spec)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As ``broadcast``, but writes into ``tensor`` itself; not differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: As for ``broadcast``; no tensor that autograd has computed.
        root_rank: As for ``broadcast``.
        name: As for ``broadcast``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        ``tensor``.

    Raises:
        As ``broadcast``.

    Example:
        x = torch.full((2,), hvd.rank())
        hvd.broadcast_(x, root_rank=0)  # now x is [0, 0] on all ranks
    """
    key = "broadcast_", name, root_rank, process_set
    again: torch.Tensor | None = repeat(key, tensor, True, None)
    if again is not None:
        return again
    team = resolve_process_set(process_set, "broadcast")
    return run_broadcast([tensor], root_rank, "broadcast", name, in_place=True, key=_plain(key), team=team)[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts a ``broadcast`` and returns at once, with a handle; not differentiable.

    Args:
        tensor: As for ``broadcast``. It must not be changed before ``synchronize``.
        root_rank: As for ``broadcast``.
        name: As for ``broadcast``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns a new tensor.

    Raises:
        As ``broadcast``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.broadcast_async(torch.full((2,), hvd.rank()), root_rank=0)
        y = hvd.synchronize(handle)  # on all ranks [0, 0]
    """
    return _begin_broadcast("broadcast_async", tensor, root_rank, name, process_set, False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts a ``broadcast_`` and returns at once, with a handle.

    Args:
        tensor: As for ``broadcast_``. It must not be read or changed before ``synchronize``.
        root_rank: As for ``broadcast``.
        name: As for ``broadcast_async``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns ``tensor``.

    Raises:
        As ``broadcast``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        x = torch.full((2,), hvd.rank())
        hvd.synchronize(hvd.broadcast_async_(x, root_rank=0))  # now x is [0, 0] on all ranks
    """
    return _begin_broadcast("broadcast_async_", tensor, root_rank, name, process_set, True)


def _plain(key: tuple[str, str | None, int, ProcessSet]) -> Hashable:
    """The key of a call, by which it is kept; None for a root that is no plain number: True is equal to 1."""
    return key if type(key[2]) is int else None


def _begin_broadcast(  # noqa: PLR0917  (keywords would cost time)
    function: str, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> Handle[torch.Tensor]:
    key = _plain((function, name, root_rank, process_set))
    handle = repeat_async(key, tensor, in_place=in_place)
    if handle is not None:
        return handle
    team = resolve_process_set(process_set, "broadcast")
    request = start_broadcast([tensor], root_rank, "broadcast", name, in_place=in_place, key=key, team=team)
    return request.publish(first_of)
