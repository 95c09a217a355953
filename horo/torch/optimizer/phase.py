"""The place of a rank in its training step when it takes part in a reduction. Ranks at different places are found.

All ranks reduce in ``backward()`` (or ``synchronize()``), and mostly once per step. A rank that has skipped a backward
takes part from ``step()``, when the others have returned and may have changed their gradients; one that has a backward
more meets the others in their next step. Such a reduction has a mark: its first gradient travels with dimensions of
length 1 in front of its shape. So ranks at the same place meet at no cost, and others get a mismatch, tell each other
their marks, and reduce again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horo.errors import UsageError
from horo.torch.optimizer.advice import OF_OPTIMIZER, Advice
from horo.torch.optimizer.comparison import Comparison, checksum, options_of
from horo.torch.optimizer.parameter_state import ParameterState

__all__ = ["StepProgress", "refuse_different_steps"]

_LATER = 1
"""The reduction is not the first since the last step."""
_AT_STEP = 2
"""The reduction began in ``step()``."""
_BROKEN = 4
"""An exception has ended the backward, so not all gradients are there."""
_STEPS = 8
"""Times the number of further steps, below 4, that other optimizers have made since the last reduction."""


class StepProgress:
    """The place of this rank since its last step."""

    def __init__(self) -> None:
        self.reductions = 0
        self.steps = 0
        """The optimizers that have stepped since the last reduction, where several may."""
        self.is_at_step = False
        self.trained: list[ParameterState] = []
        """The parameters that required grad in the last reduction."""
        self.is_broken = False
        self.late: list[int] = []
        """The ranks that took part in the last reduction from ``step()``, if others did not."""

    @property
    def mark(self) -> int:
        """The number of dimensions that the first gradient has in front of its shape; 0 in an ordinary step."""
        later = _LATER if self.reductions else 0
        steps = _STEPS * (max(0, self.steps - 1) % 4)
        return later + (_AT_STEP if self.is_at_step else 0) + (_BROKEN if self.is_broken else 0) + steps

    def begin(self) -> None:
        """Called when a backward or a reduction begins.

        Raises:
            UsageError: Another rank waits at its step for this one's.
        """
        if self.late:
            raise UsageError(
                f"{_ranks(self.late)} took part in the last reduction without a backward() and waits in "
                "optimizer.step(), but this rank computes gradients again without having called it; call backward() "
                "and step() equally often on all ranks"
            )

    def meet(self, marks: Sequence[int], ranks: Sequence[int], advice: Advice = OF_OPTIMIZER) -> bool:
        """Whether these ranks, of which those are the marks, were at different places of the same step.

        Raises:
            UsageError: They are in different steps.
        """
        broken = [rank for rank, mark in zip(ranks, marks, strict=True) if mark & _BROKEN]
        if 0 < len(broken) < len(marks):
            raise UsageError(
                f"an exception has ended the backward() of {_ranks(broken)}, so gradients are not all there, but the "
                "other ranks have come to the end of theirs; let the exception end the rank, or have all ranks call "
                "optimizer.zero_grad() and compute this step again"
            )
        ahead = [rank for rank, mark in zip(ranks, marks, strict=True) if not mark & _LATER]
        behind = [rank for rank, mark in zip(ranks, marks, strict=True) if mark & _LATER]
        if ahead and behind:
            raise UsageError(
                f"{_ranks(behind)} has called backward() once more since its last optimizer.step(), but "
                f"{_ranks(ahead)} had called step() already, so gradients of different steps were added up; "
                f"{advice.behind}"
            )
        fewest = min(mark // _STEPS for mark in marks)
        further = [rank for rank, mark in zip(ranks, marks, strict=True) if mark // _STEPS > fewest]
        if further:
            raise UsageError(
                f"since the last reduction, {_ranks(further)} has called step() of more optimizers of the model than "
                "other ranks, so gradients of different steps were added up; call backward() equally often on all "
                "ranks, or, if each optimizer has a backward() of its own, hvd.distribute for each one's module"
            )
        late = [rank for rank, mark in zip(ranks, marks, strict=True) if mark & _AT_STEP]
        self.late = late if len(late) < len(marks) else []
        return bool(self.late)


def refuse_different_steps(
    label: str,
    states: Iterable[ParameterState],
    groups: Iterable[Mapping[str, Any]],
    late: list[int],
    advice: Advice,
    *,
    team: int,
    as_dense: bool,
) -> None:
    """Compares gradients and options over all ranks, after a reduction that some ranks have joined late.

    Args:
        label: What the name of the operation begins with.
        states: Have the gradients.
        groups: The parameter groups of the optimizer.
        late: The late ranks, for the message.
        advice: For it, too.
        team: The ranks that take part.
        as_dense: Gradients are averaged as dense ones: one may be sparse on ranks that have used its parameter only.

    Raises:
        UsageError: Ranks would do different steps.
    """
    values = {
        f"the gradient of {state.name!r}": checksum(_dense(state) if as_dense else state.parameter.grad)
        for state in states
    }
    different = Comparison(f"{label}.check", "step", values | options_of(groups), team).finish()
    if different:
        verb = "is" if different[0].startswith("the gradient") else "are"
        raise UsageError(
            f"{_ranks(late)} took part in the reduction from optimizer.step(), without a backward() before it, when "
            f"other ranks had their gradients already; now {different[0]} {verb} not equal on all ranks, as after "
            f"clipping: {advice.early}"
        )


def _dense(state: ParameterState) -> Any:
    grad = state.parameter.grad
    return grad if grad is None or grad.layout is torch.strided else grad.to_dense()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(str(rank) for rank in ranks)}"
