"""Doubles of libraries for GPUs: small shared libraries in place of the CUDA driver and NCCL, compiled by the tests."""

import fcntl
import functools
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from skips import no_compiler

_SOURCES = Path(__file__).resolve().parent / "native" / "doubles"
_CORE = Path(__file__).resolve().parent.parent / "native"  # whose 16-bit floats are those of the doubles
CUDA, NCCL = "libcuda.so.1", "libnccl.so.2"
_ROOM = 512
"""Bytes for each text in a double."""


def build_double(library: str, folder: Path, *, soname: str | None = None, **defines: int | str) -> Path:
    """Compiles the double of ``CUDA`` or ``NCCL`` into a folder; without a compiler the test is skipped.

    ``soname``: the name by which the loader knows it. Only the first library of a name is found in a process.
    ``defines``: what it is to do, see its source.
    """
    texts = {"SONAME": soname or library}
    if "CUDA_DOUBLE" in defines:
        texts["CUDA_DOUBLE"] = str(defines["CUDA_DOUBLE"]).strip('"')
        defines["CUDA_DOUBLE"] = f'"{_place_of("CUDA_DOUBLE")}"'
    data = _compile(library, tuple(defines.items()))
    for name, text in texts.items():
        data = data.replace(_place_of(name).encode(), text.encode().ljust(_ROOM, b"\0"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / library
    path.write_bytes(data)
    path.chmod(0o755)
    return path


def _place_of(name: str) -> str:
    """What stands in a compiled double where a text goes."""
    return f"{name}:".ljust(_ROOM, "-")


@functools.cache
def _compile(library: str, defines: tuple[tuple[str, int | str], ...]) -> bytes:
    """A double with places for texts, in which most tests differ: a compiler takes longer than many of them."""
    if reason := no_compiler():
        pytest.skip(reason)
    source = _SOURCES / f"{library.removeprefix('lib').split('.')[0]}.c"
    words = [os.environ.get("CC", "cc"), "-std=gnu11", "-shared", "-fPIC", "-pthread", "-O1", "-g", "-Wall", "-Werror"]
    words += [f"-I{_CORE}/src", f"-I{_CORE}/include", *(f"-D{name}={value}" for name, value in defines)]
    words += [f"-Wl,-soname,{_place_of('SONAME')}", str(source)]
    # One process of the run compiles it for all; the folder is the run's own.
    made = Path(os.environ["TMPDIR"], f"double-{hashlib.sha256(repr(words).encode()).hexdigest()}")
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            command = [*words, "-o", str(part)]
            bare = {**os.environ, "LD_PRELOAD": ""}  # a sanitizer's library makes a compiler slow
            done = subprocess.run(command, env=bare, capture_output=True, text=True, check=False, timeout=120)
            if done.returncode:
                raise RuntimeError(done.stderr)
            part.rename(made)
    return made.read_bytes()
