"""Reduction of sparse tensors: the rows of all ranks are gathered, and their concatenation is the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from horo.errors import MismatchError, UnsupportedError, UsageError
from horo.torch.compat.torch_private import sparse_indices, sparse_values
from horo.torch.engine.operation import Operation, describe
from horo.torch.engine.results import Gathered
from horo.torch.engine.submit import start_allgather, telling
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set
from horo.torch.ops.reduce_op import ReduceOp, resolve_op

__all__ = ["sparse_allreduce_async"]

_KIND = "sparse_allreduce"


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begins to add up the sparse tensors of all ranks, and returns at once; not differentiable.

    Args:
        tensor: A sparse tensor in COO form on CPU or GPU, whose values have a dtype that ``allgather`` takes. Shape,
            dtype and number of sparse dimensions are equal on all ranks; the number of values may differ.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        op: ``Average`` (the default) or ``Sum``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A function without arguments, to be called once: it blocks until all ranks have given their values, and returns
        the sum or average as a sparse tensor, which is not coalesced.

    Raises:
        UsageError: ``tensor`` is not sparse, or another argument is wrong.
        UnsupportedError: Another ``op``, device or dtype.
        MismatchError: Ranks gave other shapes or dtypes. It comes out of the function, as does ``GroupError``.
        NotInitializedError: Before ``init()``.

    Example:
        x = torch.sparse_coo_tensor([[hvd.rank()]], [1.0], (4,))
        total = hvd.sparse_allreduce_async(x, name="x", op=hvd.Sum)()  # on 2 ranks [1., 1., 0., 0.]
    """
    what = describe(_KIND, name)
    team = resolve_process_set(process_set, what)
    with telling(Operation(_KIND, name, collective="allgather", team=team)):
        op = _check(tensor, op, what)
    scale = process_set.size() if op == ReduceOp.Average else None
    tensor = tensor.detach()
    indices = sparse_indices(tensor)
    shape = indices.new_tensor([[tensor.sparse_dim(), *tensor.shape]])
    rows = [indices.t().contiguous(), sparse_values(tensor), shape]
    request = start_allgather(rows, _KIND, name, team=team)
    members = process_set.ranks or [0]
    return request.publish(partial(_combined, what, list(tensor.shape), members, scale)).wait


def _check(tensor: torch.Tensor, op: int | None, what: str) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        given = f"a tensor with layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else repr(tensor)
        raise UsageError(f"{what}: expected a sparse tensor in COO form, not {given}; allreduce takes dense ones")
    op = resolve_op(op)
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise UnsupportedError(f"{what}: op={op} is neither Average nor Sum: only these are defined for sparse tensors")
    return op


def _combined(
    what: str, shape: list[int], members: list[int], scale: int | None, gathered: Sequence[Gathered]
) -> torch.Tensor:
    indices, values, shapes = (each.tensor for each in gathered)
    members = gathered[2].present(members)
    first = shapes[0].tolist()
    for rank, other in zip(members, shapes.tolist(), strict=True):
        if other != first:
            raise MismatchError(
                f"{what}: rank {members[0]} gave a tensor of shape {first[1:]} with {first[0]} sparse dimensions, rank "
                f"{rank} one of shape {other[1:]} with {other[0]}"
            )
    if scale is not None:
        is_inexact = values.is_floating_point() or values.is_complex()
        values = values / scale if is_inexact else values.div(scale, rounding_mode="trunc")
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True)
