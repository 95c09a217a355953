"""Libraries for GPUs: the places where they may be, and those that this process can use.

The core loads them. This module knows how Python packages are laid out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from horo.config.hosts import ranges
from horo.core.libraries import Library, find_library
from horo.errors import ResourceError

__all__ = [
    "CUDA_PLACES",
    "GpuLibraries",
    "describe_difference",
    "find_cuda",
    "find_gpu_libraries",
    "find_nccl",
    "nccl_places",
    "tell_difference",
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
_HOSTS_SHOWN = 4
_RUNS_SHOWN = 8


class GpuLibraries(NamedTuple):
    """The names, with versions, of the libraries for GPUs that a process can use; empty: none."""

    cuda: str = ""
    nccl: str = ""

    def describe(self) -> str:
        """The libraries that were found, as a phrase."""
        return " and ".join(filter(None, self)) or "none"


def find_cuda(*, initializes: bool = False) -> Library:
    """The CUDA driver; see ``find_library``.

    Raises:
        ResourceError: there is none of use; says of every place why.
    """
    return find_library("cuda", CUDA_PLACES, initializes=initializes)


def find_nccl() -> Library:
    """NCCL, that of torch first; see ``find_library``.

    Raises:
        ResourceError: there is none of use; says of every place why.
    """
    return find_library("nccl", nccl_places())


def nccl_places() -> list[str]:
    """The places to look for NCCL: this process, the package nvidia-nccl, torch's own folder, the system."""
    # Python sees one folder only where a package that is a part of nvidia has brought an __init__.py, as some do.
    parts = [*_folders("nvidia"), *(Path(folder, "nvidia") for folder in sys.path)]
    folders = [*(part / "nccl" / "lib" for part in parts), *(folder / "lib" for folder in _folders("torch"))]
    files = dict.fromkeys(str(folder / _NCCL) for folder in folders)
    return [_LOADED, *(file for file in files if Path(file).exists()), _NCCL]


def find_gpu_libraries() -> GpuLibraries:
    """The libraries that this process can use. Without a driver, NCCL is not looked for: it is large, and of no use."""
    try:
        cuda = find_cuda().name
    except ResourceError:
        return GpuLibraries()
    try:
        return GpuLibraries(cuda, find_nccl().name)
    except ResourceError:
        return GpuLibraries(cuda)


def describe_difference(ranks: Sequence[tuple[str, GpuLibraries]]) -> str:
    """A sentence about ranks that have different libraries; empty: all have the same.

    Args:
        ranks: by rank, the name of its host and its libraries.
    """
    groups: dict[GpuLibraries, list[int]] = {}
    for rank, (_, found) in enumerate(ranks):
        groups.setdefault(found, []).append(rank)
    if len(groups) < 2:
        return ""
    parts = [f"{found.describe()} on {_name_ranks(group, ranks)}" for found, group in groups.items()]
    return f"ranks have different libraries for GPUs: {', '.join(parts)}"


def tell_difference(rank: int, ranks: Sequence[tuple[str, GpuLibraries]]) -> str:
    """Logs, on rank 0, how ranks differ, if they do: for information, since a job on CPUs is not concerned.

    Returns:
        A warning for the first use of a GPU, on the lowest rank with a driver; empty on others, and where NCCL is the
        same everywhere: drivers may differ.
    """
    sentence = describe_difference(ranks)
    if rank == 0 and sentence:
        logging.getLogger("horo").info(sentence)
    users = [number for number, (_, found) in enumerate(ranks) if found.cuda]
    is_same = len({(bool(found.cuda), found.nccl) for _, found in ranks}) == 1
    if rank not in users[:1] or is_same:
        return ""
    return f"{sentence}. NCCL takes tensors only among ranks that have the same one; others' are staged"


def _name_ranks(group: Sequence[int], ranks: Sequence[tuple[str, GpuLibraries]]) -> str:
    """Such as "ranks 0-3, 6 (h1, h2)"; of many hosts the first ones."""
    hosts = list(dict.fromkeys(ranks[rank][0] for rank in group))
    shown = ", ".join(hosts[:_HOSTS_SHOWN]) + (", ..." if len(hosts) > _HOSTS_SHOWN else "")
    runs = ranges(group).split(",")
    numbers = ", ".join(runs[:_RUNS_SHOWN])
    more = ", ..." if len(runs) > _RUNS_SHOWN else ""
    return f"rank{'s' if len(group) > 1 else ''} {numbers}{more} ({shown})"


def _folders(package: str) -> list[Path]:
    """The folders of a package, which is not imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a module without a spec is in its place
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
