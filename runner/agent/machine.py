"""How many ranks a machine takes by itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horo import __version__

__all__ = ["core_count", "default_slots", "gpu_count", "host_facts"]


def host_facts() -> dict[str, Any]:
    """What hororun wants to know of each host: versions, cores, GPUs."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "cores": core_count(),
        "gpus": gpu_count(os.environ),
    }


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs, by ``CUDA_VISIBLE_DEVICES`` where it is set; as there, nothing after a negative number counts."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        folder = Path("/proc/driver/nvidia/gpus")
        return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    count = 0
    for item in filter(None, (word.strip() for word in visible.split(","))):
        if item.startswith("-"):
            break
        count += 1
    return count


def default_slots(cores: int, gpus: int) -> int:
    """Slots of a host for which none were named: its GPUs, or its cores where it has none."""
    return gpus or max(1, cores)
