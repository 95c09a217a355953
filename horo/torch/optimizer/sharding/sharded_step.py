"""Each rank steps its share: around the ``step()`` of an optimizer whose gradients are averaged.

Inside ``step()`` the optimizer sees the gradients of the parameters that this rank owns, and None for the others, which
all optimizers skip. Ranks meet twice: at the *entry*, behind which owners write parameters that all ranks read, and at
the *exit*, behind which all have written. Between them is the *window*.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from horo.errors import (
    AbortedError,
    DeadlockError,
    GroupError,
    HoroError,
    PeerLostError,
    ResourceError,
    StalledError,
    TimeoutError,
    UnsupportedError,
    UsageError,
)
from horo.torch.compat.torch_private import order_step_hooks
from horo.torch.engine import runtime as _runtime
from horo.torch.engine import topology
from horo.torch.engine.operation import count_change
from horo.torch.optimizer.gradient_reducer import GradientReducer
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.sharding.hosts import is_compared
from horo.torch.optimizer.sharding.meeting import Meeting
from horo.torch.optimizer.sharding.placement import ParameterPlacement, Placed
from horo.torch.optimizer.sharding.state import StatePlacement, tensors_in
from horo.torch.optimizer.sharding.supported import is_of_torch, steps_elements
from horo.torch.optimizer.step_hooks import UndoingStep, closure_of, is_inside_step, with_closure

__all__ = ["shard_step"]

_LOSSES = (AbortedError, DeadlockError, PeerLostError, StalledError, TimeoutError)


def shard_step(optimizer: Any, reducer: Any) -> None:
    """Has each rank step its share of the parameters of an optimizer to which ``attach`` has given its reducer."""
    sharded = _ShardedStep(optimizer, reducer)
    before = optimizer.register_step_pre_hook(sharded.before_step)
    after = optimizer.register_step_post_hook(sharded.after_step)
    reference = weakref.ref(optimizer)

    def order_hooks() -> None:
        """Hooks of users run outside the window: they see all gradients, and whole parameters."""
        own = reference()
        if own is not None:
            order_step_hooks(own, before.id, after.id)

    optimizer.step = UndoingStep(optimizer, sharded.end_broken, order_hooks)
    optimizer.register_state_dict_pre_hook(sharded.before_state_dict)
    optimizer.register_load_state_dict_post_hook(sharded.after_load)
    optimizer._sharded_step = sharded


class _ShardedStep:
    """The sharding of one optimizer. Only the optimizer refers to it.

    Args:
        optimizer: That of the user.
        reducer: Averages its gradients before each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradientReducer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._membership = reducer.membership
        self._meeting: Meeting | None = None
        self._placement: ParameterPlacement | None = None
        self._state: StatePlacement | None = None
        self._states: list[ParameterState] | None = None
        """The parameters in the last step."""
        self._states_before = 0
        """The number of parameters that had state before this step."""
        self._may_write_all = not is_of_torch(optimizer)
        """Whether its step may write parameters without a gradient: clip them, let their weights decay."""
        self._is_open = False
        """Whether this rank is in the window."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The gradients of parameters of others."""
        self._writing: list[Placed] = []
        """The parameters that this rank steps."""
        self._cut: list[tuple[Placed, torch.Tensor, dict[str, Any] | None]] = []
        """The cut ones among them, with their gradients and their state."""
        self._is_meeting = False
        """Whether this rank is in a step, but not in the window."""
        self._torn = ""
        """The reason that parameters may be of two steps, until a state is loaded."""
        self._out = ""
        """The reason that this rank is in another step than the others, until the job ends."""
        runtime = _runtime.find()
        if runtime is not None:
            runtime.sharded.add(self)

    # -- around step() ---------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch step pre-hook, behind the reducer's and the user's; with a closure, the window opens behind that.

        Raises:
            UsageError: Ranks have changed parameters in different ways, or parameters are of two steps.
            GroupError: A rank is lost or has shut down.
        """
        if is_inside_step(optimizer):
            return None
        if self._reducer.steps_alone:
            raise UsageError(
                "optimizer.step() inside skip_synchronize() and no_sync(): with sharding=, a step of this rank alone "
                "would change the parameters of all; leave sharding out"
            )
        is_shared = self._follow(optimizer)
        if why := self._out or self._torn:
            raise UsageError(f"optimizer.step(): {why}")
        if not is_shared:
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            self._open()
            return None
        return with_closure(args, kwargs, _OpeningClosure(closure, self))

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook, before the user's: blocks until all ranks have stepped their shares.

        Raises:
            AbortedError: The step of another rank has raised.
            GroupError: A rank is lost or has shut down.
        """
        if not self._is_open or is_inside_step(optimizer):
            return
        meeting, placement, state = self._parts()
        others = [parameter for parameter, _ in self._hidden]
        if self._may_write_all:
            placement.take_reassigned(self._writing)
        self._is_meeting = True
        self._give_back()
        is_new = state.keep(optimizer, placement.placed)
        if not is_new:
            self._cut = []  # state is whole again, also if a rank is lost from now on
            self._window.close()
        try:
            failed, is_new_anywhere = meeting.meet("exit", False, is_new)
            if is_new_anywhere and not failed:
                state.place(optimizer, placement.placed)
        except _LOSSES as error:
            raise self._lost(error) from error
        except (ResourceError, UnsupportedError) as error:
            self._tear(str(error))
            self.leave()  # ranks may have laid out different memory
            raise
        if is_new:
            self._cut = []
            self._window.close()
        count_change(others)
        if self._may_write_all:
            placement.show()
        if failed:
            self._raise_of_other(meeting)
        state.show(optimizer, self._states_before)
        if meeting.is_on_hosts and is_compared(self._window.step):
            placement.compare_hosts(self._window.step)
        self._is_meeting = False

    def end_broken(self) -> None:
        """Called when ``step()`` has raised: all is as outside the window, and the other ranks learn of it."""
        error = sys.exc_info()[1]
        was_meeting, self._is_meeting = self._is_meeting, False
        if was_meeting and not isinstance(error, HoroError):
            self._fall_out(error)
        if not self._is_open:
            return
        self._give_back()
        self._put_back()
        self._window.fail()
        meeting, _, _ = self._parts()
        text = f"optimizer.step() raised {type(error).__name__}: {error}"
        self._tear(f"rank {meeting.rank}: {text}")
        try:
            meeting.meet("exit", True, False)
            meeting.gather("failure", text)
        except HoroError:
            return  # the error of the step is the one that counts
        except BaseException as interrupt:
            self._fall_out(interrupt)
            raise

    def _open(self) -> None:
        """Meets the other ranks, and hides the gradients of their parameters."""
        self._is_meeting = True
        self._enter()
        self._window.open()
        self._is_open, self._is_meeting = True, False
        meeting, placement, state = self._parts()
        optimizer = self._optimizer()
        assert optimizer is not None
        self._states_before = len(optimizer.state)
        state.take_written()
        for there in placement.placed.values():
            parameter = there.state.parameter
            gradient = parameter.grad
            if there.block.is_written_by(meeting.index):
                if gradient is None and not self._may_write_all:
                    continue
                self._writing.append(there)
                if not there.block.shares:
                    parameter.data = there.alias
                    continue
                self._cut.append((there, gradient, state.narrow(optimizer, there)))
                parameter.grad = None  # its shape is to be that of the data
                parameter.data = there.part(meeting.index)
                parameter.grad = there.part_of_gradient(gradient, meeting.index)
            elif gradient is not None:
                self._hidden.append((parameter, gradient))
                parameter.grad = None

    def _enter(self) -> None:
        """Waits for all ranks; then merges the writes of the script, and moves parameters that are not in place."""
        meeting, placement, state = self._parts()
        states = self._membership.adopt()
        if states is not self._states:
            placement.keep_only(states)
            state.keep_only(states)
            self._states = states
        moved = placement.moved(states)
        state.hold(placement.placed.values())
        window = placement.window
        if window is not None:
            window.enter()
        try:
            is_moved, is_written = meeting.meet("entry", bool(moved), placement.is_written())
            if is_written:
                placement.merge(self._membership.steps)
            if is_moved:
                placement.place(states, moved)
        except _LOSSES as error:
            raise self._lost(error) from error
        except (ResourceError, UnsupportedError):
            self.leave()  # ranks may have laid out different memory
            raise
        except BaseException:
            if window is not None:
                window.leave()
            raise
        if window is None:
            self._window.enter()

    def _give_back(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        cut = self._cut if self._is_open else []
        for there, _, _ in cut:
            there.state.parameter.grad = None
        for there in self._writing:
            there.state.parameter.data = there.view
        for there, gradient, _ in cut:
            there.state.parameter.grad = gradient
        self._hidden, self._writing, self._is_open = [], [], False

    def _put_back(self) -> None:
        """Gives cut parameters the state again that they had before a step that has failed."""
        optimizer, cut, self._cut = self._optimizer(), self._cut, []
        if optimizer is None:
            return
        for there, _, found in cut:
            if found is None:
                optimizer.state.pop(there.state.parameter, None)
            else:
                optimizer.state[there.state.parameter] = found

    # -- failures --------------------------------------------------------------------------------------------------

    def _lost(self, error: GroupError) -> GroupError:
        """The error of a job that has ended in a step, with the outcome of the step."""
        text = self._settled()
        return type(error)(f"{error}; {text}") if text else error

    def _settled(self) -> str:
        """Waits until no rank of this host writes; returns the outcome of the step, empty if it has not begun."""
        _, placement, state = self._parts()
        window = placement.window
        if window is None or not placement.placed:  # lost while parameters moved for the first time
            return ""
        window.leave()
        stepped = window.settle()
        placed = list(placement.placed.values())
        unfinished = [index for index, done in enumerate(stepped) if not done]
        missing = [item for item in placed if any(item.block.is_written_by(index) for index in unfinished)]
        if not missing:
            if self._may_write_all:
                placement.show()
            optimizer = self._optimizer()
            if optimizer is not None:
                state.show(optimizer, self._states_before)
            return "optimizer.step() had been done on this host: all parameters are of the same step"
        if all(done is False for done in stepped) and len(missing) == len(placed):
            return ""
        text = (
            f"it was lost inside optimizer.step(): {len(missing)} of {len(placed)} parameters may be half stepped; "
            "load a checkpoint or the last commit"
        )
        self._tear(text)
        return text

    def _tear(self, why: str) -> None:
        self._torn = (
            f"parameters may be of two steps, since {why}; load a state of the model and the optimizer before this one "
            "goes on"
        )

    def _fall_out(self, error: BaseException | None) -> None:
        """Called when a signal handler has ended a step of this rank, whose part in the meeting goes on without it."""
        if self._placement is not None and self._placement.window is not None:
            self._placement.window.leave()
        why = f"{type(error).__name__} ended a step of this rank while it met the others"
        self._tear(why)
        self._out = f"{why}, who are in another step now; call hvd.shutdown() and hvd.init(), and load a state"

    def _raise_of_other(self, meeting: Meeting) -> None:
        told = meeting.gather("failure", "")
        rank, text = next((rank, text) for rank, text in told.items() if text)
        self._tear(f"rank {rank}: {text}")
        raise AbortedError(f"rank {rank}: {text}; parameters may be of two steps: load a checkpoint or the last commit")

    # -- the job ---------------------------------------------------------------------------------------------------

    def _follow(self, optimizer: torch.optim.Optimizer) -> bool:
        """Begins anew in another job, or another team; whether there are ranks to share with."""
        runtime = _runtime.current()
        is_alone = self._membership.size == 1
        if self._meeting is not None and not is_alone and self._meeting.is_of(runtime, self._membership.team):
            return True
        self.leave()
        if is_alone:
            return False
        runtime.sharded.add(self)
        self._meeting = Meeting(self._membership)
        self._placement = ParameterPlacement(self._meeting, may_cut=steps_elements(optimizer))
        self._state = StatePlacement(self._meeting, self._placement.memory)
        return True

    def leave(self) -> None:
        """Called when this rank leaves the job, and in a forked child: parameters and state are its own from now on."""
        self._give_back()
        self._put_back()
        optimizer = self._optimizer()
        if self._state is not None and optimizer is not None:
            self._state.leave(optimizer)
        self._meeting = self._placement = self._state = self._states = None
        self._is_meeting, self._out = False, ""

    def _parts(self) -> tuple[Meeting, ParameterPlacement, StatePlacement]:
        assert self._meeting is not None and self._placement is not None and self._state is not None
        return self._meeting, self._placement, self._state

    @property
    def _window(self) -> Any:
        assert self._placement is not None
        return self._placement.window

    # -- commits ---------------------------------------------------------------------------------------------------

    def shared_tensors(self) -> list[torch.Tensor]:
        """Parameters and their state, which are equal on all ranks of the job outside the window."""
        optimizer = self._optimizer()
        if optimizer is None or self._membership.size < topology.size():
            return []
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return parameters + list(tensors_in(optimizer).values())

    def is_placed(self) -> bool:
        """Whether this rank has them as the owners have written them: it has changed none."""
        optimizer, placement, state = self._optimizer(), self._placement, self._state
        if optimizer is None or placement is None or state is None or self._states is None:
            return False
        return not placement.moved(self._states) and not placement.is_written() and state.is_placed(optimizer)

    # -- state_dict() ----------------------------------------------------------------------------------------------

    def before_state_dict(self, optimizer: torch.optim.Optimizer) -> None:
        """A torch hook: writes of this rank into the state of others' parameters do not count.

        Raises:
            UsageError: Parameters are of two steps.
        """
        if self._torn:
            raise UsageError(f"optimizer.state_dict(): {self._torn}")
        if self._state is not None:
            self._state.drop()

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        """A torch hook: the optimizer is whole again."""
        self._torn = ""


class _OpeningClosure:
    """The closure of a step, behind which the window opens: it may be evaluated once."""

    def __init__(self, closure: Callable[[], Any], sharded: _ShardedStep) -> None:
        self._closure = closure
        self._sharded = sharded

    def __call__(self) -> Any:
        if self._sharded._is_open:
            raise UsageError(
                "optimizer.step() evaluates its closure several times, and with sharding= parameters of others have "
                "been stepped by then: leave sharding out"
            )
        loss = self._closure()
        self._sharded._open()
        return loss
