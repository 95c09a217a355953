"""Makes an optimizer distributed: its reducer runs around ``step``, the object gets methods, and so do its copies."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from horo.errors import UsageError
from horo.torch.compat.dynamo import keep_step_hooks
from horo.torch.optimizer.step_hooks import UndoingStep
from horo.torch.optimizer.strategy import Strategy

__all__ = ["attach", "find_duplicates"]


def attach(optimizer: Any, reducer: Strategy, shard: Callable[[Any, Any], None] | None = None) -> None:
    """Gives the optimizer its reducer: torch's own hooks around ``step``, and methods on this one object.

    ``shard``: called behind it, with both, for a copy of the optimizer too.
    """
    keep_step_hooks(optimizer)
    optimizer.register_step_pre_hook(reducer.before_step)
    optimizer.register_step_post_hook(reducer.after_step)
    if reducer.undo_step is not None:
        optimizer.step = UndoingStep(optimizer, reducer.undo_step)
    intercepted = _Intercepted(optimizer, reducer, shard)
    for name in intercepted.names:
        setattr(optimizer, name, getattr(intercepted, name))
    optimizer.__deepcopy__ = intercepted.deepcopy
    optimizer.__getstate__ = intercepted.refuse_pickling
    for name in ("synchronize", "skip_synchronize", "no_sync", "set_backward_passes_per_step"):
        setattr(optimizer, name, getattr(reducer, name))
    optimizer.find_duplicates = find_duplicates
    optimizer.backward_passes_per_step = reducer.membership.options.passes
    optimizer.op = reducer.membership.options.op
    optimizer.process_set = reducer.membership.options.process_set
    optimizer._reducer = reducer
    optimizer._parameter_names = reducer.membership.names
    optimizer._requires_update = reducer.membership.hooked
    optimizer._handles = reducer.handles
    if shard is not None:
        shard(optimizer, reducer)


def find_duplicates(values: Iterable[Any]) -> set[Any]:
    """The values that come more than once."""
    return {value for value, count in Counter(values).items() if count > 1}


class _Intercepted:
    """Methods of the optimizer that concern reductions in progress, and the one that copies it.

    They sit on the one object, not on a class of its own, and refer to it weakly: an optimizer in a cycle with itself
    would keep its hooks on the model until the next garbage collection.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, reducer: Strategy, shard: Callable[[Any, Any], None] | None
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._shard = shard
        self._before = {name: vars(optimizer)[name] for name in self.names if name in vars(optimizer)}

    names = ("zero_grad", "add_param_group", "load_state_dict")

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clears gradients; the optimizer's own method decides which arguments it takes.

        Raises:
            AssertionError: They are being reduced.
        """
        self._reducer.refuse_while_pending("zero_grad()")
        self._reducer.membership.keep_step_hooks()
        self._inner("zero_grad")(*args, **options)

    def add_param_group(self, *args: Any, **options: Any) -> None:
        """Adds a group of parameters; their gradients are averaged too."""
        self._inner("add_param_group")(*args, **options)
        self._reducer.membership.adopt()

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
        attach(copied, self._reducer.copy_for(copied, twins), self._shard)
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
