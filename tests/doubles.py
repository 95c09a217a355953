"""Doubles of libraries for GPUs: small shared libraries in place of the CUDA driver and NCCL, compiled by the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["CUDA", "NCCL", "build_double"]

_SOURCES = Path(__file__).resolve().parent / "native" / "doubles"
CUDA, NCCL = "libcuda.so.1", "libnccl.so.2"


def build_double(library: str, folder: Path, *, soname: str | None = None, **defines: int | str) -> Path:
    """Compiles a double.

    Args:
        library: ``CUDA`` or ``NCCL``, which is also the name of the file.
        folder: where the file goes; made if it is not there.
        soname: the name by which the loader knows it once it is loaded; None: that of the library. Only the first
            library of a name is found in a process, so tests in one process give each double another.
        defines: what it is to do, see its source.

    Returns:
        The path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / library
    source = _SOURCES / f"{library.removeprefix('lib').split('.')[0]}.c"
    words = [os.environ.get("CC", "cc"), "-std=gnu11", "-shared", "-fPIC", "-pthread", "-O1", "-g", "-Wall", "-Werror"]
    words += [f"-D{name}={value}" for name, value in defines.items()]
    words += [f"-Wl,-soname,{soname or library}", "-o", str(path), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return path
