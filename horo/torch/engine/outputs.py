"""Results in memory of the caller: the argument ``out`` of collectives."""

from __future__ import annotations

import torch

from horo.errors import UsageError
from horo.torch.engine.operation import Operation, check_tensor, describe, share_of_rows
from horo.torch.engine.submit import telling

__all__ = ["check_out"]


def check_out(out: torch.Tensor | None, tensor: torch.Tensor, spec: Operation) -> None:
    """Refuses, on all ranks, an ``out`` to which the result of ``spec`` for ``tensor`` cannot be written.

    The number of rows of what is gathered is known only afterwards, see ``results.fill_out``.

    Raises:
        UsageError: The core cannot work on it, it differs in dtype, device or shape, it is not contiguous, or a
            gradient is asked for.
    """
    if out is None:
        return
    what = describe(spec.kind, spec.name)
    with telling(spec):
        check_tensor(tensor, spec.kind, spec.name)
        check_tensor(out, f"out of {spec.kind}", spec.name)
        if torch.is_grad_enabled() and (out.requires_grad or tensor.requires_grad):
            raise UsageError(f"{what}: out= has no gradient; leave it out, or call this in torch.no_grad()")
        if out.dtype is not tensor.dtype or out.device != tensor.device:
            kinds = [f"{each.dtype} on {each.device}" for each in (out, tensor)]
            raise UsageError(f"{what}: out is {kinds[0]}, the tensor {kinds[1]}")
        if not out.is_contiguous():
            raise UsageError(f"{what}: out is not contiguous (strides {list(out.stride())}); use torch.empty")
        wanted = list(tensor.shape)
        if spec.collective != "broadcast" and wanted:
            is_known = spec.collective == "reducescatter"
            wanted[0] = share_of_rows(wanted[0], *spec.place)[1] if is_known else next(iter(out.shape), -1)
        if list(out.shape) != wanted:
            shape = str(wanted).replace("-1", "rows")
            raise UsageError(f"{what}: out has the shape {list(out.shape)}, the result {shape}")
