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

from horo._core_libraries import Library, find_library
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

CUDA_PLACES = (
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",  # containers of Kubernetes mount the driver there
    "/usr/lib/wsl/lib/libcuda.so.1",  # Windows Subsystem for Linux
    "/run/opengl-driver/lib/libcuda.so.1",  # NixOS
)
_NCCL = "libnccl.so.2"


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
    """The places to look for NCCL: the package nvidia-nccl, torch's own folder, the system."""
    # Python sees one folder only where a package that is a part of nvidia has brought an __init__.py, as some do.
    parts = [*_folders("nvidia"), *(Path(folder, "nvidia") for folder in sys.path)]
    folders = [*(part / "nccl" / "lib" for part in parts), *(folder / "lib" for folder in _folders("torch"))]
    files = dict.fromkeys(str(folder / _NCCL) for folder in folders)
    return [*(file for file in files if Path(file).exists()), _NCCL]


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
    """A sentence about ranks that have other libraries than rank 0; empty: there are none.

    Args:
        ranks: by rank, the name of its host and its libraries.
    """
    host, first = ranks[0]
    others = [rank for rank, (_, found) in enumerate(ranks) if found != first]
    if not others:
        return ""
    other_host, other = ranks[others[0]]
    further = len(others) - 1
    more = f"; {further} more differ{'s' if further == 1 else ''} from rank 0" if further else ""
    return (
        f"ranks have different libraries for GPUs: rank 0 ({host}) has {first.describe()}, rank {others[0]} "
        f"({other_host}) has {other.describe()}{more}"
    )


def tell_difference(rank: int, ranks: Sequence[tuple[str, GpuLibraries]]) -> None:
    """Logs, on rank 0, how ranks differ, if they do: for information, since a job on CPUs is not concerned."""
    if rank == 0 and (sentence := describe_difference(ranks)):
        logging.getLogger("horo").info(sentence)


def _folders(package: str) -> list[Path]:
    """The folders of a package, which is not imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a module without a spec is in its place
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
