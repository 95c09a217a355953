"""BatchNorm under Lightning: layers over all ranks, and running statistics that ranks have in common."""

from __future__ import annotations

from typing import Any

import torch

import horo.torch as hvd
from horo.errors import UsageError
from horo.torch.compat.torch_private import BatchNorm

__all__ = ["BatchNormSwap", "check_buffers", "equalize_buffers"]

_BUFFERS = ("average", "broadcast", "local")


class BatchNormSwap:
    """Puts ``hvd.SyncBatchNorm`` in the place of the BatchNorm layers of a model, and the layers back later.

    Lightning's own layers, of torch, need a process group.
    """

    def __init__(self) -> None:
        self._swapped: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with layers over all ranks."""
        self._swapped = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BatchNorm) and not isinstance(child, hvd.SyncBatchNorm)
        ]
        converted: torch.nn.Module = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its own layers, which have what was learned."""
        for parent, name, own in self._swapped:
            layer = getattr(parent, name)
            own._parameters, own._buffers, own.training = layer._parameters, layer._buffers, layer.training
            setattr(parent, name, own)
        self._swapped = []
        return model


def check_buffers(buffers: Any) -> str:
    """The way to make buffers equal.

    Raises:
        UsageError: It is none of the three.
    """
    if buffers not in _BUFFERS:
        raise UsageError(f"buffers={buffers!r}: expected one of {', '.join(_BUFFERS)}")
    return str(buffers)


def equalize_buffers(model: torch.nn.Module, how: str) -> None:
    """Makes the buffers of a model equal on all ranks; blocks until all ranks have called it.

    Args:
        model: Its buffers that are part of its state.
        how: ``"average"``: the mean of the ranks' buffers; ``"broadcast"``: those of rank 0; ``"local"``: none changes.
    """
    if how == "local" or hvd.size() == 1:
        return
    kept = model.state_dict(keep_vars=True).keys()
    named = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    if not named:
        return
    if how == "average":
        hvd.average_buffers(model)
    else:
        hvd.broadcast_parameters(named, root_rank=0)
