"""The surroundings of a call of an optimizer's ``step``: its arguments, an undo, a GradScaler that calls it."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from horo.torch.compat.dynamo import hooked_step
from horo.torch.compat.torch_private import calls_scaled_step, has_stepped, is_unscaled
from horo.torch.optimizer.step_inputs import callers

__all__ = ["UndoingStep", "closure_of", "is_inside_step", "scaler_has_looked", "with_closure"]


class UndoingStep:
    """The ``step`` of one optimizer, which undoes its changes when it raises; ``before`` is called first.

    Torch has no hook for that. It stands where a bound method does, and refers to the optimizer weakly; schedulers wrap
    its ``__func__``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, undo: Callable[[], None], before: Callable[[], None] = lambda: None
    ) -> None:
        inner: Any = vars(optimizer).get("step")  # a scheduler's
        self._optimizer = weakref.ref(optimizer)

        def step(own: Any, *args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return type(own).step(own, *args, **kwargs) if inner is None else inner(*args, **kwargs)
            except BaseException:
                undo()
                raise

        kind: Any = type(optimizer)
        functools.update_wrapper(self, kind.step if inner is None else inner)
        self.__func__ = functools.wraps(kind.step)(step)

    @property
    def __self__(self) -> torch.optim.Optimizer | None:
        """As of a bound method."""
        return self._optimizer()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)


def is_inside_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the hook that calls this is around a ``step()`` that another one of the same optimizer has called.

    A step may call that of its base class, and torch has hooks around this one where an optimizer of the base class was
    made before: on some ranks. The call stack shows it also if such a call has raised, which no hook behind it sees.
    One that a post-hook of the user calls is a step of its own.
    """
    frame, steps, hooked = sys._getframe(1).f_back, 0, hooked_step()
    while frame is not None and steps < 2:
        if frame.f_code is hooked and frame.f_locals.get("self") is optimizer:
            steps += steps == 0 or not has_stepped(frame)
        frame = frame.f_back
    return steps == 2


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments that torch passes to a step pre-hook (the optimizer first), or None.

    An optimizer may have a ``step`` whose first argument is something else, such as a number.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def scaler_has_looked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler calls the step. It has unscaled the gradients then, which cannot be seen on them.

    It notes that on an optimizer with a fused step; otherwise only the call stack shows it.
    """
    return is_unscaled(optimizer) or any(map(calls_scaled_step, callers()))
