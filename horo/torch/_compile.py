"""What torch.compile is told of horo."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

__all__ = ["is_autograd_compiled", "keep_from_dynamo", "keep_step_hooks"]

_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code that calls the hooks of a step, then the step."""
_TRACED = "horo.torch._runtime"
"""``rank()`` and ``size()`` are constants to a compiled function."""


def keep_from_dynamo() -> None:
    """Has torch.compile run horo's functions as they are, where it is loaded.

    Else it follows them down to the core, which it does not understand, and warns of each thing on the way. To load it
    takes seconds, so that is left to who uses it; every optimizer of torch does.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules") or sys.modules.get("torch._dynamo.skipfiles")
    if hasattr(rules, "add"):
        _add_modules(rules.add)


def is_autograd_compiled() -> bool:
    """Whether torch's compiled autograd runs the backward that calls. It drops calls for the end of a backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    enabled = getattr(module, "compiled_autograd_enabled", False)  # older torch knows only this
    return bool(getattr(module, "in_compiled_autograd_region", enabled))


def keep_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Has ``step`` call its hooks again, if torch.compile has ended that.

    When torch.compile is used for the first time, torch 2.1 takes the hooks away from all classes of ``torch.optim``
    and marks their ``step`` as hooked, so that nothing hooks it again.
    """
    kind: Any = type(optimizer)
    step = kind.step
    if not getattr(step, "hooked", False):
        return
    while step is not None:
        if getattr(step, "__code__", None) is _HOOKED_STEP:
            return
        step = getattr(step, "__wrapped__", None)
    kind.step = torch.optim.Optimizer.profile_hook_step(kind.step)
    kind.step.hooked = True


@functools.cache
def _add_modules(add: Any) -> None:
    for name, module in list(sys.modules.items()):
        is_source = str(getattr(module, "__file__", "")).endswith(".py")
        is_package = hasattr(module, "__path__")  # it would take what is below along
        if name.startswith("horo.") and is_source and not is_package and name != _TRACED:
            add(name)
