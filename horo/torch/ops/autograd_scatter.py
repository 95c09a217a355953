"""The gradient of ``reducescatter``.

It is Horovod's: together with that of ``allgather``, which is averaged, it is that of ``allreduce``. So it is the
allgather of what the ranks have for their rows, times the factors, and for all but ``Average`` times the number of
ranks. In the backward pass all ranks communicate again, see ``horo.torch.ops.autograd``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from horo.core import context
from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import run_allreduce, run_reducescatter
from horo.torch.ops.autograd import allgather_all, floating, needs_graph, product_weight
from horo.torch.ops.compression import narrow

__all__ = ["reducescatter_all"]

_AVERAGE = context.REDUCE_OPS["average"]
_SUM = context.REDUCE_OPS["sum"]
_PRODUCT = context.REDUCE_OPS["product"]


def reducescatter_all(
    tensors: Sequence[torch.Tensor], spec: Operation, key: Hashable = None
) -> tuple[torch.Tensor, ...]:
    """Reduces tensors in one request and returns this rank's rows; differentiable where an input requires grad.

    ``key``: for a later ``repeat`` of a tensor that needs no graph.
    """
    if not needs_graph(tensors):
        return run_reducescatter(tensors, spec, key)
    if spec.reduce_op in (_AVERAGE, _SUM):
        return _apply(_LinearReducescatter, spec, tensors)
    if spec.wire is not None:  # rounded values are compared and divided
        rounded = [narrow(tensor, spec.wire)[0] for tensor in tensors]
        results = reducescatter_all(rounded, spec._replace(wire=None))
        return tuple(result.to(tensor.dtype) for result, tensor in zip(results, tensors, strict=True))
    # The factors stay outside, so that exactly what was reduced is compared and divided.
    plain = spec._replace(prescale=1.0, postscale=1.0)
    scaled = [tensor if spec.prescale == 1.0 else tensor * spec.prescale for tensor in tensors]
    results = _apply(_OtherReducescatter, plain, scaled)
    return tuple(result if spec.postscale == 1.0 else result * spec.postscale for result in results)


def _apply(function: Any, spec: Operation, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    results = function.apply(spec, *tensors)  # torch leaves Function.apply untyped
    return results if isinstance(results, tuple) else (results,)


def _gather(ctx: Any, tensors: Sequence[torch.Tensor], suffix: str) -> tuple[torch.Tensor, ...]:
    """The rows of all ranks."""
    name = None if ctx.spec.name is None else f"{ctx.spec.name}.{suffix}"
    return allgather_all(tensors, ctx.spec.kind, name, ctx.spec.team)


def _spread(ctx: Any, gradients: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor | None, ...]:
    """The gradients as backward returns them, with None for the spec and for inputs that are not differentiated."""
    results: list[torch.Tensor | None] = [None] * count
    for index, gradient in zip(ctx.floating, gradients, strict=True):
        results[index] = gradient
    return (None, *results)


class _LinearReducescatter(torch.autograd.Function):
    """Sum and Average."""

    @staticmethod
    def forward(ctx: Any, spec: Operation, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.spec = spec
        ctx.floating = floating(tensors)
        return run_reducescatter(tensors, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = ctx.spec
        factor = spec.prescale * spec.postscale * (1 if spec.reduce_op == _AVERAGE else spec.place[1])
        gathered = _gather(ctx, [grads[index] for index in ctx.floating], "grad")
        return _spread(ctx, [grad if factor == 1.0 else grad * factor for grad in gathered], len(grads))


class _OtherReducescatter(torch.autograd.Function):
    """Min and Max: the gradient goes to the ranks that hold the extreme value, in equal parts if several do.

    Product: it is multiplied by the product of the other ranks' values, of complex numbers conjugated, which comes from
    the product of the values that are not zero and their number.
    """

    @staticmethod
    def forward(ctx: Any, spec: Operation, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = run_reducescatter(tensors, spec)
        ctx.spec = spec
        ctx.floating = floating(tensors)
        chosen = [(tensors[index], results[index]) for index in ctx.floating]
        ctx.save_for_backward(*(tensor for tensor, _ in chosen), *(result for _, result in chosen))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = ctx.saved_tensors[: len(ctx.floating)]
        gathered = [grad * ctx.spec.place[1] for grad in _gather(ctx, [grads[index] for index in ctx.floating], "grad")]
        weights = _product_weights(ctx, own) if ctx.spec.reduce_op == _PRODUCT else _extreme_weights(ctx, own)
        return _spread(ctx, [grad * weight for grad, weight in zip(gathered, weights, strict=True)], len(grads))


def _reduce(ctx: Any, tensors: Sequence[torch.Tensor], suffix: str, reduce_op: int) -> tuple[torch.Tensor, ...]:
    name = None if ctx.spec.name is None else f"{ctx.spec.name}.{suffix}"
    return run_allreduce(tensors, Operation(ctx.spec.kind, name, reduce_op, team=ctx.spec.team))


def _extreme_weights(ctx: Any, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results = _gather(ctx, ctx.saved_tensors[len(ctx.floating) :], "result")
    masks = [(mine == result).to(mine.dtype) for mine, result in zip(own, results, strict=True)]
    counts = _reduce(ctx, masks, "count", _SUM)
    return [torch.where(mask != 0, mask / count, mask) for mask, count in zip(masks, counts, strict=True)]


def _product_weights(ctx: Any, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    nonzero = [torch.where(value == 0, torch.ones_like(value), value) for value in own]
    zeros = [(value == 0).to(value.dtype) for value in own]
    products = _reduce(ctx, nonzero, "product", _PRODUCT)
    counts = _reduce(ctx, zeros, "count", _SUM)
    return [
        torch.where(count - zero == 0, product_weight(product, value), torch.zeros_like(product))
        for count, zero, product, value in zip(counts, zeros, products, nonzero, strict=True)
    ]
