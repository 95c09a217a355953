"""Collectives that autograd can follow.

Every rank has a loss of its own. In the backward pass all ranks communicate again, so all run it, for the same results
in the same order. The gradient of a rank's input is made of the gradients of all ranks' results, as in Horovod:

- ``allreduce``: with ``Sum`` their sum, with ``Average`` their mean. With ``Min`` and ``Max`` their sum on the rank
  that holds the value, in equal parts if several do. With ``Product`` their sum times the other ranks' values.
- ``alltoall``: for each row, the gradient on the rank that got it. This and those of ``allreduce`` are gradients of the
  sum of the ranks' losses. ``DistributedOptimizer`` makes them gradients of the mean loss.
- ``allgather``: for this rank's rows, the *mean* over ranks. ``broadcast``: at the root the mean, else zeros. That is
  1/N of the gradient of the summed losses. ``result.register_hook(lambda gradient: gradient * hvd.size())`` corrects
  it.
- ``reducescatter``: the gradients of all ranks for their rows, times N except for ``Average``. That is N times the
  gradient of the summed losses, and right together with ``allgather``. Alone, it needs ``gradient / hvd.size()`` in
  such a hook.

N is the number of ranks that take part. Factors are applied to gradients as to values.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from horo.core import context
from horo.errors import UnsupportedError
from horo.torch.compat.torch_private import is_transformed
from horo.torch.engine import runtime, topology
from horo.torch.engine.operation import Operation, describe
from horo.torch.engine.results import Gathered
from horo.torch.engine.submit import run_allreduce, run_broadcast, run_reducescatter, start_allgather, start_alltoall
from horo.torch.ops.compression import narrow

__all__ = [
    "allgather_all",
    "allreduce_all",
    "alltoall_one",
    "broadcast_one",
    "needs_graph",
    "reducescatter_all",
]

_ADASUM = context.REDUCE_OPS["adasum"]
_AVERAGE = context.REDUCE_OPS["average"]
_SUM = context.REDUCE_OPS["sum"]
_PRODUCT = context.REDUCE_OPS["product"]


def allreduce_all(tensors: Sequence[torch.Tensor], spec: Operation, key: Hashable = None) -> tuple[torch.Tensor, ...]:
    """Reduces tensors in one request; differentiable where an input requires grad.

    ``key``: for a later ``repeat`` of a tensor that needs no graph.

    Raises:
        UnsupportedError: Adasum, whose gradient would need the vectors of all ranks, of an input that requires grad.
    """
    if not needs_graph(tensors):
        return run_allreduce(tensors, spec, key=key)
    if spec.reduce_op in (_AVERAGE, _SUM):
        return _returned(_apply(_LinearAllreduce, spec, *tensors))
    if spec.reduce_op == _ADASUM:
        raise UnsupportedError(
            f"{describe(spec.kind, spec.name)}: op=Adasum has no gradient; call it on tensor.detach(), inside "
            "torch.no_grad(), or use op=hvd.Average"
        )
    if spec.wire is not None:  # the functions below compare and divide rounded values
        rounded = [narrow(tensor, spec.wire)[0] for tensor in tensors]
        results = allreduce_all(rounded, spec._replace(wire=None))
        return tuple(result.to(tensor.dtype) for result, tensor in zip(results, tensors, strict=True))
    # The factors stay outside, so that the functions below compare and divide exactly what was reduced.
    plain = Operation(spec.kind, spec.name, spec.reduce_op, team=spec.team)
    function = _ProductAllreduce if spec.reduce_op == _PRODUCT else _ExtremeAllreduce
    scaled = [tensor if spec.prescale == 1.0 else tensor * spec.prescale for tensor in tensors]
    results = _returned(_apply(function, plain, *scaled))
    return tuple(result if spec.postscale == 1.0 else result * spec.postscale for result in results)


def allgather_all(
    tensors: Sequence[torch.Tensor], kind: str, name: str | None, team: int = 0
) -> tuple[torch.Tensor, ...]:
    """Gathers tensors in one request; differentiable where an input requires grad."""
    if not needs_graph(tensors):
        gathered = start_allgather(tensors, kind, name, sync=True, team=team).wait()
        return tuple(item.tensor for item in gathered)
    return _returned(_apply(_Allgather, kind, name, team, *tensors))


def broadcast_one(
    tensor: torch.Tensor, root_rank: int, name: str | None, key: Hashable = None, team: int = 0
) -> torch.Tensor:
    """Copies the root's tensor to all ranks; differentiable where the input requires grad. ``key`` as above."""
    if not needs_graph([tensor]):
        return run_broadcast([tensor], root_rank, "broadcast", name, key=key, team=team)[0]
    result: torch.Tensor = _apply(_Broadcast, tensor, root_rank, name, team)
    return result


def reducescatter_all(
    tensors: Sequence[torch.Tensor], spec: Operation, key: Hashable = None
) -> tuple[torch.Tensor, ...]:
    """Reduces tensors in one request and returns this rank's rows; differentiable where an input requires grad.

    ``key``: for a later ``repeat`` of a tensor that needs no graph.
    """
    if not needs_graph(tensors):
        return run_reducescatter(tensors, spec, key)
    if spec.reduce_op in (_AVERAGE, _SUM):
        return _returned(_apply(_LinearReducescatter, spec, *tensors))
    if spec.wire is not None:  # rounded values are compared and divided
        rounded = [narrow(tensor, spec.wire)[0] for tensor in tensors]
        results = reducescatter_all(rounded, spec._replace(wire=None))
        return tuple(result.to(tensor.dtype) for result, tensor in zip(results, tensors, strict=True))
    # The factors stay outside, so that exactly what was reduced is compared and divided.
    plain = spec._replace(prescale=1.0, postscale=1.0)
    scaled = [tensor if spec.prescale == 1.0 else tensor * spec.prescale for tensor in tensors]
    results = _returned(_apply(_OtherReducescatter, plain, *scaled))
    return tuple(result if spec.postscale == 1.0 else result * spec.postscale for result in results)


def alltoall_one(tensor: torch.Tensor, spec: Operation) -> Gathered:
    """Gives each rank its rows of the tensor; differentiable where the input requires grad."""
    if not needs_graph([tensor]):
        return start_alltoall(tensor, spec, sync=True).wait()  # type: ignore[no-any-return]  # it is that
    result, rows = _apply(_Alltoall, spec, tensor)
    return Gathered(result, rows)


def needs_graph(tensors: Sequence[Any]) -> bool:
    """Whether autograd is to follow an operation on these. Tensors of ``torch.func`` are refused later."""
    return torch.is_grad_enabled() and any(
        isinstance(t, torch.Tensor) and t.requires_grad and not is_transformed(t) for t in tensors
    )


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)  # torch leaves Function.apply untyped


def _returned(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _derive(name: str | None, suffix: str) -> str | None:
    return None if name is None else f"{name}.{suffix}"


def _derived(spec: Operation, suffix: str, reduce_op: int) -> Operation:
    """The spec, without factors, of a reduction that the gradient of this one needs."""
    return Operation(spec.kind, _derive(spec.name, suffix), reduce_op, team=spec.team)


def _floating(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The indices of those that can have a gradient: floats and complex numbers."""
    return [index for index, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]


def _product_weight(product: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Factor of the gradient of ``product``, for its factor ``value``, which is 0 nowhere."""
    dtype = torch.complex64 if product.dtype is torch.complex32 else product.dtype  # torch divides no complex32
    return (product.to(dtype) / value.to(dtype)).conj().to(product.dtype)


class _LinearAllreduce(torch.autograd.Function):
    """Sum and Average: each is its own transpose, factors included."""

    @staticmethod
    def forward(ctx: Any, spec: Operation, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.spec = spec
        ctx.floating = _floating(tensors)
        return run_allreduce(tensors, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = ctx.spec
        back = spec._replace(name=_derive(spec.name, "grad"))
        results: list[torch.Tensor | None] = [None] * len(grads)
        reduced = allreduce_all([grads[index] for index in ctx.floating], back)
        for index, result in zip(ctx.floating, reduced, strict=True):
            results[index] = result
        return (None, *results)


class _ExtremeAllreduce(torch.autograd.Function):
    """Min and Max: the gradient goes to the ranks that hold the extreme value, in equal parts if several do."""

    @staticmethod
    def forward(ctx: Any, spec: Operation, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = run_allreduce(tensors, spec)
        ctx.spec = spec
        ctx.floating = _floating(tensors)
        ctx.save_for_backward(*(tensors[index] == results[index] for index in ctx.floating))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        masks = ctx.saved_tensors
        used = [grads[index] for index in ctx.floating]
        counts = [mask.to(grad.dtype) for mask, grad in zip(masks, used, strict=True)]
        sums = run_allreduce([*used, *counts], _derived(ctx.spec, "grad", _SUM))
        results: list[torch.Tensor | None] = [None] * len(grads)
        for position, (index, mask) in enumerate(zip(ctx.floating, masks, strict=True)):
            share = sums[position] / sums[len(used) + position]
            results[index] = torch.where(mask, share, torch.zeros_like(share))
        return (None, *results)


class _ProductAllreduce(torch.autograd.Function):
    """Product: the gradient is multiplied by the product of the *other* ranks' values, also where some are zero.

    That of complex numbers is conjugated, as torch's gradients are. It comes from the product of the values that are
    not zero and their number, so only results near the ends of the dtype's range lose precision.
    """

    @staticmethod
    def forward(ctx: Any, spec: Operation, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.spec = spec
        ctx.floating = _floating(tensors)
        ctx.save_for_backward(*(tensors[index] for index in ctx.floating))
        return run_allreduce(tensors, spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = ctx.saved_tensors
        used = [grads[index] for index in ctx.floating]
        nonzero = [torch.where(value == 0, torch.ones_like(value), value) for value in own]
        zeros = [(value == 0).to(value.dtype) for value in own]
        products = run_allreduce(nonzero, _derived(ctx.spec, "grad_product", _PRODUCT))
        sums = run_allreduce([*used, *zeros], _derived(ctx.spec, "grad", _SUM))
        results: list[torch.Tensor | None] = [None] * len(grads)
        for position, index in enumerate(ctx.floating):
            others_zero = sums[len(used) + position] - zeros[position]
            gradient = sums[position] * _product_weight(products[position], nonzero[position])
            results[index] = torch.where(others_zero == 0, gradient, torch.zeros_like(gradient))
        return (None, *results)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, name: str | None, team: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = start_allgather(tensors, kind, name, sync=True, team=team).wait()
        rank = runtime.current().teams.find(team).rank
        ctx.name, ctx.team = name, team
        ctx.floating = _floating(tensors)
        ctx.rows = [(sum(item.rows[:rank]), item.rows[rank]) for item in gathered]
        return tuple(item.tensor for item in gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = Operation("allgather", _derive(ctx.name, "grad"), _AVERAGE, team=ctx.team)
        averaged = allreduce_all([grads[index] for index in ctx.floating], spec)
        results: list[torch.Tensor | None] = [None] * len(grads)
        for index, result in zip(ctx.floating, averaged, strict=True):
            first, count = ctx.rows[index]
            results[index] = result.narrow(0, first, count)
        return (None, None, None, *results)


class _Alltoall(torch.autograd.Function):
    """An alltoall; the gradient of rows goes back to the rank that they came from."""

    @staticmethod
    def forward(ctx: Any, spec: Operation, tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        result, rows = start_alltoall(tensor, spec, sync=True).wait()
        ctx.back = spec._replace(name=_derive(spec.name, "grad"), splits=tuple(rows))
        return result, rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[None, torch.Tensor]:
        return None, alltoall_one(grad, ctx.back).tensor


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, team: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        ctx.name, ctx.team = name, team
        return run_broadcast([tensor], root_rank, "broadcast", name, team=team)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = Operation("broadcast", _derive(ctx.name, "grad"), _AVERAGE, team=ctx.team)
        averaged = allreduce_all(grads, spec)[0]
        return (averaged if topology.rank() == ctx.root_rank else torch.zeros_like(averaged)), None, None, None


def _gather(ctx: Any, tensors: Sequence[torch.Tensor], suffix: str) -> tuple[torch.Tensor, ...]:
    """The rows of all ranks."""
    return allgather_all(tensors, ctx.spec.kind, _derive(ctx.spec.name, suffix), ctx.spec.team)


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
        ctx.floating = _floating(tensors)
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
        ctx.floating = _floating(tensors)
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


def _extreme_weights(ctx: Any, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results = _gather(ctx, ctx.saved_tensors[len(ctx.floating) :], "result")
    masks = [(mine == result).to(mine.dtype) for mine, result in zip(own, results, strict=True)]
    counts = run_allreduce(masks, _derived(ctx.spec, "count", _SUM))
    return [torch.where(mask != 0, mask / count, mask) for mask, count in zip(masks, counts, strict=True)]


def _product_weights(ctx: Any, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    nonzero = [torch.where(value == 0, torch.ones_like(value), value) for value in own]
    zeros = [(value == 0).to(value.dtype) for value in own]
    products = run_allreduce(nonzero, _derived(ctx.spec, "product", _PRODUCT))
    counts = run_allreduce(zeros, _derived(ctx.spec, "count", _SUM))
    return [
        torch.where(count - zero == 0, _product_weight(product, value), torch.zeros_like(product))
        for count, zero, product, value in zip(counts, zeros, products, nonzero, strict=True)
    ]
