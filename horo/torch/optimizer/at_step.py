"""Horovod's order of calls: gradients are in flight from backward until ``synchronize()`` or ``step()``."""

from __future__ import annotations

import warnings

import torch

from horo.errors import UsageError
from horo.torch.engine import runtime
from horo.torch.optimizer.gradient_reducer import GradientReducer
from horo.torch.optimizer.membership import HOOK_LOCK
from horo.torch.optimizer.parameter_state import ParameterState, refuse_sparse
from horo.torch.optimizer.shared_gradients import note_version
from horo.torch.optimizer.step_hooks import scaler_has_looked

__all__ = ["StepReducer"]

_HOROVODS_WARNING = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
"""Horovod's words, which scripts filter and logs are searched for."""


class StepReducer(GradientReducer):
    """Gradients are due at ``synchronize()`` or ``step()``; to touch them before is an error."""

    leaves_unused = False  # as Horovod
    advice = (
        "call optimizer.synchronize() before you clip, unscale or replace gradients, then optimizer.step() inside "
        "optimizer.skip_synchronize()"
    )

    def synchronize(self) -> None:
        """Reduces every gradient that is not yet in progress and waits for all: then all ranks have equal ``p.grad``.

        Raises:
            MismatchError: Ranks sent different things for one parameter; the others are reduced.
            UsageError: A gradient was changed while it was being reduced.
            GroupError: A rank is lost or horo was shut down.
        """
        self.membership.newer.refuse(self.membership, "optimizer.synchronize()")
        self.membership.follow_runtime()
        self._reduce()

    def gradient_ready(self, state: ParameterState) -> bool:
        """Called by autograd; the last expected backward pass submits the gradient.

        Raises:
            AssertionError: One backward pass too many.
            NotInitializedError: There is no job.
        """
        self.membership.follow_runtime()
        if state.pending or state.is_held or (state.passes >= self.options.passes and not self._paused):
            raise AssertionError(
                f"the gradient of {state.name!r} was computed more often than backward_passes_per_step="
                f"{self.options.passes} before optimizer.step(); raise backward_passes_per_step to accumulate locally, "
                "or run the passes before the last, and those for another optimizer, inside optimizer.no_sync()"
            )
        self.is_reduced, self.is_local = False, True
        if self._paused:
            return False
        runtime.current()  # raises before the pass is counted
        state.passes += 1
        if state.passes < self.options.passes:
            return False
        parameter = state.parameter
        if not self.handles:
            with HOOK_LOCK:
                self.membership.keep_step_hooks()
                # the number of torch's threads may have changed since the last step
                self._overlaps = self._may_overlap(parameter)
        if not self._overlaps:
            self._hold(state)
        elif state.group is None:
            if not self._submit_early(state):
                self._hold(state)
        elif not self._completes(state.group, state, self.options.passes):
            if parameter.grad is not None:
                note_version(parameter.grad)  # its group may stay incomplete, and others be held already
        elif not self._submit_early(state):
            for member in state.group.states:
                if member.parameter.requires_grad:  # a frozen one has no gradient to wait for
                    self._hold(member)
        return False

    def _hold(self, state: ParameterState) -> None:
        """Notes that a gradient is there and waits for ``synchronize``."""
        grad = state.parameter.grad
        if state.group is not None and grad is not None:
            refuse_sparse(state, grad, self.options)
        state.hold(grad, 0 if grad is None else note_version(grad))
        self.handles[state.parameter] = None

    def refuse_while_pending(self, what: str) -> None:
        """Raises if a call would remove gradients that the core still uses.

        Raises:
            AssertionError: A reduction is in progress.
        """
        self.membership.follow_runtime(forget=True)
        if self.handles:
            raise AssertionError(
                f"{what} was called after backward() but before optimizer.step() or optimizer.synchronize(), "
                "while gradients are being reduced; call one of them first. If this backward() was for another "
                "optimizer, as the generator's is in a GAN, run it inside no_sync() of this one; "
                "gradients_ready='backward' needs neither"
            )
        self._reset_counts()
        self.is_reduced = self.is_local = False

    def reduce_for_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step without a closure.

        Raises:
            UsageError: A gradient scaler has looked at gradients that are not reduced.
        """
        if not self.is_reduced and scaler_has_looked(optimizer):
            raise UsageError(
                "a gradient scaler looked at gradients before they were reduced; call optimizer.synchronize() after "
                "backward(), and scaler.step(optimizer) inside optimizer.skip_synchronize()"
            )
        if self.is_reduced:
            warnings.warn(_HOROVODS_WARNING, stacklevel=4)
        else:
            self._reduce(is_at_step=True)

    def _reduce(self, is_at_step: bool = False) -> None:
        # In this order of calls every rank reduces at step(); only one that had no backward differs from the others.
        super()._reduce(is_at_step and not self.is_local)
