"""The strategies for the package ``lightning``."""

from __future__ import annotations

from typing import Any

from horo.lightning.packages import make_classes

__all__ = [
    "FabricLauncher",
    "HoroEnvironment",
    "HoroFabricStrategy",
    "HoroStrategy",
    "NeptuneLogger",
    "TrainerLauncher",
    "registries",
]

_made, registries = make_classes(__name__, "lightning.pytorch", "lightning.fabric")
HoroStrategy: Any = _made["HoroStrategy"]
HoroFabricStrategy: Any = _made["HoroFabricStrategy"]
HoroEnvironment: Any = _made["HoroEnvironment"]
TrainerLauncher: Any = _made["TrainerLauncher"]
FabricLauncher: Any = _made["FabricLauncher"]
NeptuneLogger: Any = _made["NeptuneLogger"]
