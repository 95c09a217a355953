"""Gradients are reduced when ``backward()`` returns: code that clips, unscales or accumulates them needs no change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from horo.errors import UsageError
from horo.torch import _runtime
from horo.torch._backward import call_at_end, current_run, is_nested
from horo.torch._compile import is_autograd_compiled
from horo.torch._gradients import ParameterState, ReductionOptions
from horo.torch._reducer import GradientReducer, overlap_pays
from horo.torch._request import Request
from horo.torch._step import scaler_has_looked
from horo.torch.ops import Sum

__all__ = ["BackwardReducer"]


class BackwardReducer(GradientReducer):
    """Gradients are due at the end of each backward, or of each ``backward_passes_per_step``-th one.

    A backward that follows before the step accumulates into averaged gradients, which are then averaged again. That is
    right: the mean of ``mean(g1) + g2`` over the ranks is ``mean(g1) + mean(g2)``. A sum over ranks is divided by their
    number before autograd adds to it, so that the next sum has it once.
    """

    leaves_unused = True
    advice = "register hooks that change gradients before DistributedOptimizer, or set HORO_OVERLAP=never"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: ReductionOptions,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self._accumulators: dict[torch.Tensor, tuple[torch.dtype, Any]] = {}
        """By parameter, autograd's node that has a hook, and for which dtype it was made. A node goes with its hooks
        when nobody refers to it, and a parameter that gets another dtype gets another node."""
        super().__init__(optimizer, options, names, groups)
        self._run = -1
        """Autograd's number of the run that called a hook last; -1 outside backward."""
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
        self.newer.refuse(self, "optimizer.synchronize()")
        self.follow_runtime()
        if not self.is_reduced or self._first_run is not None:
            self._reduce()

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Called by autograd.

        Raises:
            UsageError: An exception has ended the backward before, or the gradient is being reduced.
        """
        self.is_reduced, self.is_local = False, True
        if self._paused:
            return
        run = current_run()
        if run != self._run:
            self._enter(run, parameter)
        state = self.states[parameter]
        if state.summed is not None:
            _refuse_added(state)
        if state.pending is not None:
            raise UsageError(
                f"the gradient of {state.name!r} was computed again while it was being reduced: the parameter is used "
                "inside and outside a checkpoint with use_reentrant=True; use use_reentrant=False or HORO_OVERLAP=never"
            )
        if not self._overlaps:
            return
        state.passes = 1
        if state.group is None or self._completes(state.group, state, 1):
            with torch.no_grad():
                self._submit(state)

    def end_pass(self) -> bool:
        """Called at the end of the outermost backward; whether gradients are due."""
        self._run, self._first_run = -1, None
        self._passes += 1
        return self._passes >= self.options.passes

    def submit_all(self) -> Request | None:
        """As in the base class."""
        if self.options.op == Sum and self.size > 1:
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
                state.summed = None if grad is None else (weakref.ref(grad), self.size)

    def refuse_while_pending(self, what: str) -> None:
        """Called before gradients are cleared.

        Raises:
            UsageError: A backward is in progress, or has not come to its end.
        """
        self.follow_runtime(forget=True)
        _refuse_in_backward(what)
        self._refuse_unfinished(what)
        self._reset_counts()
        self.is_reduced = self.is_local = False
        for state in self.states.values():
            state.summed = None
        if len(self.hooked) < len(self.states):
            self.adopt()  # a parameter that was thawed needs its hook before the next backward

    def drain(self) -> None:
        """As in the base class. Between backward passes nothing is in progress; averaged gradients stay averaged."""
        self.follow_runtime(forget=True)
        if self._first_run is not None:
            super().drain()

    def reduce_for_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step without a closure.

        Raises:
            UsageError: A backward is in progress or has not come to its end, or a gradient scaler has looked at
                gradients that are not reduced.
        """
        _refuse_in_backward("optimizer.step()")
        self._refuse_unfinished("optimizer.step()")
        if self.is_reduced:
            return
        if scaler_has_looked(optimizer):
            raise UsageError(
                "a gradient scaler looked at gradients that backward() has not reduced, since it ran inside no_sync() "
                "or less often than backward_passes_per_step; call optimizer.synchronize() before "
                "scaler.step(optimizer)"
            )
        self._reduce(is_at_step=True)

    def reset(self) -> None:
        """As in the base class."""
        super().reset()
        self._run, self._first_run = -1, None

    def _reset_counts(self) -> None:
        super()._reset_counts()
        self._passes = 0

    def _enter(self, run: int, parameter: torch.Tensor) -> None:
        """Called for the first hook of a run, and again when a nested run has ended.

        Raises:
            NotInitializedError: There is no job.
            UsageError: Compiled autograd runs the backward, which has no call at its end.
        """
        if is_autograd_compiled():
            raise UsageError(
                "torch's compiled autograd runs this backward(), and it does not tell when a backward ends; use "
                "DistributedOptimizer(..., gradients_ready='step') or HORO_GRADIENTS_READY=step, and call "
                "optimizer.synchronize() before gradients are clipped, or leave compiled autograd out"
            )
        _runtime.current()  # raises before a backward is noted as in progress
        self.follow_runtime()
        self.keep_step_hooks()
        self.progress.begin()
        self.begin_step()
        nested = is_nested()
        if self._first_run is not None and run > self._first_run and not nested:
            self._refuse_unfinished("backward()")
        if self._first_run is None or run < self._first_run:
            self._first_run = run
        self._run = run
        # A gradient that a nested run has made may be added to by the next one.
        overlaps = self._passes + 1 >= self.options.passes and not nested and overlap_pays(parameter)
        self._overlaps = overlaps and self.may_submit()
        call_at_end(self)

    def _refuse_unfinished(self, what: str) -> None:
        if self._first_run is None:
            return
        raise UsageError(
            f"{what}: the backward() before did not come to its end, and other ranks may wait for its gradients; "
            "let the exception that ended it end this rank, or call optimizer.synchronize() first to take part "
            "with the gradients as they are"
        )

    def _hook(self, parameter: Any) -> None:
        super()._hook(parameter)
        if self.options.op == Sum:
            self._watch_accumulation(parameter)

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


def _refuse_in_backward(what: str) -> None:
    """Refuses a call of the optimizer that a hook of autograd makes, when gradients are not averaged.

    Raises:
        UsageError: A backward is in progress.
    """
    if current_run() >= 0:
        raise UsageError(
            f"{what} was called inside backward(), by a hook; gradients are averaged when backward() returns, so call "
            "it after that, or use DistributedOptimizer(..., gradients_ready='step')"
        )


def _divide_sum(state: ParameterState) -> None:
    """Makes a sum over the ranks this rank's share of it, unless the gradient is another one by now."""
    summed, state.summed = state.summed, None
    if summed is None:
        return
    reference, ranks = summed
    if (grad := reference()) is not None and grad is state.parameter.grad:
        with torch.no_grad():
            grad.mul_(1 / ranks)


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
