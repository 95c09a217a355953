"""Cheaper imports of torch in the processes that tests start: Python runs this first, where PYTHONPATH leads to it.

Of the time of a process that only imports torch, a third goes into searches for garbage: several while its modules make
objects that all stay, and those at the end of the interpreter, which visit all of them again. A run of the tests starts
thousands of such processes. What comes behind ``import torch`` is searched as ever.
"""

import gc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Finder:
    """Finds torch where others do, and has it run without searches for garbage."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("torch", "torch._dynamo"):  # torch imports the second one with the first optimizer
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _run_without_searches(spec.loader, freeze=name == "torch")
        return spec


def _run_without_searches(loader: Any, *, freeze: bool) -> None:
    """Lets the loader run its module so, once; ``freeze``: no later search looks at what is there then."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        searches = gc.isenabled()
        gc.disable()
        try:
            run(module)
        finally:
            if freeze:
                gc.freeze()
            if searches:
                gc.enable()

    loader.exec_module = exec_module


sys.meta_path.insert(0, _Finder())
