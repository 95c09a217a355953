"""Gradients are reduced when ``backward()`` returns: code that clips, unscales or accumulates them needs no change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horo.errors import UnsupportedError, UsageError
from horo.torch.compat.torch_private import is_autograd_compiled, tells_end_of_backward
from horo.torch.engine import runtime
from horo.torch.engine.request import Request
from horo.torch.ops.allreduce import Sum
from horo.torch.optimizer.advice import Advice
from horo.torch.optimizer.backward_hooks import call_at_end, find_caller, runs_elsewhere
from horo.torch.optimizer.gradient_reducer import GradientReducer
from horo.torch.optimizer.membership import HOOK_LOCK, Membership
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS, current_run, writable
from horo.torch.optimizer.step_hooks import scaler_has_looked
from horo.torch.optimizer.together import reduce_together

__all__ = ["BackwardReducer"]


class BackwardReducer(GradientReducer):
    """Gradients are due at the end of each backward, or of each ``backward_passes_per_step``-th one.

    A backward that follows before the step accumulates into averaged gradients, which are then averaged again. That is
    right: the mean of ``mean(g1) + g2`` over the ranks is ``mean(g1) + mean(g2)``. A sum over ranks is divided by their
    number before autograd adds to it, so that the next sum has it once.
    """

    leaves_unused = True
    advice = "register hooks that change gradients before DistributedOptimizer, or set HORO_OVERLAP=never"

    def __init__(self, membership: Membership, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        if not tells_end_of_backward():
            raise UnsupportedError(
                f"{membership.owner}: torch {torch.__version__} does not tell when a backward ends; "
                f"{membership.advice.no_end}"
            )
        self._accumulators: dict[torch.Tensor, tuple[torch.dtype, Any]] = {}
        """By parameter, autograd's node that has a hook, and for which dtype it was made. A node goes with its hooks
        when nobody refers to it, and a parameter that gets another dtype gets another node."""
        super().__init__(membership, groups)
        self._first_run: int | None = None
        """The lowest number of a run in progress; None outside backward."""
        self._passes = 0
        """The number of backward passes that have accumulated since the last reduction."""

    def synchronize(self) -> None:
        """Reduces gradients that no backward has reduced, as after ``no_sync()``; else there is nothing left to do.

        After a backward that an exception has ended, it takes part with the gradients as they are.

        Raises:
            MismatchError: Ranks sent different things for one parameter; the others are reduced.
            GroupError: A rank is lost or horo was shut down.
        """
        self.membership.newer.refuse(self.membership, "optimizer.synchronize()")
        self.membership.follow_runtime()
        if not self.is_reduced or self._first_run is not None:
            self._reduce()

    def gradient_ready(self, state: ParameterState) -> bool:
        """Called by autograd, for the first gradient of a run and for those that are not simply held.

        Raises:
            UsageError: The gradient is being reduced, for one after an exception has ended the backward before.
        """
        self.is_reduced, self.is_local = False, True
        if self._paused:
            return False
        run = current_run()
        if run != self.ready.run:
            with HOOK_LOCK:
                if run != self.ready.run:
                    self._enter(run, state)
        if state.summed is not None:
            _refuse_added(state)
        if state.is_held or state.pending is not None:
            raise UsageError(
                f"the gradient of {state.name!r} was computed again while it was being reduced: the parameter is used "
                "inside and outside a checkpoint with use_reentrant=True; use use_reentrant=False or HORO_OVERLAP=never"
            )
        if not self._overlaps:
            return False
        if state.group is None and COUNTS_IN_HOOKS:
            return True
        state.passes = 1
        if state.group is None or self._completes(state.group, state, 1):
            self._submit_early(state)
        return False

    def end_pass(self) -> bool:
        """Called at the end of the outermost backward; whether gradients are due."""
        self.ready.run, self._first_run = -1, None
        self._passes += 1
        return self._passes >= self.options.passes

    def submit_all(self) -> Request | None:
        """As in the base class."""
        if self.options.op == Sum and self.membership.size > 1:
            for state in self._active():
                if state.pending is None:
                    _divide_sum(state)
        return super().submit_all()

    def finish_all(self) -> Iterator[Request]:
        """As in the base class."""
        yield from super().finish_all()
        if self.options.op == Sum:
            for state in self._due:
                if state.parameter in self._accumulators:
                    self._watch_accumulation(state.parameter)
                grad = state.parameter.grad
                state.summed = None if grad is None else (weakref.ref(grad), self.membership.size)

    def refuse_while_pending(self, what: str) -> None:
        """Called before gradients are cleared.

        Raises:
            UsageError: A backward is in progress.
        """
        self.membership.follow_runtime(forget=True)
        _refuse_in_backward(what, self.membership.advice)
        self.submit_ready()
        for pending in {state.pending for state in self.states.values()} if self._first_run is not None else ():
            if pending is not None:
                pending.forget_changes()  # what comes of them is cleared
        self._end_broken()
        self._reset_counts()
        self.is_reduced = self.is_local = False
        for state in self.states.values():
            state.summed = None
        if len(self.membership.hooked) < len(self.states):
            self.membership.adopt()  # a parameter that was thawed needs its hook before the next backward

    def drain(self) -> None:
        """As in the base class. Between backward passes nothing is in progress; averaged gradients stay averaged."""
        self.membership.follow_runtime(forget=True)
        self._end_broken()

    def reduce_for_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step without a closure.

        Raises:
            UsageError: A backward is in progress or has not come to its end, or a gradient scaler has looked at
                gradients that are not reduced.
        """
        _refuse_in_backward("optimizer.step()", self.membership.advice)
        self._refuse_unfinished("optimizer.step()")
        if self.is_reduced:
            return
        if scaler_has_looked(optimizer):
            raise UsageError(
                "a gradient scaler looked at gradients that backward() has not reduced, since it ran inside no_sync() "
                f"or less often than backward_passes_per_step; {self.membership.advice.unreduced}"
            )
        self._reduce(is_at_step=True)

    def reset(self) -> None:
        """As in the base class."""
        super().reset()
        self._first_run = None

    def _reset_counts(self) -> None:
        super()._reset_counts()
        self._passes = 0

    def _enter(self, run: int, state: ParameterState) -> None:
        """Called for the first hook of a run, and again when a nested run has ended.

        Raises:
            NotInitializedError: There is no job.
            UsageError: Compiled autograd runs the backward, which has no call at its end; or another thread is in a
                backward for parameters of the same optimizer.
        """
        if is_autograd_compiled():
            raise UsageError(
                "torch's compiled autograd runs this backward(), and it does not tell when a backward ends; leave "
                f"compiled autograd out, or {self.membership.advice.no_end}"
            )
        nested, thread = find_caller()
        if thread is not None and runs_elsewhere(self, thread):
            raise UsageError(
                f"{self.membership.owner}: two threads call backward() at the same time, so their gradients are added "
                "up in the middle of the reduction; let one thread call it after the other, or give each a model and "
                "an optimizer of its own"
            )
        runtime.current()  # raises before a backward is noted as in progress
        self.membership.follow_runtime()
        self.membership.keep_step_hooks()
        self.submitter.progress.begin()
        self.membership.begin_step()
        if self._first_run is not None and run > self._first_run and not nested:
            self._go_on_after_broken(state)
        if self._first_run is None or run < self._first_run:
            self._first_run = run
        # A gradient that a nested run has made may be added to by the next one.
        is_last = self._passes + 1 >= self.options.passes
        self._overlaps = is_last and not nested and self._may_overlap(state.parameter)
        call_at_end(self, thread)
        self.ready.overlaps = self._overlaps and COUNTS_IN_HOOKS
        self.ready.run = run  # last: a hook in another thread goes on as soon as it sees that

    def _refuse_unfinished(self, what: str) -> None:
        if self._first_run is None:
            return
        raise UsageError(
            f"{what}: the backward() before did not come to its end, so gradients are not all there; "
            f"{self.membership.advice.broken}"
        )

    def _end_broken(self) -> None:
        """Takes part in the reduction of a backward that an exception has ended, if there is one, with what is there.

        So ranks stay in step. All ranks have to do that.

        Raises:
            UsageError: Other ranks have come to the end of their backward.
        """
        if self._first_run is None:
            return
        if self.membership.size == 1:
            self.reset()
            return
        cleared = self._bring_back()
        progress = self.submitter.progress
        progress.is_broken = True
        try:
            reduce_together([self])
        finally:
            progress.is_broken = self.is_reduced = False
            for state, grad in cleared:
                state.parameter.grad = grad

    def _bring_back(self) -> list[tuple[ParameterState, torch.Tensor | None]]:
        """Gives parameters the gradients again that are being reduced, where the script has cleared them.

        Returns:
            The parameters, with what they had instead.
        """
        cleared = []
        self.submit_ready()
        for state in self.states.values():
            sent = _sent_for(state)
            if state.pending is not None and state.parameter.grad is not sent:
                cleared.append((state, state.parameter.grad))
                state.parameter.grad = state.parameter.grad if sent is None else sent
        return cleared

    def _go_on_after_broken(self, state: ParameterState) -> None:
        """Called by the first hook of the backward after one that an exception has ended.

        Raises:
            UsageError: The gradient of ``state`` is still being reduced, and autograd has just added to it.
        """
        self.submit_ready()
        if self.membership.size > 1 and state.pending is not None and state.parameter.grad is _sent_for(state):
            self._refuse_unfinished("backward()")
        self._end_broken()
        self.is_local = True
        _divide_sum(state)  # autograd has accumulated into it already

    def hook(self, state: ParameterState) -> None:
        """As in the base class."""
        super().hook(state)
        if self.options.op == Sum:
            self._watch_accumulation(state.parameter)

    def _watch_accumulation(self, parameter: torch.Tensor) -> None:
        """Has the sum divided before autograd adds to it."""
        if parameter in self._accumulators and self._accumulators[parameter][0] is parameter.dtype:
            return
        if not parameter.requires_grad:
            return
        with torch.enable_grad():
            edge: Any = parameter.view_as(parameter).grad_fn
        node = edge.next_functions[0][0]
        self._accumulators[parameter] = parameter.dtype, node
        self._hooks.append(node.register_prehook(_divider_of(weakref.ref(self), parameter)))


def _refuse_in_backward(what: str, advice: Advice) -> None:
    """Refuses a call of the optimizer that a hook of autograd makes, when gradients are not averaged.

    Raises:
        UsageError: A backward is in progress.
    """
    if current_run() >= 0:
        raise UsageError(
            f"{what} was called inside backward(), by a hook; gradients are averaged when backward() returns: "
            f"{advice.in_hook}"
        )


def _sent_for(state: ParameterState) -> torch.Tensor | None:
    """The gradient that is being reduced, in its memory; None: there is none, or its rows are."""
    return None if state.pending is None else state.pending.sent_for(state)


def _divide_sum(state: ParameterState) -> None:
    """Makes a sum over the ranks this rank's share of it, unless the gradient is another one by now."""
    summed, state.summed = state.summed, None
    if summed is None:
        return
    reference, ranks = summed
    if (grad := reference()) is not None and grad is state.parameter.grad:
        with torch.no_grad():
            writable(grad).mul_(1 / ranks)


def _refuse_replaced(state: ParameterState) -> None:
    """Refuses to add to a gradient that may or may not be a sum over the ranks.

    Raises:
        UsageError: It was replaced since it was summed.
    """
    if state.summed is None:
        return
    grad = state.parameter.grad
    if grad is not None and grad is not state.summed[0]() and not _is_zero(grad):
        state.summed = None
        raise UsageError(
            f"op=Sum: the gradient of {state.name!r} was replaced after it was summed over the ranks, and this "
            "backward() would add to it; change gradients in place (p.grad.copy_(...)), or clear them first by "
            "optimizer.zero_grad()"
        )


def _is_zero(grad: torch.Tensor) -> bool:
    return not (grad.coalesce().values() if grad.layout is torch.sparse_coo else grad).any()


def _refuse_added(state: ParameterState) -> None:
    """Called after autograd has accumulated into a gradient that may be a sum over the ranks still.

    Raises:
        UsageError: It was, so autograd has added to a sum that was not divided.
    """
    summed, state.summed = state.summed, None
    if summed is not None and (grad := summed[0]()) is not None and grad is state.parameter.grad:
        raise UsageError(
            f"op=Sum: parameter {state.name!r} has got another dtype ({state.parameter.dtype}) since its gradient was "
            "summed over the ranks, and this backward() has added to that sum; call optimizer.zero_grad() after the "
            "dtype of a model changes"
        )


def _divider_of(reducer: weakref.ref[BackwardReducer], parameter: torch.Tensor) -> Callable[[Any], None]:
    def divide(_: Any) -> None:
        target = reducer()
        if target is not None:
            state = target.states[parameter]
            _refuse_replaced(state)
            _divide_sum(state)

    return divide
