"""Remedies that errors name: ``hvd.distribute`` lacks methods that a ``DistributedOptimizer`` has."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OF_MODEL", "OF_OPTIMIZER", "Advice"]


class Advice(NamedTuple):
    """Ends of sentences.

    Attributes:
        no_end: torch does not tell when a backward ends.
        in_hook: a hook of autograd has called a method.
        unreduced: a gradient scaler came upon gradients that are not averaged.
        broken: an exception has ended a backward.
        behind: a rank has called ``backward()`` once more than others.
        early: gradients were changed on some ranks, when others had yet to take part.
    """

    no_end: str
    in_hook: str
    unreduced: str
    broken: str
    behind: str
    early: str


_ANEW = "call optimizer.zero_grad() and compute them again, on all ranks alike"
_ALIKE = "call backward() equally often per step on all ranks"

OF_OPTIMIZER = Advice(
    no_end=(
        "use DistributedOptimizer(..., gradients_ready='step') or HORO_GRADIENTS_READY=step, and call "
        "optimizer.synchronize() before gradients are clipped"
    ),
    in_hook="call it after that, or use DistributedOptimizer(..., gradients_ready='step')",
    unreduced="call optimizer.synchronize() before scaler.step(optimizer)",
    broken=f"{_ANEW}, or optimizer.synchronize() to take part with the gradients as they are",
    behind=(
        f"{_ALIKE}, or run each inside optimizer.no_sync() and call optimizer.synchronize() once per step on every rank"
    ),
    early=("call optimizer.synchronize() on every rank before gradients are used (it does nothing after a backward())"),
)
OF_MODEL = Advice(
    no_end="use hvd.DistributedOptimizer(..., gradients_ready='step') in the place of hvd.distribute",
    in_hook="call it after that",
    unreduced="run the last backward() before scaler.step(optimizer) outside hvd.no_sync(model)",
    broken=_ANEW,
    behind=f"{_ALIKE}, or all but the last inside hvd.no_sync(model)",
    early="call backward() in every step on all ranks, if only on zeros, before gradients are used",
)
