"""Batch normalization by the statistics of the whole batch, which is spread over the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.parameter import is_lazy

from horo.core import context
from horo.errors import UnsupportedError, UsageError
from horo.torch.compat.torch_private import BatchNorm
from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import run_allreduce, start_allgather
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["SyncBatchNorm"]

_KIND = "sync_batch_norm"
_GRAD_KIND = "sync_batch_norm.grad"
_SUM = context.REDUCE_OPS["sum"]


class SyncBatchNorm(BatchNorm):
    """Batch normalization over the batches of all ranks together, as one process with the whole batch does it.

    In training each forward and each backward blocks until all ranks are in it: all run the same layers in the same
    order. Ranks may have different numbers of samples, or none. In evaluation, and for a set of one rank, it is
    ``torch.nn.BatchNorm``, and communicates nothing.

    The input is ``[N, C, ...]`` on CPU or GPU, floating point. Statistics are those of torch, added up in float64.

    Args:
        num_features: C.
        eps: Added to the variance.
        momentum: Of the running statistics; None: their average over all batches.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether there are running statistics. Without, evaluation uses those of this rank's batch.
        process_set: The ranks whose batches are one.

    Raises:
        UsageError: In forward: the input has fewer than two dimensions, or one value per channel in all.
        UnsupportedError: In forward: the input is on another device, or not floating point.
        MismatchError: In forward: ranks have different numbers of channels.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: In forward, before ``init()``.

    Example:
        layer = hvd.SyncBatchNorm(3)
        y = layer(torch.randn(4, 3))  # normalized by the mean and variance of the samples of all ranks
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        **factory: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input, of its shape and dtype; see the class."""
        self._check_input_dim(input)
        team = resolve_process_set(self.process_set, "SyncBatchNorm")
        if not self.training or self.process_set.size() == 1:
            result: torch.Tensor = super().forward(input)
            return result
        if not (input.is_cpu or input.is_cuda) or not input.is_floating_point():
            raise UnsupportedError(
                f"SyncBatchNorm: the input is a {input.dtype} tensor on {input.device}; it takes floating point "
                "tensors on the CPU and on CUDA devices"
            )
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        whole = _gather_statistics(input.detach(), team)
        self._track(whole)
        apply: Any = _Normalize.apply  # torch leaves it untyped
        normalized: torch.Tensor = apply(input, self.weight, self.bias, whole, self.eps, team)
        return normalized

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm({self.num_features}): the input has {input.shape[1]} channels: {list(input.shape)}"
            )

    def _track(self, whole: _Statistics) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        batches = float(self.num_batches_tracked) if self.num_batches_tracked is not None else 1.0
        momentum = 1.0 / batches if self.momentum is None else self.momentum
        unbiased = whole.variance * (whole.values / (whole.values - 1))
        self.running_mean.lerp_(whole.mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, process_set: ProcessSet = global_process_set) -> Any:
        """Replaces all ``BatchNorm`` layers of a model; parameters and buffers stay the same objects.

        Returns at once. Call it before the optimizer is made, or after: it finds the same parameters.

        Args:
            module: The model.
            process_set: For each new layer.

        Returns:
            The model, changed in place, or the new layer where ``module`` itself is a ``BatchNorm``.

        Raises:
            UsageError: A layer has no parameters yet (``LazyBatchNorm``); give the model a batch first.

        Example:
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
            model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        """
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            return cls._from(module, process_set)
        for name, child in module.named_children():
            converted = cls.convert_sync_batchnorm(child, process_set)
            if converted is not child:
                setattr(module, name, converted)
        return module

    @classmethod
    def _from(cls, layer: BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        held = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(is_lazy(each) for each in held):
            raise UsageError(
                f"convert_sync_batchnorm: {layer} has no parameters yet; run the model on one batch first, or give "
                "the number of features"
            )
        new = cls(layer.num_features, layer.eps, layer.momentum, False, False, process_set=process_set)
        new.affine, new.track_running_stats = layer.affine, layer.track_running_stats
        new.weight, new.bias = layer.weight, layer.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            new.register_buffer(name, getattr(layer, name))
        return new.train(layer.training)


class _Statistics(NamedTuple):
    """Of each channel, over the samples of all ranks, in float64: ``[C]``. ``values``: how many per channel."""

    mean: torch.Tensor
    variance: torch.Tensor
    values: int


def _shape(like: torch.Tensor) -> list[int]:
    return [1, -1, *[1] * (like.dim() - 2)]


def _others(like: torch.Tensor) -> list[int]:
    """All dimensions but the channels."""
    return [0, *range(2, like.dim())]


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype in which many values can be added up."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _gather_statistics(values: torch.Tensor, team: int) -> _Statistics:
    """The statistics of all ranks, from mean and variance of each: large means cost no digits; all get the same bits.

    Raises:
        UsageError: there is one value per channel in all.
    """
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    own = values.new_zeros(1, 2 * channels + 1, dtype=torch.float64)
    own[0, -1] = count
    if count:
        variance, mean = torch.var_mean(_precise(values), dim=_others(values), correction=0)
        own[0, :channels], own[0, channels:-1] = mean, variance
    (gathered,) = start_allgather([own], _KIND, None, sync=True, team=team).wait()
    counts = gathered.tensor[:, -1:]
    means, variances = gathered.tensor[:, :channels], gathered.tensor[:, channels:-1]
    total = int(counts.sum())
    if total <= 1:
        raise UsageError(
            f"SyncBatchNorm: expected more than 1 value per channel when training, got {total} on all ranks together"
        )
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return _Statistics(mean, variance, total)


class _Normalize(torch.autograd.Function):
    """The gradient of the sum of all ranks' losses: each rank's values have moved the statistics of all."""

    @staticmethod
    def forward(  # noqa: PLR0917  (apply takes no keywords)
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        whole: _Statistics,
        eps: float,
        team: int,
    ) -> torch.Tensor:
        ctx.whole, ctx.team = whole, team
        ctx.inverse = (whole.variance + eps).rsqrt()
        ctx.save_for_backward(values, weight)
        precise = _precise(values)
        mean, variance = whole.mean.to(precise.dtype), whole.variance.to(precise.dtype)
        scale = None if weight is None else weight.to(precise.dtype)
        shift = None if bias is None else bias.to(precise.dtype)
        return functional.batch_norm(precise, mean, variance, scale, shift, False, 0.0, eps).to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        values, weight = ctx.saved_tensors
        shape, others = _shape(values), _others(values)
        grads, precise = _precise(grad), _precise(values)
        centered = precise - ctx.whole.mean.to(precise.dtype).view(shape)
        inverse = ctx.inverse.to(precise.dtype)
        own = torch.stack([grads.sum(others), (grads * centered).sum(others)]).double()
        grad_values = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            (sums,) = run_allreduce([own], Operation(_GRAD_KIND, None, _SUM, team=ctx.team))
            mean_grad, mean_product = (sums / ctx.whole.values).to(precise.dtype)
            scale = inverse if weight is None else inverse * weight.to(precise.dtype)
            spread = centered.mul_((mean_product * inverse.square()).view(shape))
            grad_values = (grads - mean_grad.view(shape)).sub_(spread).mul_(scale.view(shape)).to(values.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (own[1] * ctx.inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = own[0].to(weight.dtype if weight is not None else grads.dtype)
        return grad_values, grad_weight, grad_bias, None, None, None
