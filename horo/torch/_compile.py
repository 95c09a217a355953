"""Settings of torch.compile: which functions of horo it does not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

__all__ = ["is_autograd_compiled", "keep_from_dynamo", "keep_step_hooks", "let_dynamo_go"]

_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code that calls the hooks of a step, then the step."""
_TRACED = ("horo.torch._lifecycle", "horo.torch._topology", "horo.torch._runtime")
"""``rank()`` and ``size()`` are constants to a compiled function."""


_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")
"""The module with the rules which functions torch.compile follows, and its name in older torch."""


def keep_from_dynamo() -> None:
    """Has torch.compile run horo's functions as they are, now or when it is loaded.

    Else it follows them down to the core, which it does not understand, and warns of each thing on the way. To load it
    takes seconds, so it is left to the code that uses it; every optimizer of torch does.
    """
    loaded = [sys.modules[name] for name in _RULES if name in sys.modules]
    for rules in loaded:
        _keep_by(rules)
    if not loaded and not any(isinstance(finder, _RulesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RulesFinder())


def let_dynamo_go() -> None:
    """Takes out of the import system what waits for torch.compile to be loaded, at the end of a job."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _RulesFinder)]


class _RulesFinder:
    """Finds nothing by itself: it has the loader of the rules add horo to them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _RULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def load_and_keep(module: ModuleType) -> None:
            load(module)
            _keep_by(module)

        loader.exec_module = load_and_keep
        return spec


def _keep_by(rules: Any) -> None:
    if hasattr(rules, "add"):
        _add_modules(rules.add)


def is_autograd_compiled() -> bool:
    """Whether torch's compiled autograd runs the backward that calls. It drops calls for the end of a backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    enabled = getattr(module, "compiled_autograd_enabled", False)  # older torch has only this one
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
        is_package = hasattr(module, "__path__")  # a rule for it would hold for all its modules
        if name.startswith("horo.") and is_source and not is_package and name not in _TRACED:
            add(name)
