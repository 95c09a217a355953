"""The optimizers that can be sharded: those that step each parameter by itself, once per ``step()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from horo.errors import UnsupportedError, UsageError

__all__ = ["check_sharding"]

_PROBE_STEPS = 3
_PROBE_SHAPES = ((3, 4), (4,), (2, 5), (6,))


def check_sharding(optimizer: torch.optim.Optimizer, sharding: Any, op: int, adasum: int) -> None:
    """Refuses what cannot be sharded.

    Args:
        optimizer: That of the user.
        sharding: As the user has given it, not None.
        op: The reduction of its gradients.
        adasum: The one for which there is no sharding.

    Raises:
        UsageError: ``sharding`` is no value of it.
        UnsupportedError: The optimizer, ``op`` or a parameter is not for it.
    """
    if sharding == "gradients":
        raise UnsupportedError(
            'DistributedOptimizer: sharding="gradients" is not offered; sharding="optimizer" averages gradients on '
            "every rank, and shards parameters, state and the step"
        )
    if sharding != "optimizer":
        raise UsageError(f"DistributedOptimizer: sharding must be None or 'optimizer', not {sharding!r}")
    if op == adasum:
        raise UnsupportedError("DistributedOptimizer: sharding= is not for op=Adasum, where each rank steps by itself")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cpu":
                raise UnsupportedError(
                    f"DistributedOptimizer: a parameter of shape {list(parameter.shape)} is on {parameter.device}; "
                    "sharding= is for parameters in host memory"
                )
    if not hasattr(torch.optim.Optimizer, "register_load_state_dict_post_hook"):
        raise UnsupportedError(
            "DistributedOptimizer: sharding= needs a torch whose optimizers have hooks around load_state_dict(), not "
            f"{torch.__version__}"
        )
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"{kind.__name__}.step() evaluates its closure several times and looks at all gradients together: leave "
            "sharding out"
        )
    if any(callable(getattr(kind, name, None)) for name in ("train", "eval")):
        raise UnsupportedError(
            f"{kind.__name__} exchanges the values of parameters in train() and eval(), also of those that other ranks "
            "own: leave sharding out"
        )
    if kind.__module__.partition(".")[0] != "torch":
        _refuse_coupled(optimizer)


def _refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Steps tiny parameters by another optimizer of its class: all together, and each half alone.

    Raises:
        UnsupportedError: It cannot be made, or the halves come to other values.
    """
    kind: Callable[..., torch.optim.Optimizer] = type(optimizer)
    name = type(optimizer).__name__
    taken = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    options = {key: value for key, value in optimizer.defaults.items() if takes_any or key in taken}
    try:
        whole = _stepped(kind, options, range(len(_PROBE_SHAPES)))
        halves = [_stepped(kind, options, range(first, len(_PROBE_SHAPES), 2)) for first in (0, 1)]
    except Exception as error:
        raise UnsupportedError(
            f"sharding= cannot try out whether {name} steps each parameter by itself, as {name}(parameters, "
            f"**defaults) and its step() raise {type(error).__name__}: {error}; leave sharding out"
        ) from error
    for index, value in enumerate(whole):
        if not torch.equal(value, halves[index % 2][index]):
            raise UnsupportedError(
                f"sharding= needs an optimizer that steps each parameter by itself; {name} steps one by the gradients "
                "of others as well: leave sharding out"
            )


def _stepped(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], chosen: Iterable[int]
) -> list[torch.Tensor]:
    """The parameters after a few steps of those that are chosen, the others without gradients."""
    numbers = torch.Generator().manual_seed(1)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu")

    parameters = [torch.nn.Parameter(drawn(shape)) for shape in _PROBE_SHAPES]
    optimizer = kind(parameters, **options)
    kept = set(chosen)
    for _ in range(_PROBE_STEPS):
        for index, parameter in enumerate(parameters):
            gradient = 100 * drawn(tuple(parameter.shape))
            parameter.grad = gradient if index in kept else None
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
