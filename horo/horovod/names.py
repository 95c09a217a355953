"""An import finder for the modules of the package ``horovod``: each is a module of horo, the same object.

``horovod.torch`` is ``horo.torch``, and its submodules are those of ``horo.torch``. ``horovod`` and ``horovod.common``
are modules made here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

from horo.config.table import environment, set_variables
from horo.horovod.environment import with_horovod
from horo.version import HOROVOD_VERSION

__all__ = ["install", "is_installed"]

_MODULES = {
    "horovod.common.elastic": "horo.elastic.state",
    "horovod.common.exceptions": "horo.horovod.exceptions",
    "horovod.common.process_sets": "horo.torch.ops.process_set",
    "horovod.common.util": "horo.horovod.util",
    "horovod.runner": "horo.runner.call",
}
_TORCH = "horovod.torch"


class _Loader:
    """Replaces the new module in ``sys.modules`` by the module of horo, which keeps its own ``__spec__``."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """None: the import system makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._target)


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod."):
            return None
        found = _target_of(fullname)
        return spec_from_loader(fullname, _Loader(found)) if found else None  # type: ignore[arg-type]


def _target_of(name: str) -> str:
    """The module of horo that has this name of Horovod; empty: there is none."""
    if name == _TORCH or name in _MODULES:
        return _MODULES.get(name, "horo.torch")
    if not name.startswith(_TORCH + "."):
        return ""  # horovod.tensorflow, say: as if it were not installed
    own = name.replace("horovod", "horo", 1)
    return own if find_spec(own) is not None else ""


def _lazily(name: str) -> Any:
    """The attributes of the package ``horovod`` that are not modules."""
    if name != "run":
        raise AttributeError(f"module 'horovod' has no attribute {name!r}")
    return importlib.import_module(_MODULES["horovod.runner"]).run  # the launcher, which few scripts need


def _package(name: str, doc: str) -> ModuleType:
    """A package without a folder; it is in ``sys.modules`` from now on."""
    module = ModuleType(name, doc)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__package__ = name
    sys.modules[name] = module
    return module


def is_installed() -> bool:
    """Whether ``import horovod.torch`` gives ``horo.torch`` in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Makes ``import horovod`` and its modules give those of horo, in this process and in those that it starts.

    A second call does nothing.

    Raises:
        ImportError: another Horovod is imported already.
    """
    if is_installed():
        return
    before = sys.modules.get("horovod")
    if before is not None and hasattr(before, "__version__"):
        raise ImportError(
            f"horovod is imported already, from {before.__file__}: call horo.horovod.install() before", name="horovod"
        )
    sys.meta_path.insert(0, _Finder())
    set_variables(with_horovod(environment()))
    root = _package("horovod", "horo under Horovod's name.")
    root.__getattr__ = _lazily  # type: ignore[method-assign]
    root.__version__ = HOROVOD_VERSION  # type: ignore[attr-defined]
    root.common = _package("horovod.common", "Modules of Horovod that do not belong to one framework.")  # type: ignore[attr-defined]
