"""Lightning on horo: ``Trainer(strategy="horo")`` and ``Fabric(strategy="horo")``, for Lightning 2.

``import horo.lightning`` registers the strategies, also as ``"horovod"`` and ``"bagua"``, names of Lightning 1. It does
so in that of the packages ``lightning`` and ``pytorch_lightning`` which is imported; in both, if both are, or neither.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from horo.errors import ResourceError
from horo.lightning.metrics import synchronize_metrics
from horo.lightning.packages import NAMES
from horo.lightning.place import announce_rank

__all__ = ["HoroFabricStrategy", "HoroStrategy", "NeptuneLogger", "register", "synchronize_metrics"]

_PACKAGES = {"lightning.pytorch": "with_lightning", "pytorch_lightning": "with_pytorch_lightning"}
"""The packages that have a Trainer, and the module with our classes for each."""


def register() -> list[Any]:
    """Registers the strategies in the packages that are imported by now; importing this package has called it.

    Returns:
        The module with our classes for each of the packages, that of ``lightning`` first.

    Raises:
        ResourceError: Neither package is installed.
    """
    chosen = [name for name in _PACKAGES if name in sys.modules]
    chosen = chosen or [name for name in _PACKAGES if _can_be_found(name)]
    if not chosen:
        raise ResourceError("horo.lightning needs Lightning 2: pip install lightning")
    found = [importlib.import_module(f"horo.lightning.{_PACKAGES[name]}") for name in chosen]
    for module in found:
        for registry, strategy in zip(module.registries, (module.HoroStrategy, module.HoroFabricStrategy), strict=True):
            for name in NAMES:
                registry.register(name, strategy, "distributed training by horo.torch", override=True)
    return found


def _can_be_found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # a folder that has the name of the package, say
        return False


announce_rank()
_first = register()[0]
HoroStrategy: Any = _first.HoroStrategy
HoroFabricStrategy: Any = _first.HoroFabricStrategy
NeptuneLogger: Any = _first.NeptuneLogger
