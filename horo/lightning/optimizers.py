"""The optimizers of a strategy, which average gradients over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import horo.torch as hvd
from horo.errors import UsageError

__all__ = ["accumulate_locally", "check_options", "distribute", "scale_learning_rates"]

_OPTIONS = ("compression", "op", "gradient_predivide_factor", "groups", "sparse_as_dense", "sharding")


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ``hvd.DistributedOptimizer``.

    Raises:
        UsageError: One of them is not for a strategy.
    """
    for name in options:
        if name not in _OPTIONS:
            raise UsageError(f"HoroStrategy({name}=...): expected buffers, scale_lr or one of {', '.join(_OPTIONS)}")
    return options


def distribute(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Makes an optimizer average gradients, and gives it the state of rank 0; blocks until all ranks have called it.

    Args:
        optimizer: One that is distributed already keeps its options. Lightning's own, for a module that has none, has
            no parameters, and stays as it is.
        model: The names of its parameters appear in messages, if it has all of the optimizer's. None: numbers do.
        options: Those of ``hvd.DistributedOptimizer``.
    """
    if not optimizer.param_groups:
        return optimizer
    if not hasattr(optimizer, "_reducer"):
        named = list(model.named_parameters()) if model is not None else []
        known = {parameter for _, parameter in named}
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        hvd.DistributedOptimizer(optimizer, named if known.issuperset(own) else None, **options)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


@contextmanager
def accumulate_locally(optimizers: Iterable[Any]) -> Iterator[None]:
    """Backward passes inside exchange nothing; the next one outside averages the sum."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            if optimizer.param_groups:
                stack.enter_context(optimizer.no_sync())
        yield


def scale_learning_rates(optimizers: Sequence[torch.optim.Optimizer], schedulers: Iterable[Any], factor: float) -> None:
    """Multiplies learning rates, and those that schedulers began with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * factor
    for scheduler in schedulers:
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
