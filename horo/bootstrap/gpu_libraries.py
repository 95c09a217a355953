"""Libraries for GPUs: the places where they may be, and those that this process can use.

The core loads them. This module knows how Python packages are laid out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from horo.core.libraries import Library, find_library

__all__ = [
    "CUDA_PLACES",
    "find_cuda",
    "find_nccl",
    "nccl_places",
]

_LOADED = ""  # by torch, mostly: two of a kind in one process do not know each other's handles
CUDA_PLACES = (
    _LOADED,
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",  # containers of Kubernetes mount the driver there
    "/usr/lib/wsl/lib/libcuda.so.1",  # Windows Subsystem for Linux
    "/run/opengl-driver/lib/libcuda.so.1",  # NixOS
)
_NCCL = "libnccl.so.2"


def find_cuda(places: Sequence[str] | None = None, *, initializes: bool = False) -> Library:
    """The CUDA driver, at one of these places or where it is mostly; see ``find_library``.

    Raises:
        ResourceError: none can be used; names each place with the reason.
    """
    return find_library("cuda", places or CUDA_PLACES, initializes=initializes)


def find_nccl() -> Library:
    """NCCL, that of torch first; see ``find_library``.

    Raises:
        ResourceError: none can be used; names each place with the reason.
    """
    return find_library("nccl", nccl_places())


def nccl_places() -> list[str]:
    """The places to look for NCCL: this process, the package nvidia-nccl, torch's own folder, the system."""
    # Python sees one folder only where a package that is a part of nvidia has brought an __init__.py, as some do.
    parts = [*_folders("nvidia"), *(Path(folder, "nvidia") for folder in sys.path)]
    folders = [*(part / "nccl" / "lib" for part in parts), *(folder / "lib" for folder in _folders("torch"))]
    files = dict.fromkeys(str(folder / _NCCL) for folder in folders)
    return [_LOADED, *(file for file in files if Path(file).exists()), _NCCL]


def _folders(package: str) -> list[Path]:
    """The folders of a package, which is not imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a module without a spec is in its place
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
