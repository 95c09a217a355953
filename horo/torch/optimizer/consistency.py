"""The comparisons over all ranks that one optimizer makes beside the reductions of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from horo.errors import HoroError
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.request import Request
from horo.torch.optimizer.first_checks import FirstCheck, compares_first
from horo.torch.optimizer.first_gradients import FirstGradients, warn_of_equal
from horo.torch.optimizer.membership import Member
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.phase import StepProgress
from horo.torch.optimizer.step_inputs import InputsCheck, StepInputs, scaler_of_step
from horo.torch.optimizer.unused_parameters import UsageCheck

__all__ = ["Consistency", "check_first"]

_FIRST_COMPARED = 8
"""The first step whose inputs are compared."""


class _Running(NamedTuple):
    """The comparisons beside the reduction in progress."""

    first: FirstCheck | None = None
    usage: UsageCheck | None = None
    inputs: InputsCheck | None = None
    samples: Request | None = None


class Consistency:
    """Parameters and samples in the first steps, the use of parameters, the inputs of steps."""

    def __init__(self) -> None:
        self._running = _Running()
        self._scaler: weakref.ref[Any] | None = None
        """The GradScaler that has called ``step``."""
        self.first_gradients: FirstGradients | None = None
        """The gradients of the first steps in this job; None after them, and where they are not compared."""

    def begin_job(self) -> None:
        """Called at the beginning of a job, and when all ranks have joined."""
        self.first_gradients = FirstGradients() if _runtime.find() is not None and compares_first() else None

    def forget(self) -> None:
        """Drops the comparisons in progress: nobody waits for them."""
        self._running = _Running()

    def begin(self, member: Member, due: Sequence[ParameterState]) -> Request | None:
        """Begins what is to be compared beside a reduction, behind its gradients; returns the last request.

        Args:
            member: The reducer of the optimizer.
            due: The parameters of the reduction.
        """
        varying = [state for state in due if state.varies]
        inputs, member.progress.inputs = member.progress.inputs, None
        running = self._running = _Running(
            check_first(member, scaler=self._scaler and self._scaler()) if due and member.size > 1 else None,
            UsageCheck(member.label, member.team, varying) if varying else None,
            None
            if inputs is None or member.size == 1
            else InputsCheck(member.label, inputs, member.options.process_set),
            self._compare_samples(member),
        )
        member.note_checked()
        requests = [check.request for check in running[:3] if check is not None]
        return running.samples or (requests[-1] if requests else None)

    def finish(self, member: Member, gradients: Iterator[Request]) -> Iterator[Request]:
        """Waits for gradients and for what is compared beside them; then raises the first failure.

        Args:
            member: The reducer of the optimizer.
            gradients: Waits for them when it is iterated over.

        Yields:
            Each request before it waits for it.

        Raises:
            UsageError: Ranks train different parameters. Gradients that only some have would never come.
        """
        running, self._running = self._running, _Running()
        if running.first is not None:
            yield running.first.request
            running.first.wait()
        failure: HoroError | None = None
        try:
            yield from gradients
        except HoroError as error:
            failure = error
        if running.usage is not None:
            yield running.usage.request
            running.usage.finish()
        if running.samples is not None:
            yield running.samples
            runtime = _runtime.current()
            warn_of_equal(running.samples.wait()[0], runtime.teams.find(member.team).ranks, runtime.job.rank)
        try:  # also after a failure, which only this rank may have
            if running.inputs is not None:
                yield running.inputs.request
                running.inputs.finish()
            if running.first is not None:
                running.first.refuse_different_values()
        except HoroError as error:
            failure = failure or error
        if failure is not None:
            raise failure

    def look_at_step(self, progress: StepProgress, optimizer: torch.optim.Optimizer) -> None:
        """Finds the GradScaler that calls the step in progress, and has the next reduction compare what it steps by.

        Not in the first steps, so that short measurements of a step are not of this.
        """
        scaler = scaler_of_step()
        self._scaler = None if scaler is None else weakref.ref(scaler)
        if progress.steps >= _FIRST_COMPARED:
            progress.inputs = StepInputs(scaler, optimizer)

    def _compare_samples(self, member: Member) -> Request | None:
        """Begins to compare the gradients of the first steps when all of them are there."""
        first = self.first_gradients
        if first is None or member.size == 1:
            return None
        first.end_step()
        if not first.is_done:
            return None
        self.first_gradients = None
        return first.compare(member.label, member.team)


def check_first(member: Member, *, has_own_state: bool = False, scaler: Any = None) -> FirstCheck | None:
    """Begins to compare the parameters that have not been compared in this job; None: there are none.

    Args:
        member: Has them.
        has_own_state: As for ``FirstCheck``.
        scaler: The GradScaler that has called the optimizer's ``step`` before.
    """
    optimizer = member.optimizer()
    if not member.has_unchecked or optimizer is None or not compares_first():
        return None
    return FirstCheck(
        member.label,
        member.unchecked(),
        optimizer,
        member.options.process_set,
        has_own_state=has_own_state,
        is_after_join=member.has_joined,
        scaler=StepInputs(scaler),
    )
