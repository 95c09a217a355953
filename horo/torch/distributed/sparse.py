"""Sums of sparse tensors: the entries of all ranks are gathered, and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from horo.core.context import REDUCE_OPS
from horo.errors import MismatchError, UnsupportedError
from horo.torch.compat.torch_private import sparse_indices, sparse_values
from horo.torch.distributed.reduction import Reduction
from horo.torch.engine.results import Gathered

__all__ = ["check_sum", "entries_of", "put_together"]


def check_sum(reduction: Reduction) -> bool:
    """Whether the reduction is an average. UnsupportedError: it is no sum, either."""
    if reduction.number not in (REDUCE_OPS["sum"], REDUCE_OPS["average"]) or reduction.factor is not None:
        raise UnsupportedError("all_reduce: of sparse tensors there are SUM and AVG; convert others by to_dense()")
    return reduction.number == REDUCE_OPS["average"]


def entries_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The rows that a rank gives: the places of its entries, their values, and one row with the shape."""
    indices = sparse_indices(tensor)
    shape = indices.new_tensor([[tensor.sparse_dim(), *tensor.shape]])
    return [indices.t().contiguous(), sparse_values(tensor).detach().contiguous(), shape]


def put_together(tensor: torch.Tensor, size: int, *, averages: bool) -> Callable[..., MismatchError | None]:
    """A function that writes the sum of the entries of all ranks into ``tensor``, coalesced, or returns an error."""

    def finish(gathered: Sequence[Gathered]) -> MismatchError | None:
        indices, values, shapes = (each.tensor for each in gathered)
        first, *others = shapes.tolist()
        for rank, other in enumerate(others, 1):
            if other != first:
                return MismatchError(
                    f"all_reduce: rank 0 gave a sparse tensor of shape {first[1:]} with {first[0]} sparse dimensions, "
                    f"rank {rank} one of shape {other[1:]} with {other[0]}"
                )
        total = torch.sparse_coo_tensor(indices.t(), values, tuple(first[1:]), check_invariants=True).coalesce()
        with torch.no_grad():
            tensor.copy_(total / size if averages else total)
        return None

    return finish
