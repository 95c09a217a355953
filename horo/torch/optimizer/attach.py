"""Makes an optimizer distributed: its reducer runs around ``step``, the object gets methods, and so do its copies."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, Protocol

import torch

from horo.errors import UsageError
from horo.torch.compat.dynamo import keep_step_hooks
from horo.torch.optimizer.parameter_state import ParameterState, ReductionOptions
from horo.torch.optimizer.step_hooks import UndoingStep

__all__ = ["Strategy", "attach", "find_duplicates"]


class Strategy(Protocol):
    """A way in which ranks come to the same step: what an optimizer calls of it, and what it shows its users of it."""

    advice: ClassVar[str]
    """The advice in the error about a gradient that was changed while it was being reduced."""
    options: ReductionOptions
    names: dict[torch.Tensor, str]
    hooked: set[torch.Tensor]
    handles: dict[torch.Tensor, Any]

    @property
    def undo_step(self) -> Callable[[], None] | None:
        """Called when a step has raised; None: it leaves what it has changed."""

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch step pre-hook: it may return other arguments, with another closure."""

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook."""

    def synchronize(self) -> None:
        """Called by the user: ranks come to the same gradients, if it is gradients that they reduce."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Called by the user: inside, ``step()`` takes gradients as they are."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Called by the user: inside, backward only accumulates locally."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Called by the user: how many backward passes accumulate locally."""

    def keep_step_hooks(self) -> None:
        """Called now and then before a step: torch.compile may have been used meanwhile."""

    def adopt(self) -> list[ParameterState]:
        """Called when the optimizer has got more parameters."""

    def refuse_while_pending(self, what: str) -> None:
        """Called before gradients are cleared: raises if the core still uses them."""

    def drain(self) -> None:
        """Called before a state is loaded: ends what is in progress."""

    def copy_for(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> Strategy:
        """The same for a copy of the optimizer; ``twins``: its parameters by those of this one."""


def attach(optimizer: Any, reducer: Strategy, process_set: Any) -> None:
    """Gives the optimizer its reducer: torch's own hooks around ``step``, and methods on this one object."""
    keep_step_hooks(optimizer)
    optimizer.register_step_pre_hook(reducer.before_step)
    optimizer.register_step_post_hook(reducer.after_step)
    if reducer.undo_step is not None:
        optimizer.step = UndoingStep(optimizer, reducer.undo_step)
    intercepted = _Intercepted(optimizer, reducer)
    for name in intercepted.names:
        setattr(optimizer, name, getattr(intercepted, name))
    optimizer.__deepcopy__ = intercepted.deepcopy
    optimizer.__getstate__ = intercepted.refuse_pickling
    for name in ("synchronize", "skip_synchronize", "no_sync", "set_backward_passes_per_step"):
        setattr(optimizer, name, getattr(reducer, name))
    optimizer.find_duplicates = find_duplicates
    optimizer.backward_passes_per_step = reducer.options.passes
    optimizer.op = reducer.options.op
    optimizer.process_set = process_set
    optimizer._reducer = reducer
    optimizer._parameter_names = reducer.names
    optimizer._requires_update = reducer.hooked
    optimizer._handles = reducer.handles


def find_duplicates(values: Iterable[Any]) -> set[Any]:
    """The values that come more than once."""
    return {value for value, count in Counter(values).items() if count > 1}


class _Intercepted:
    """Methods of the optimizer that concern reductions in progress, and the one that copies it.

    They sit on the one object, not on a class of its own, and refer to it weakly: an optimizer in a cycle with itself
    would keep its hooks on the model until the next garbage collection.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Strategy) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._before = {name: vars(optimizer)[name] for name in self.names if name in vars(optimizer)}

    names = ("zero_grad", "add_param_group", "load_state_dict")

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clears gradients; the optimizer's own method decides which arguments it takes.

        Raises:
            AssertionError: They are being reduced.
        """
        self._reducer.refuse_while_pending("zero_grad()")
        self._reducer.keep_step_hooks()
        self._inner("zero_grad")(*args, **options)

    def add_param_group(self, *args: Any, **options: Any) -> None:
        """Adds a group of parameters; their gradients are averaged too."""
        self._inner("add_param_group")(*args, **options)
        self._reducer.adopt()

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        """Loads a state; gradients in progress are waited for first."""
        self._reducer.drain()
        self._inner("load_state_dict")(*args, **options)

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        """Copies the optimizer as torch does, and gives the copy a reducer for the copied parameters."""
        optimizer: Any = self._optimizer()
        kind: Any = type(optimizer)
        copied = kind.__new__(kind)
        memo[id(optimizer)] = copied
        copied.__setstate__(copy.deepcopy(kind.__getstate__(optimizer), memo))
        twins = {
            parameter: twin
            for group, copied_group in zip(optimizer.param_groups, copied.param_groups, strict=True)
            for parameter, twin in zip(group["params"], copied_group["params"], strict=True)
        }
        attach(copied, self._reducer.copy_for(copied, twins), optimizer.process_set)
        return copied

    def refuse_pickling(self) -> NoReturn:
        """Refuses to be pickled: the unpickled optimizer would train apart from the other ranks.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"a distributed optimizer ({type(self._optimizer()).__name__}) cannot be pickled, saved whole or copied by "
            "copy.copy(): the result would not average gradients. Save optimizer.state_dict(), and load it into an "
            "optimizer made by DistributedOptimizer; in one process copy.deepcopy((model, optimizer)) works"
        )

    def _inner(self, name: str) -> Any:
        optimizer = self._optimizer()
        return self._before.get(name) or getattr(type(optimizer), name).__get__(optimizer)
