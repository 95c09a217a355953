"""Finds the parameters that no rank has used in a step, among those in which ranks have differed before."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import start_allreduce
from horo.torch.ops.allreduce import Max
from horo.torch.optimizer.parameter_state import ParameterState

__all__ = ["UsageCheck"]


class UsageCheck:
    """Tells the ranks of each other's use of parameters, in one small allreduce beside that of the gradients.

    Args:
        label: What the name of the operation begins with.
        team: The ranks that take part.
        states: The same ones on all of them. Their gradients are being reduced, as zeros where this rank has none.
    """

    def __init__(self, label: str, team: int, states: Iterable[ParameterState]) -> None:
        self._states = sorted(states, key=lambda state: state.name)  # ranks may have other orders
        used = torch.tensor([not state.was_unused for state in self._states], dtype=torch.uint8, device="cpu")
        self.request = start_allreduce([used], Operation(f"{label}.check", "usage", Max, team=team), sync=True)

    def finish(self) -> None:
        """Waits, and takes the zeros away where no rank has used the parameter."""
        (used,) = self.request.wait()
        for state, is_used in zip(self._states, used.tolist(), strict=True):
            if not is_used:
                state.parameter.grad = None
