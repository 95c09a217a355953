"""Reduces the gradients of one optimizer, while backward still runs or right after it.

Steps for a gradient: autograd accumulates it and calls our hook on the parameter. If no more is expected for it, the
hook holds it until there is a bucket of them, and submits that to the core (in place where memory allows). When all
gradients are due, the rest and those without a hook call (of unused or thawed parameters) are submitted too, as unused
or as they are. Then all are waited for, and the results are in ``p.grad``. A subclass decides what is expected, and
when gradients are due.

If one host runs the whole job and every core computes, an exchange during backward gains nothing: it takes the cores
away, and each exchange has two switches of threads and a wait for the slower rank. There hooks submit nothing; all
gradients are submitted together when they are due, and the calling thread does the exchange itself.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from horo.bootstrap.tuned_values import overlap_pays
from horo.core.calls import is_shared
from horo.errors import UsageError
from horo.torch.engine import runtime
from horo.torch.engine.operation import Operation
from horo.torch.engine.request import Request
from horo.torch.engine.submit import run_allreduce
from horo.torch.ops.allreduce import Average
from horo.torch.optimizer.backward_hooks import ReadyGradients
from horo.torch.optimizer.consistency import refuse_ddp
from horo.torch.optimizer.finite import FiniteCheck
from horo.torch.optimizer.membership import HOOK_LOCK, Membership
from horo.torch.optimizer.parameter_state import Group, ParameterState
from horo.torch.optimizer.phase import refuse_different_steps
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS, is_counted_twice
from horo.torch.optimizer.step_hooks import closure_of, is_inside_step, with_closure
from horo.torch.optimizer.submission import GradientSubmitter
from horo.torch.optimizer.together import reduce_together, wait_last

__all__ = ["GradientReducer"]


class GradientReducer(abc.ABC):
    """Owns the hooks on an optimizer's parameters and the reductions in progress.

    Only the optimizer refers to its reducer, and the hooks refer to it weakly: when the optimizer goes, so do they.
    """

    advice: ClassVar[str]
    """The advice in the error about a gradient that was changed while it was being reduced."""
    leaves_unused: ClassVar[bool]
    """Whether the gradient of a parameter that no rank has used stays None; else it becomes zeros."""
    undo_step: Callable[[], None] | None = None

    def __init__(self, membership: Membership, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self.membership = membership
        self.submitter = GradientSubmitter(membership, leaves_unused=self.leaves_unused)
        self.options = membership.options
        self.options.advice = self.advice
        self.states = membership.states
        self.handles = self.submitter.handles
        self.is_reduced = False
        """Whether the gradients of all parameters are averaged, and no step or local backward has followed."""
        self.ready = ReadyGradients(self, membership.newer)
        self._hooks: list[RemovableHandle] = []
        self._paused = False
        self._skip = False
        self.is_local = False
        """Whether a backward has made gradients that are not averaged."""
        self._overlaps = True
        self._due: Sequence[ParameterState] = ()
        """The parameters of the reduction in progress."""
        weakref.finalize(self, _remove, self._hooks).atexit = False
        membership.follower = weakref.ref(self)
        membership.adopt()
        self._groups = [self._make_group(index, members) for index, members in enumerate(groups)]

    # -- called by the user ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Makes sure that gradients are reduced: all ranks have equal ``p.grad`` then."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` takes gradients as they are: for use after ``synchronize()``.

        Gradients that are not averaged are an error there, unless ``no_sync()`` is around it as well.
        """
        self._skip, before = True, self._skip
        try:
            yield
        finally:
            self._skip = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates locally; the next backward outside, or ``step()``, reduces the sum."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes after how many backward passes gradients are reduced, from the next pass on.

        Raises:
            UsageError: ``passes`` is not positive.
        """
        self.membership.set_backward_passes_per_step(passes)
        self._reset_counts()

    def drain(self) -> None:
        """Finishes all reductions that are in progress or held, and starts no others."""
        self.membership.follow_runtime(forget=True)
        states = list(self.states.values())
        try:
            if self.handles:
                self.membership.name_gradients()
            with torch.no_grad():
                wait_last(self.submitter.submit_rest([state for state in states if state.is_held]))
                for _ in self.submitter.finish(states):
                    pass
        finally:
            self.reset()
            self.is_reduced = False

    # -- the reduction of all gradients ----------------------------------------------------------------------------

    def _reduce(self, is_at_step: bool = False) -> None:
        """Reduces every gradient that is not yet in progress and waits for all.

        A parameter without a gradient takes part too, because other ranks may have used it.

        Args:
            is_at_step: ``step()`` calls, so this rank has had no time to change the result before.

        Raises:
            MismatchError: Ranks sent different things for one parameter; the others are reduced.
            UsageError: A gradient was changed while it was being reduced.
            GroupError: A rank is lost or horo was shut down.
        """
        self.submitter.progress.is_at_step = is_at_step
        try:
            reduce_together([self])
        finally:
            self.submitter.progress.is_at_step = False

    def submit_all(self) -> Request | None:
        """Submits all gradients that are not in progress; returns the last request. Autograd is off."""
        membership, submitter = self.membership, self.submitter
        membership.settle_join()
        membership.follow_runtime()
        progress = submitter.progress
        progress.begin()
        membership.begin_step()
        self._due = self._active()
        if self._due != progress.trained:
            progress.trained = [state for state in self._due if state.parameter.requires_grad]
        membership.name_gradients()
        if membership.has_unchecked:
            refuse_ddp(self._due)
        last = submitter.submit_rest(self._due)
        last = submitter.checks.begin(membership, self._due) or last
        progress.reductions += 1
        return last

    def finish_all(self) -> Iterator[Request]:
        """Waits for all gradients; then raises the first failure. Autograd is off.

        Yields:
            Each request before it waits for it.

        Raises:
            UsageError: Ranks train different parameters. Gradients that only some have would never come.
        """
        yield from self.submitter.checks.finish(self.membership, self.submitter.finish(self._due))

    def check_finite(self) -> FiniteCheck:
        """Begins to look for gradients that are not finite, before any is submitted."""
        membership = self.membership
        membership.settle_join()
        membership.follow_runtime()
        return FiniteCheck(membership.label, membership.team, self._active(), membership.steps + 1)

    def begin_job(self) -> None:
        """Called at the beginning of a job, and when all ranks have joined."""
        self.submitter.begin_job()

    def leave_job(self) -> None:
        """Called when the job has ended: nothing is in progress, and gradients count as those of this rank."""
        self.reset()
        self.is_reduced = False

    def forget(self) -> None:
        """Called when gradients were removed: the next backward is the first of a step."""
        self.reset()
        self.is_reduced = self.is_local = False
        for state in self.states.values():
            state.summed = None

    def reset(self) -> None:
        """Begins anew: nothing is in progress."""
        self._reset_counts()
        self.submitter.reset()
        self.ready.clear()
        self._due = ()

    # -- differs with the time at which gradients are due ----------------------------------------------------------

    @abc.abstractmethod
    def gradient_ready(self, state: ParameterState) -> bool:
        """Called by autograd when it has accumulated into a gradient; whether that is to be held in ``ready``."""

    @abc.abstractmethod
    def refuse_while_pending(self, what: str) -> None:
        """Raises if a call would remove gradients that the core still uses."""

    @abc.abstractmethod
    def reduce_for_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step without a closure: reduces the gradients that are not reduced."""

    @property
    def steps_alone(self) -> bool:
        """Whether ``step()`` is one of this rank alone, by gradients that are not averaged."""
        return self._skip and self._paused

    # -- around step() ---------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch step pre-hook: gradients are reduced before the step, or after each evaluation of its closure.

        Raises:
            UsageError: Inside ``skip_synchronize()`` gradients are not averaged, or an optimizer that was made later
                averages some of them.
        """
        if self.steps_alone:
            return None
        self.membership.newer.refuse(self.membership, "optimizer.step()")
        self.membership.follow_runtime()
        closure = closure_of(args, kwargs)
        if is_inside_step(optimizer) and not (closure is None and self.is_local):
            return None  # gradients are reduced, but for those that the step itself has computed
        if closure is None:
            if self._skip:
                self.refuse_local()
            else:
                self.reduce_for_step(optimizer)
            self._refuse_different_steps()
            self.submitter.checks.look_at_step(optimizer, self.membership.steps + 1)
            return None
        return with_closure(args, kwargs, ReducingClosure(closure, self))

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook.

        Raises:
            UsageError: The step has computed gradients itself, which are not averaged.
        """
        if is_inside_step(optimizer):
            return
        self.is_reduced = False
        if self.steps_alone:  # it is a step of this rank alone
            return
        self.submitter.progress.reductions = 0
        self.membership.end_step()
        if self.is_local:
            self.drain()
            self.is_local = False
            raise UsageError(
                f"{type(optimizer).__name__}.step() has called backward() and used gradients of this rank alone, so "
                "ranks have parted: let it compute gradients in a closure, or use gradients_ready='backward'"
            )

    def end_closure(self) -> None:
        """Called after the closure of a step."""
        if self._skip:
            self.refuse_local()
        elif not self.is_reduced:
            self._reduce(is_at_step=True)
        self._refuse_different_steps()

    def _refuse_different_steps(self) -> None:
        """Compares gradients, if ranks were not at the same place when they were reduced.

        Raises:
            UsageError: They are not equal any more.
        """
        membership, progress = self.membership, self.submitter.progress
        optimizer = membership.optimizer()
        if progress.late and optimizer is not None:
            late, progress.late = progress.late, []
            refuse_different_steps(
                membership.label,
                self._active(),
                optimizer.param_groups,
                late,
                membership.advice,
                team=membership.team,
                as_dense=self.options.sparse_as_dense,
            )

    def refuse_local(self) -> None:
        """Refuses gradients that are not averaged.

        Raises:
            UsageError: There are some.
        """
        if self.is_local:
            raise UsageError(
                "optimizer.step() inside skip_synchronize(), but gradients are not averaged: ranks would part; call "
                "optimizer.synchronize() first, or leave skip_synchronize() out (for a step on the gradients of this "
                "rank alone, put backward() and step() inside no_sync() too)"
            )

    # -- parameters ------------------------------------------------------------------------------------------------

    def copy_for(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> GradientReducer:
        """A reducer of the same kind, with the same options, for a copy of the optimizer.

        Args:
            optimizer: The copy.
            twins: The parameters of the copy by those of this one's.
        """
        groups = [[twins[state.parameter] for state in group.states] for group in self._groups]
        return type(self)(self.membership.copy_for(optimizer, twins), groups)

    def hook(self, state: ParameterState) -> None:
        """Called once for each parameter that is found to require grad."""
        state.bind(self.ready)
        self._hooks.append(state.parameter.register_post_accumulate_grad_hook(state.hook))

    def submit_ready(self) -> None:
        """Submits the gradients that are held in ``ready``."""
        if self.ready.states:
            with HOOK_LOCK:
                self.submitter.submit_each(self.ready.take())

    def _active(self) -> list[ParameterState]:
        """The parameters that take part in this step, in an order that all ranks share.

        One that was frozen since the last reduction takes part once more, with what it has accumulated until then.
        """
        adopted = self.membership.adopt()
        active = [state for state in adopted if state.parameter.requires_grad or state.pending or state.is_held]
        before = self.submitter.progress.trained
        if active == before or not self.leaves_unused:
            return active
        frozen = {state for state in before if not state.parameter.requires_grad}
        frozen.update(active)
        return [state for state in self.states.values() if state in frozen]

    def _make_group(self, index: int, members: Sequence[torch.Tensor]) -> Group:
        states = [self.states[parameter] for parameter in self.states if any(parameter is member for member in members)]
        group = Group(f"group{index}.{states[0].name}", states)
        for state in states:
            state.group = group
            if state.parameter.requires_grad:
                group.waiting.add(state)
        return group

    # -- expected before the next reduction ------------------------------------------------------------------------

    def _completes(self, group: Group, state: ParameterState, passes: int) -> bool:
        """Whether the gradient of ``state`` was the last missing one of its group, with ``passes`` of each expected."""
        with HOOK_LOCK:
            group.waiting.discard(state)
            # A member thawed since the last step is not in `waiting`, but autograd may still write to it.
            return not group.waiting and all(
                member.passes >= passes for member in group.states if member.parameter.requires_grad
            )

    def _may_overlap(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of this device are reduced while backward still runs. Ranks may decide differently."""
        job = runtime.current().job
        threads = job.size * torch.get_num_threads() if parameter.is_cpu else 0
        return overlap_pays(job.overlap_now(), len(job.hosts), threads, job.cores) and self.membership.may_submit()

    def _submit_early(self, state: ParameterState) -> bool:
        """Submits a gradient, or those of its group, while backward runs.

        Returns:
            False, and nothing is submitted, if autograd may have other gradients in that memory that it will look at.
        """
        members = [state] if state.group is None else state.group.states
        shared = [self._may_share(member) for member in members]
        if any(shared):
            return False
        with torch.no_grad():
            self.submitter.submit(state)
        return True

    def _may_share(self, state: ParameterState) -> bool:
        """Whether other tensors may have the memory of a gradient. Called by a hook."""
        grad = state.parameter.grad
        if COUNTS_IN_HOOKS:
            state.shares = grad is not None and is_shared(grad)
            return state.shares
        # what the last reduction has found, or this backward has made
        return state.shares or not self.membership.checked or (grad is not None and is_counted_twice(grad))

    def _reset_counts(self) -> None:
        for state in self.states.values():
            state.passes = 0
        for group in self._groups:
            group.waiting = {state for state in group.states if state.parameter.requires_grad}


class ReducingClosure:
    """Reduces gradients after each evaluation and returns the mean loss, so that all ranks do the same step.

    An optimizer such as LBFGS chooses its next step by the loss. With a different loss on each rank, the models would
    differ.
    """

    def __init__(self, closure: Callable[[], Any], reducer: GradientReducer) -> None:
        self._closure = closure
        self._reducer = reducer

    def __call__(self) -> Any:
        self._reducer.is_reduced = False  # unless the closure calls synchronize()
        loss = self._closure()
        self._reducer.end_closure()
        membership = self._reducer.membership
        if membership.size == 1:
            return loss
        spec = Operation("closure", f"{membership.label}.loss", Average, team=membership.team)
        if isinstance(loss, torch.Tensor) and loss.is_floating_point():
            return run_allreduce([loss.detach()], spec)[0]
        if isinstance(loss, float):
            return run_allreduce([torch.tensor([loss], dtype=torch.float64, device="cpu")], spec)[0].item()
        return loss


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
