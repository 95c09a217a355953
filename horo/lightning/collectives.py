"""Lightning's reductions and gatherings, by horo.torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import horo.torch as hvd
from horo.errors import UsageError

__all__ = ["gather", "process_set_of", "reduce"]

_OPERATIONS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


def process_set_of(group: Any) -> hvd.ProcessSet:
    """The ranks that Lightning's ``group=`` stands for.

    Raises:
        UsageError: It is something else than None or a process set.
    """
    if group is None:
        return hvd.global_process_set
    if isinstance(group, hvd.ProcessSet):
        return group
    raise UsageError(f'group={group!r}: with strategy="horo", give a process set of hvd.add_process_set(), or None')


def reduce(tensor: Any, group: Any = None, operation: Any = "mean") -> Any:
    """Reduces ``tensor`` of any shape in place over all ranks, and returns it; what is no tensor comes back as it is.

    Blocks until all ranks have called it. No gradient goes through it.

    Args:
        tensor: Its shape and dtype are the same on all ranks.
        group: A process set; None: all ranks.
        operation: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``, ``"product"``, a reduction of ``torch.distributed`` or
            of horo; None: the sum.

    Raises:
        UsageError: The operation or the group is something else.
    """
    if not isinstance(tensor, torch.Tensor) or not hvd.is_initialized():
        return tensor
    if operation is None:
        operation = "sum"
    if isinstance(operation, str):
        if operation.lower() not in _OPERATIONS:
            raise UsageError(f"reduce_op={operation!r}: expected one of {', '.join(_OPERATIONS)}")
        operation = _OPERATIONS[operation.lower()]
    hvd.allreduce_(tensor.detach(), op=operation, process_set=process_set_of(group))
    return tensor


def gather(tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
    """The tensors of all ranks, which have one shape: ``[ranks, *shape]``. Blocks until all ranks have called it.

    Args:
        tensor: Of any shape.
        group: A process set; None: all ranks.
        sync_grads: Whether gradients go through it: that of a rank's tensor is the sum of what all ranks have for it.
    """
    if not hvd.is_initialized():
        return tensor
    process_set = process_set_of(group)
    with nullcontext() if sync_grads else torch.no_grad():
        gathered = hvd.allgather(tensor.unsqueeze(0), process_set=process_set)
    if gathered.requires_grad:
        count = len(gathered)
        scale: Any = gathered.register_hook  # torch has no types for it
        scale(lambda gradient: gradient * count)  # horo's own is the mean, as Horovod's
    return gathered
