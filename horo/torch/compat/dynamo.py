"""torch.compile beside horo: which functions it does not trace, and hooks that it takes away."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

from horo.torch.compat import torch_private
from horo.torch.compat.torch_private import DYNAMO_RULES

__all__ = ["keep_from_dynamo", "keep_step_hooks", "let_dynamo_go"]

_TRACED = ("horo.torch.lifecycle", "horo.torch.engine.topology", "horo.torch.engine.runtime")
"""``rank()`` and ``size()`` are constants to a compiled function."""


def keep_from_dynamo() -> None:
    """Has torch.compile run horo's functions as they are, now or when it is loaded.

    Else it follows them down to the core, which it does not understand, and warns of each thing on the way. To load it
    takes seconds, so it is left to the code that uses it; every optimizer of torch does.
    """
    loaded = [sys.modules[name] for name in DYNAMO_RULES if name in sys.modules]
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
        if fullname not in DYNAMO_RULES:
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


@functools.cache
def _keep_by(rules: Any) -> None:
    for name, module in list(sys.modules.items()):
        is_source = str(getattr(module, "__file__", "")).endswith(".py")
        is_package = hasattr(module, "__path__")  # a rule for it would hold for all its modules
        if name.startswith("horo.") and is_source and not is_package and name not in _TRACED:
            torch_private.add_to_dynamo_rules(rules, name)


def keep_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Has ``step`` call its hooks again, if torch.compile has ended that.

    When torch.compile is used for the first time, torch 2.1 takes the hooks away from all classes of ``torch.optim``
    and marks their ``step`` as hooked, so that nothing hooks it again.
    """
    kind: Any = type(optimizer)
    if not torch_private.is_step_hooked(kind):
        return
    hooked, step = _hooked_step(), kind.step
    while step is not None:
        if hooked is None or getattr(step, "__code__", None) is hooked:
            return
        step = getattr(step, "__wrapped__", None)
    torch_private.rehook_step(kind)


_hooked_step = functools.cache(torch_private.code_of_hooked_step)
