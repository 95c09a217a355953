"""TorchMetrics over all ranks: else a metric finds no process group of torch's, and is each rank's own."""

from __future__ import annotations

import sys
from typing import Any

import torch

import horo.torch as hvd
from horo.lightning.collectives import process_set_of

__all__ = ["gather_states", "synchronize_metrics"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_DIMENSIONS_MAX = 8


def synchronize_metrics(module: torch.nn.Module) -> None:
    """Makes all metrics in ``module`` compute their values over all ranks of the job. Returns at once.

    The strategies do so with a ``LightningModule``; call it for metrics elsewhere, as in a loop with Fabric.
    ``compute()`` then blocks until all ranks have called it.

    Args:
        module: A metric of TorchMetrics, a collection of metrics, or a module that has some.

    Example:
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        horo.lightning.synchronize_metrics(accuracy)
    """
    library: Any = sys.modules.get("torchmetrics")
    if library is None:
        return
    is_torchs = sys.modules["torchmetrics.metric"].jit_distributed_available
    for part in module.modules():
        if isinstance(part, library.Metric):
            metric: Any = part
            if metric.distributed_available_fn is is_torchs:
                metric.distributed_available_fn = _are_several
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather_states


def _are_several() -> bool:
    return hvd.is_initialized() and hvd.size() > 1


def gather_states(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order; shapes may differ. A rank without samples has an empty float32 tensor.

    Blocks until all ranks have called it.

    Args:
        state: Of up to eight dimensions.
        group: A process set; None: all ranks.
    """
    process_set = process_set_of(group)
    number = _DTYPES.index(state.dtype)
    own = [number, state.dim(), *state.shape, *[0] * (_DIMENSIONS_MAX - state.dim())]
    headers = hvd.allgather(torch.tensor([own]), process_set=process_set).tolist()
    shapes = [shape[:dimensions] for _, dimensions, *shape in headers]
    counts = [torch.Size(shape).numel() for shape in shapes]
    dtype = next((_DTYPES[header[0]] for header, count in zip(headers, counts, strict=True) if count), state.dtype)
    whole = hvd.allgather(state.detach().reshape(-1).to(dtype), process_set=process_set)
    parts = [part.view(shape) for part, shape in zip(torch.split(whole, counts), shapes, strict=True)]
    parts[process_set.rank() or 0] = state.to(dtype)  # as torchmetrics: gradients go through this rank's values only
    return parts
