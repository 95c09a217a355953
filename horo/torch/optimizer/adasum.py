"""Adasum in an optimizer: each rank takes its own step, and the steps of all ranks are combined.

Before ``step()`` the parameters are copied. The optimizer steps by the gradients of this rank. Adasum combines the
change of each parameter with the changes on the other ranks, and the result is added to the copy. So momentum and the
like are each rank's own, and parameters are equal on all ranks after each step.

A step that raises leaves the parameters as they were before it, and it has not taken place: the next call of ``step()``
does it. If other ranks may have got its result already, since an exception of a signal handler has ended the wait
for it, that call ends the exchange in progress with that result. Momentum and the like keep their new values.
If parameters have other values by then, loaded from a checkpoint on all ranks, that result is dropped instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

import torch

from horo.errors import HoroError, ResourceError, UnsupportedError
from horo.torch.compat.profiler import span
from horo.torch.engine.operation import Operation
from horo.torch.engine.request import Request
from horo.torch.engine.submit import find_left, start_allreduce
from horo.torch.optimizer.consistency import check_first, refuse_ddp
from horo.torch.optimizer.finite import FiniteCheck, checks_finite
from horo.torch.optimizer.membership import Membership
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.step_hooks import is_inside_step, scaler_has_looked

__all__ = ["DeltaReducer"]


class DeltaReducer:
    """Combines the steps that ranks take, and hooks no parameter. It has no use for groups of gradients."""

    def __init__(self, membership: Membership, groups: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        self.membership = membership
        self.options = membership.options
        self.handles: dict[torch.Tensor, Any] = {}
        self._starts: dict[ParameterState, torch.Tensor] = {}
        """The parameters before the step in progress, or before one that has not come to its end."""
        self._sent: list[tuple[torch.Tensor, Any]] = []
        """The tensor that is exchanged for each of them, with the compressor's context; empty before the exchange."""
        self._requests: list[Request | HoroError] = []
        """The requests of the exchange, whose results replace the tensors sent, or the errors of refused ones."""
        self._failures: list[HoroError | None] = []
        """The error of each request that is done, None without one."""
        self._has_failed = False
        """Whether the exchange has failed on all ranks, else an exception that is this rank's alone has ended it."""
        self._is_undone = False
        """Whether a step has raised while it was exchanged, and parameters were put back where they were before it."""
        membership.follower = weakref.ref(self)
        membership.adopt()

    # -- called by the user ----------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Does nothing: gradients stay those of this rank, and ``step()`` combines the steps."""

    def skip_synchronize(self) -> NoReturn:
        """Is an error, as in Horovod.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that changes nothing: backward accumulates locally here, whether inside or not."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As ``Membership`` does; the number has no effect: each ``step()`` takes the gradients as they are."""
        self.membership.set_backward_passes_per_step(passes)

    # -- around step() ---------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step pre-hook: copies the parameters, after those of all ranks were compared once.

        Raises:
            UnsupportedError: A GradScaler calls the step.
            UsageError: Parameters are not equal on all ranks before the first step, or an optimizer that was made
                later has some of them.
        """
        if is_inside_step(optimizer):
            return
        membership = self.membership
        membership.newer.refuse(membership, "optimizer.step()")
        membership.settle_join()
        membership.follow_runtime()
        if membership.size == 1:
            return
        membership.begin_step()
        if scaler_has_looked(optimizer):
            raise UnsupportedError(
                "optimizer.step(): a GradScaler skips the steps of one rank alone, for which the others would wait "
                "with op=Adasum; use bfloat16, or op=Average"
            )
        if self._sent and not self._were_loaded():  # the step begins where the one before did, and ends as that one
            self._is_undone = False
            self._move_back()
        else:
            self._begin()

    def _were_loaded(self) -> bool:
        """Whether parameters have got other values since a step was undone."""
        return self._is_undone and not all(
            torch.allclose(state.parameter.detach(), start, rtol=0, atol=0, equal_nan=True)
            for state, start in self._starts.items()
        )

    def _begin(self) -> None:
        if not self._is_undone:
            self._move_back()
        self.drain()
        states = [state for state in self.membership.adopt() if _takes_part(state.parameter)]
        self._compare(states)
        if checks_finite():
            FiniteCheck(self.membership.label, self.membership.team, states, self.membership.steps + 1).finish()
        with torch.no_grad():
            self._starts = {state: state.parameter.detach().clone() for state in states}

    def _move_back(self) -> None:
        """Undoes the changes to the parameters of a step that has not come to its end."""
        with torch.no_grad():
            for state, start in self._starts.items():
                state.parameter.detach().copy_(start)

    def undo_step(self) -> None:
        """Called when a step has raised: parameters are where they were before it, and what changes them then stays."""
        self._move_back()
        self._is_undone = bool(self._sent)
        if not self._sent:
            self._starts = {}

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook: blocks until the steps of all ranks are combined.

        Raises:
            MismatchError: Ranks moved different parameters under one name; all stand where they were before the step.
            GroupError: A rank is lost or horo was shut down; likewise.
        """
        if not self._starts or is_inside_step(optimizer):  # the step of which this is a part goes on to move parameters
            return
        try:
            with torch.no_grad():
                for (state, start), moved in zip(self._starts.items(), self._combined(), strict=True):
                    state.parameter.detach().copy_(start + moved)
        except BaseException:
            self._move_back()
            self._is_undone = True
            if self._has_failed:
                self.drain()
            raise
        self.forget()
        self.membership.end_step()

    def _combined(self) -> list[torch.Tensor]:
        """The combined changes of the parameters on all ranks; goes on where an earlier call was interrupted."""
        compressor = self.options.compression
        if not self._sent:
            moved = (state.parameter.detach() - start for state, start in self._starts.items())
            # Contiguous, so that the results are there as soon as a request is done.
            self._sent = [(sent.contiguous(), context) for sent, context in map(compressor.compress, moved)]
        self._submit()
        with span("horo.synchronize"):
            self._finish()
        for failure in self._failures:
            if failure is not None:
                self._has_failed = True
                raise failure
        return [compressor.decompress(result, context) for result, context in self._sent]

    def _submit(self) -> None:
        """Submits the tensors that are left, also those behind a refused one, as the other ranks do."""
        team = self.membership.team
        for state, (sent, _) in list(zip(self._starts, self._sent, strict=True))[len(self._requests) :]:
            spec = Operation(
                state.kind or "", f"{state.name}.delta", self.options.op, wire=self.options.wire, team=team
            )
            try:
                self._requests.append(start_allreduce([sent], spec, in_place=True))
            except BaseException as error:
                left = find_left(sent)
                if left is not None:  # an exception of a signal handler came after the submission
                    self._requests += [] if left in self._requests else [left]
                    raise
                if not isinstance(error, HoroError) or not error._is_told:
                    raise  # a signal handler's, or a lack of this rank: the next step submits it
                self._requests.append(error)

    def _finish(self) -> None:
        """Waits for all requests. Each part may be done twice, since a signal handler may raise anywhere in it."""
        if len(self._failures) < len(self._requests) and isinstance(self._requests[-1], Request):
            self._requests[-1].failure()  # one wait instead of many
        while len(self._failures) < len(self._requests):
            request = self._requests[len(self._failures)]
            self._failures.append(request.failure() if isinstance(request, Request) else request)
        for number, request in enumerate(self._requests):
            if isinstance(request, Request):
                self._take(number, request)

    def _take(self, number: int, request: Request) -> None:
        if self._failures[number] is not None:
            with suppress(HoroError):  # that one
                request.wait()
        elif not request.is_released():
            try:
                request.wait()
            except ResourceError as error:  # a GPU
                self._failures[number] = error

    def forget(self) -> None:
        """Begins anew at the values that parameters have now: a step that was broken off is not undone."""
        self._starts, self._sent, self._requests, self._failures = {}, [], [], []
        self._has_failed = self._is_undone = False

    def _compare(self, states: list[ParameterState]) -> None:
        membership = self.membership
        membership.name_gradients()
        if not membership.has_unchecked or membership.optimizer() is None:
            return
        refuse_ddp(states)
        check = check_first(membership, has_own_state=True)
        if check is not None:
            check.wait()
            check.refuse_different_values()
        membership.note_checked()

    # -- called by the optimizer's hooks ------------------------------------------------------------------------------

    def refuse_while_pending(self, what: str) -> None:
        """Refuses nothing: no gradient is ever in progress."""

    def drain(self) -> None:
        """Waits for the requests that a step has left, and drops their results: the next step starts anew."""
        self._finish()
        self.forget()

    def hook(self, state: ParameterState) -> None:
        """Hooks no parameter."""

    def leave_job(self) -> None:
        """Begins anew in another job: the requests of the one before have ended with it."""
        self.forget()

    def begin_job(self) -> None:
        """There is nothing that ranks know of each other."""

    def copy_for(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> DeltaReducer:
        """A reducer with these options for a copy of the optimizer; ``twins``: its parameters by those of this one."""
        return type(self)(self.membership.copy_for(optimizer, twins))


def _takes_part(parameter: torch.Tensor) -> bool:
    """Whether a step may move it. Ranks freeze and thaw alike."""
    return parameter.requires_grad or parameter.grad is not None
