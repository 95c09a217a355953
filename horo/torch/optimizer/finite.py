"""Looks for NaN and infinite values in gradients before they are reduced, where ``HORO_CHECK_NAN`` asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horo.errors import HoroError, UsageError
from horo.torch.compat.torch_private import sparse_values
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.request import Request
from horo.torch.engine.submit import start_allgather
from horo.torch.optimizer.parameter_state import ParameterState

__all__ = ["FiniteCheck", "checks_finite", "finish_checks"]

_FINITE = -1


def checks_finite() -> bool:
    """Whether the user has asked for it; equal on all ranks."""
    runtime = _runtime.find()
    return runtime is not None and bool(runtime.job.settings.get("check_nan", False))


class FiniteCheck:
    """Tells the ranks of each other's gradients that are not finite, before any of them is submitted.

    Args:
        label: What the name of the operation begins with.
        team: The ranks that take part.
        states: The parameters, in the order in which the model uses them.
        step: The number of the optimizer's step, from 1.
    """

    def __init__(self, label: str, team: int, states: Sequence[ParameterState], step: int) -> None:
        self._team = team
        self._names = sorted(state.name for state in states)  # ranks may have other orders
        bad = [state for state in states if state.parameter.grad is not None and not _is_finite(state.parameter.grad)]
        # Backward comes to the last one first: the others have the value from there.
        first = self._names.index(bad[-1].name) if bad else _FINITE
        self._own = torch.tensor([[first, len(bad), step]], device="cpu")
        self._request: Request | None = None
        if _runtime.current().teams.size_for(team) > 1:
            self._request = start_allgather([self._own], f"{label}.check", "finite", sync=True, team=team)

    def finish(self) -> None:
        """Waits for the others.

        Raises:
            UsageError: A rank has one; the same sentence on all ranks.
        """
        rows, ranks = self._own, [_runtime.current().job.rank]
        if self._request is not None:
            (gathered,) = self._request.wait()
            rows, ranks = gathered.tensor, gathered.present(_runtime.current().teams.find(self._team).ranks)
        for rank, (first, count, step) in zip(ranks, rows.tolist(), strict=True):
            if first != _FINITE:
                raise UsageError(
                    f"HORO_CHECK_NAN: the gradient of {self._names[first]!r} has a value that is NaN or infinite on "
                    f"rank {rank} in step {step} ({count} of {len(self._names)} gradients there have one); nothing "
                    "was averaged, so each rank still has its own gradients to look at"
                )


def finish_checks(checks: Sequence[FiniteCheck]) -> None:
    """Waits for all of them, so that the next ones begin when all are done.

    Raises:
        HoroError: That of the first check that has one.
    """
    failures: list[HoroError] = []
    for check in checks:
        try:
            check.finish()
        except HoroError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _is_finite(grad: torch.Tensor) -> bool:
    values = sparse_values(grad) if grad.layout is torch.sparse_coo else grad
    if values.element_size() == 1:
        values = values.float()  # torch does not calculate with float8
    return bool(values.isfinite().all())
