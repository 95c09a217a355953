"""Adasum in an optimizer: each rank takes its own step, and the steps of all ranks are combined.

Before ``step()`` the parameters are copied. The optimizer steps by the gradients of this rank; what it has moved each
parameter by is combined with that of the other ranks by Adasum, and the result is added to the copy. So momentum and
the like are each rank's own, and parameters are equal on all ranks after each step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from horo.errors import HoroError, UnsupportedError, UsageError
from horo.torch._compile import keep_step_hooks
from horo.torch._first_checks import FirstCheck, refuse_ddp
from horo.torch._gradients import ParameterState, ReductionOptions
from horo.torch._member import Member
from horo.torch._requests import Request, start_allreduce
from horo.torch._spans import span
from horo.torch._staging import Spec
from horo.torch._step import scaler_has_looked

__all__ = ["DeltaReducer"]


class DeltaReducer(Member):
    """Combines the steps that ranks take. It stands where a ``GradientReducer`` does, and hooks no parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: ReductionOptions, names: dict[Any, str]) -> None:
        super().__init__(options.process_set)
        self.options = options
        self.names = names
        self.hooked: set[torch.Tensor] = set()
        self.handles: dict[torch.Tensor, Any] = {}
        self._optimizer = weakref.ref(optimizer)
        self._starts: dict[ParameterState, torch.Tensor] = {}
        """What the parameters were before the step in progress."""
        self._requests: list[Request] = []
        """Those of a step that an exception of a signal handler has left; finished before the next step."""
        self.adopt()

    # -- what the user calls ---------------------------------------------------------------------------------------

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
        """Sets what the attribute says; gradients accumulate locally until ``step()``, however many passes come.

        Raises:
            UsageError: ``passes`` is not positive.
        """
        if passes <= 0:
            raise UsageError(f"backward_passes_per_step must be positive, not {passes}")
        self.options.passes = passes
        optimizer: Any = self._optimizer()
        if optimizer is not None:
            optimizer.backward_passes_per_step = passes

    # -- around step() ---------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step pre-hook: copies the parameters, after those of all ranks were compared once.

        Raises:
            UnsupportedError: A GradScaler calls the step.
            UsageError: Parameters are not equal on all ranks before the first step, or an optimizer that was made
                later has some of them.
        """
        self.newer.refuse(self, "optimizer.step()")
        self.follow_runtime()
        self.drain()
        if self.size == 1:
            return
        if scaler_has_looked(optimizer):
            raise UnsupportedError(
                "optimizer.step(): a GradScaler skips the steps of one rank alone, for which the others would wait "
                "with op=Adasum; use bfloat16, or op=Average"
            )
        states = [state for state in self.adopt() if _takes_part(state.parameter)]
        self._compare(states)
        with torch.no_grad():
            self._starts = {state: state.parameter.detach().clone() for state in states}

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook: blocks until the steps of all ranks are combined.

        Raises:
            MismatchError: Ranks moved different parameters under one name; all stand where they were before the step.
            GroupError: A rank is lost or horo was shut down; likewise.
        """
        starts, self._starts = self._starts, {}
        if not starts:
            return
        with torch.no_grad():
            try:
                for state, moved in zip(starts, self._combined(starts), strict=True):
                    state.parameter.detach().copy_(starts[state].add_(moved))
            except BaseException:
                for state, start in starts.items():
                    state.parameter.detach().copy_(start)
                raise

    def _combined(self, starts: dict[ParameterState, torch.Tensor]) -> list[torch.Tensor]:
        """What the parameters have moved by on all ranks together."""
        compressor, contexts = self.options.compression, []
        for state, start in starts.items():
            sent, context = compressor.compress(state.parameter.detach() - start)
            contexts.append(context)
            spec = Spec(
                state.kind or "", f"{state.name}.delta", self.options.op, wire=self.options.wire, team=self.team
            )
            self._requests.append(start_allreduce([sent], spec, in_place=True))
        with span("horo.synchronize"):
            self._requests[-1].wait_done()
            results = list(self._finish())
        for result in results:
            if isinstance(result, HoroError):
                raise result
        return [compressor.decompress(*pair) for pair in zip(results, contexts, strict=True)]

    def _finish(self) -> Iterator[Any]:
        """The result of each request, or its error."""
        while self._requests:
            try:
                result = self._requests[0].wait()[0]
            except HoroError as error:
                if not self._requests[0].is_done():  # it is a signal handler's
                    raise
                result = error
            self._requests.pop(0)
            yield result

    def _compare(self, states: list[ParameterState]) -> None:
        self.name_gradients()
        fresh = list(self.states.values())[self._checked :]
        optimizer = self._optimizer()
        if not fresh or optimizer is None:
            return
        refuse_ddp(states)
        check = FirstCheck(self.label, fresh, optimizer, self.options.process_set, has_own_state=True)
        check.wait()
        check.refuse_different_values()
        self._checked = len(self.states)

    # -- what an optimizer asks of its reducer ---------------------------------------------------------------------

    def refuse_while_pending(self, what: str) -> None:
        """Refuses nothing: no gradient is ever in progress."""

    def keep_step_hooks(self) -> None:
        """Called now and then before a step: torch.compile may have been used meanwhile."""
        optimizer = self._optimizer()
        if optimizer is not None:
            keep_step_hooks(optimizer)

    def drain(self) -> None:
        """Waits for what a step that was interrupted has left; its results are dropped."""
        for _ in self._finish():
            pass

    def reset(self) -> None:
        """Begins anew in another job: what was in progress there has ended with it."""
        self._requests.clear()
        self._starts.clear()

    def adopt(self) -> list[ParameterState]:
        """Makes a state for every parameter that the optimizer has by now; returns all."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        is_larger = False
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter not in self.states:
                    name = self.names.setdefault(parameter, f"allreduce.noname.{number}.{index}")
                    self.states[parameter] = ParameterState(parameter, name)
                    self._are_named, is_larger = False, True
                if parameter.requires_grad:
                    self.hooked.add(parameter)
        if is_larger:
            self.claim_parameters()
        return list(self.states.values())

    def copy_for(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> DeltaReducer:
        """One with the same options for a copy of the optimizer; ``twins``: its parameters by those of this one."""
        names = {twins[parameter]: name for parameter, name in self.names.items() if parameter in twins}
        return type(self)(optimizer, copy.copy(self.options), names)


def _takes_part(parameter: torch.Tensor) -> bool:
    """Whether a step may move it. Ranks freeze and thaw alike."""
    return parameter.requires_grad or parameter.grad is not None
