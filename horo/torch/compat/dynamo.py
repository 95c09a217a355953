"""torch.compile beside horo: which functions it does not trace, and hooks that it takes away."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from horo.torch.compat import torch_private

__all__ = ["hooked_step", "keep_from_dynamo", "keep_step_hooks"]

_TRACED = ("horo.torch.lifecycle", "horo.torch.engine.topology", "horo.torch.engine.runtime")
"""``rank()`` and ``size()`` are constants to a compiled function."""


@functools.cache
def keep_from_dynamo() -> None:
    """Has torch.compile run horo's functions as they are, as ``torch.compiler.disable`` would.

    Else it follows them down to the core, which it does not understand, and warns of each thing on the way. That
    decorator loads it, which takes seconds, and every call would cost more.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("horo.torch.", "horo.core.")) and name not in _TRACED:
            for function in _functions_in(vars(module), name):
                torch_private.keep_from_dynamo(function, [*_codes_in(function.__code__)])


def _functions_in(names: dict[str, Any], module: str) -> Iterator[FunctionType]:
    """The functions that a module defines, those of its classes too."""
    for value in list(names.values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions_in(dict(vars(value)), module)
            continue
        for each in (value.fget, value.fset) if isinstance(value, property) else (value,):
            function = getattr(each, "__wrapped__", getattr(each, "__func__", each))  # what is cached, or static
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield function


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes_in(inner)


def keep_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Has ``step`` call its hooks again, if torch.compile has ended that.

    When torch.compile is used for the first time, torch 2.1 takes the hooks away from all classes of ``torch.optim``
    and marks their ``step`` as hooked, so that nothing hooks it again.
    """
    kind: Any = type(optimizer)
    if not torch_private.is_step_hooked(kind):
        return
    hooked, step = hooked_step(), kind.step
    while step is not None:
        if hooked is None or getattr(step, "__code__", None) is hooked:
            return
        step = getattr(step, "__wrapped__", None)
    torch_private.rehook_step(kind)


hooked_step = functools.cache(torch_private.code_of_hooked_step)
"""The same code each time."""
