"""Allgather: the tensors of all ranks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horo.torch.engine.handles import Handle
from horo.torch.engine.operation import Operation
from horo.torch.engine.outputs import check_out
from horo.torch.engine.results import fill_out
from horo.torch.engine.submit import (
    expect_again,
    list_group,
    repeat,
    start_allgather,
)
from horo.torch.ops.autograd import allgather_all, needs_graph
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Concatenates the tensors of all ranks along their first dimension, in rank order; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: ``[rows, ...]`` on CPU or GPU, dense, of any dtype that is not quantized: complex, float8 and uint64,
            too. The number of rows may differ by rank; dtype and the other dimensions are equal on all ranks.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.
        out: Memory for the result: contiguous, of its shape, on the same device; without gradient. None: new memory.

    Returns:
        ``[sum of rows, ...]``, ``out`` or new memory, same dtype. The gradient of this rank's rows is the mean over
        ranks of what they have for them.

    Raises:
        UsageError: ``tensor`` is no tensor or has no dimension, or ``out`` does not fit. Where its rows are too few or
            too many for what the ranks gave, the others have the result.
        UnsupportedError: Another device, layout or dtype.
        MismatchError: Ranks gave other dtypes or dimensions under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        rows = torch.full((hvd.rank() + 1, 2), hvd.rank())
        everyone = hvd.allgather(rows)  # on 2 ranks [3, 2]: one row of 0, two rows of 1
    """
    key = "allgather", name, process_set, out is not None
    again: torch.Tensor | None = repeat(key, tensor, False, out)
    if again is not None:
        return again
    spec = Operation("allgather", name, collective="allgather", team=resolve_process_set(process_set, "allgather"))
    check_out(out, tensor, spec)
    result = fill_out(out, allgather_all([tensor], "allgather", name, spec.team)[0], spec)
    if not needs_graph([tensor]):
        expect_again(key, spec, tensor, result, is_out=out is not None)
    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Starts an ``allgather`` and returns at once, with a handle; not differentiable.

    Args:
        tensor: As for ``allgather``. It must not be changed before ``synchronize``.
        name: As for ``allgather``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns ``[sum of rows, ...]``.

    Raises:
        As ``allgather``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.allgather_async(torch.full((1, 2), hvd.rank()))
        everyone = hvd.synchronize(handle)  # on 2 ranks [[0, 0], [1, 1]]
    """
    request = start_allgather([tensor], "allgather", name, team=resolve_process_set(process_set, "allgather"))
    return request.publish(lambda gathered: gathered[0].tensor)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """As ``allgather`` for several tensors, in one operation; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensors: Each as for ``allgather``, of any dtypes; equally many on all ranks.
        name: As for ``allgather``, for the whole group.
        process_set: The ranks that take part; others do not call it.

    Returns:
        For each tensor ``[sum of rows, ...]``.

    Raises:
        As ``allgather``; ``UsageError`` also if ``tensors`` is empty.

    Example:
        x = torch.full((1, 2), hvd.rank())
        rows, labels = hvd.grouped_allgather([x, x[:, 0]])  # on 2 ranks [2, 2] and [2]
    """
    spec = _gathering(name, process_set)
    return allgather_all(list_group(tensors, spec), spec.kind, name, spec.team)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[tuple[torch.Tensor, ...]]:
    """Starts a ``grouped_allgather`` and returns at once, with a handle; not differentiable.

    Args:
        tensors: As for ``grouped_allgather``. They must not be changed before ``synchronize``.
        name: As for ``allgather_async``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        One handle for ``poll`` and ``synchronize``; the latter returns a tuple of tensors.

    Raises:
        As ``grouped_allgather``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.grouped_allgather_async([torch.ones(1), torch.zeros(2)])
        ones, zeros = hvd.synchronize(handle)  # on 2 ranks [2] and [4]
    """
    spec = _gathering(name, process_set)
    request = start_allgather(list_group(tensors, spec), spec.kind, name, team=spec.team)
    return request.publish(lambda gathered: tuple(item.tensor for item in gathered))


def _gathering(name: str | None, process_set: ProcessSet) -> Operation:
    kind = "grouped_allgather"
    return Operation(kind, name, collective="allgather", team=resolve_process_set(process_set, kind))
