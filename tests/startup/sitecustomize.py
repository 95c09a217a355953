"""Cheaper imports of torch in the processes that tests start: Python runs this first, where PYTHONPATH leads to it.

Of the time of a process that only imports torch, a third goes into searches for garbage: several while its modules make
objects that all stay, and those at the end of the interpreter, which visit all of them again. A run of the tests starts
thousands of such processes. What comes behind ``import torch`` is searched as ever.

The first optimizer of a process imports torch._dynamo, which takes longer than all of torch, for two functions that do
nothing unless something is compiled. It is loaded as soon as anything else of it is wanted.
"""

import contextlib
import gc
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Finder:
    """Finds torch where others do, and has it run without searches for garbage."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith("torch._dynamo.") and name in sys.modules and target is None:
            # Who imports it has asked for the path of torch._dynamo, which has loaded all of it meanwhile.
            return ModuleSpec(name, _Loaded(sys.modules[name]))
        if name not in ("torch", "torch._dynamo"):
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _run_without_searches(spec.loader, freeze=name == "torch")
            if name == "torch._dynamo":
                spec.loader = _LaterLoader(spec.loader)
        return spec


class _Later(ModuleType):
    """torch._dynamo, until something is compiled or looks into it."""

    def __getattribute__(self, name: str) -> Any:
        # What looks through all modules, as inspect does, does not look into it.
        if name not in ("graph_break", "disable") and (name in ("__dict__", "__path__") or not name.startswith("__")):
            _load(self)
        return object.__getattribute__(self, name)

    def graph_break(self) -> None:
        """Of each step of an optimizer."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """``wrapping=False``: of ``torch._compile``, which keeps the answer with the function."""
        if options != {"wrapping": False}:
            _load(self)
            return self.disable(fn, recursive, **options)
        _called_directly.append(fn)
        return fn


_lock = threading.RLock()
_called_directly: list[Any] = []


def _load(module: Any) -> None:
    with _lock:
        if object.__getattribute__(module, "__class__") is _Later:
            module.__class__ = ModuleType
            for function in _called_directly:
                with contextlib.suppress(AttributeError):
                    delattr(function, "__dynamo_disable")
            real = module.__spec__.loader.real
            module.__spec__.loader = module.__loader__ = real
            real.exec_module(module)


class _Loaded:
    """Loads a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _LaterLoader:
    """Makes a ``_Later`` of what ``real`` loads."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Python's own."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Later


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
