"""All-to-all: each rank gives every rank some rows."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex

import torch

from horo.errors import UsageError
from horo.torch.engine import runtime
from horo.torch.engine.handles import Handle
from horo.torch.engine.operation import Operation, check_tensor, describe
from horo.torch.engine.outputs import check_out
from horo.torch.engine.results import Gathered, fill_out
from horo.torch.engine.submit import expect_again, repeat, start_alltoall, telling
from horo.torch.ops.autograd import alltoall_one, needs_graph
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["alltoall", "alltoall_async"]


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Iterable[SupportsIndex] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives each rank some rows of the tensor, and gets rows from each; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: ``[rows, ...]`` on CPU or GPU, dense, of any dtype that is not quantized. The number of rows may differ
            by rank; dtype and the other dimensions are equal on all ranks.
        splits: How many rows go to each rank, in rank order: as many integers as there are ranks, a list, an array or a
            1-D tensor. Their sum is at most the number of rows; the rest go to nobody. None: equally many for
            all.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.
        out: As for ``allgather``.

    Returns:
        ``[rows for this rank, ...]``, ``out`` or new memory, same dtype: those from rank 0, then from rank 1 and so on.
        With ``splits``, and from ``alltoall_async`` always, a pair of that and of the number of rows from each rank,
        int32 ``[size]``.

    Raises:
        UsageError: ``tensor`` is no tensor or has no dimension, the splits do not fit it or the number of ranks, or
            ``out`` does not fit, as for ``allgather``.
        UnsupportedError: Another device or layout.
        MismatchError: Ranks gave other dtypes or dimensions under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        rows = torch.full((2 * hvd.size(),), hvd.rank())
        mine, counts = hvd.alltoall(rows, splits=[2] * hvd.size())  # on 2 ranks [0, 0, 1, 1] and [2, 2]
    """
    key = "alltoall", name, process_set, out is not None
    again: torch.Tensor | None = repeat(key, tensor, False, out) if splits is None else None
    if again is not None:
        return again
    sent, spec = _call(tensor, splits, name, process_set)
    check_out(out, tensor, spec)
    result = alltoall_one(sent, spec)
    result = result._replace(tensor=fill_out(out, result.tensor, spec))
    if splits is not None:
        return _pair(result)
    if not needs_graph([tensor]):
        expect_again(key, spec, tensor, result.tensor, is_out=out is not None)
    return result.tensor


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Iterable[SupportsIndex] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Starts an ``alltoall`` and returns at once, with a handle; not differentiable.

    Args:
        tensor: As for ``alltoall``. It must not be changed before ``synchronize``.
        splits: As for ``alltoall``.
        name: As for ``alltoall``.
        process_set: As for ``alltoall``.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns the pair, also without ``splits``.

    Raises:
        As ``alltoall``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.alltoall_async(torch.tensor([0, 1]))
        mine, counts = hvd.synchronize(handle)  # on 2 ranks [0, 0] on rank 0, [1, 1] on rank 1
    """
    return start_alltoall(*_call(tensor, splits, name, process_set)).publish(_pair)


def _pair(gathered: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
    return gathered.tensor, torch.tensor(gathered.rows, dtype=torch.int32, device="cpu")


def _call(
    tensor: torch.Tensor,
    splits: torch.Tensor | Iterable[SupportsIndex] | None,
    name: str | None,
    process_set: ProcessSet,
) -> tuple[torch.Tensor, Operation]:
    spec = Operation("alltoall", name, collective="alltoall", team=resolve_process_set(process_set, "alltoall"))
    with telling(spec):
        counts = _counts(tensor, splits, spec)
    total = sum(counts)
    sent = tensor if total == tensor.shape[0] else tensor[:total]
    return sent, spec._replace(splits=tuple(counts))


def _counts(tensor: torch.Tensor, splits: torch.Tensor | Iterable[SupportsIndex] | None, spec: Operation) -> list[int]:
    """The rows for each rank."""
    what = describe("alltoall", spec.name)
    size = runtime.current().teams.find(spec.team).size
    check_tensor(tensor, "alltoall", spec.name)
    if tensor.dim() == 0:
        raise UsageError(f"{what}: a scalar has no first dimension to split along; use tensor.reshape(1)")
    counts = _even_splits(tensor.shape[0], size, what) if splits is None else _given_splits(splits, what)
    if len(counts) != size:
        raise UsageError(f"{what}: {len(counts)} splits; {size} ranks take part")
    if least := [count for count in counts if count < 0]:
        raise UsageError(f"{what}: split {least[0]} is negative")
    total = sum(counts)
    if total > tensor.shape[0]:
        raise UsageError(f"{what}: the splits are {total} rows together; the tensor has {tensor.shape[0]}")
    return counts


def _even_splits(rows: int, size: int, what: str) -> list[int]:
    if rows % size:
        raise UsageError(f"{what}: {rows} rows cannot be split evenly among {size} ranks; pass splits")
    return [rows // size] * size


def _given_splits(splits: torch.Tensor | Iterable[SupportsIndex], what: str) -> list[int]:
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point() or splits.is_complex() or splits.dtype is torch.bool:
            raise UsageError(
                f"{what}: splits is {splits.dtype} {list(splits.shape)}; it must be a 1-D tensor of integers"
            )
        return [int(count) for count in splits.tolist()]
    try:
        given = list(splits)
    except TypeError:
        raise UsageError(f"{what}: splits is {splits!r}; it must be one integer for each rank, as a list") from None
    return [_as_count(count, what) for count in given]


def _as_count(count: object, what: str) -> int:
    """A number of rows; those of numpy are some, too."""
    try:
        if isinstance(count, bool):
            raise TypeError
        return operator.index(count)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{what}: split {count!r} is no integer") from None
