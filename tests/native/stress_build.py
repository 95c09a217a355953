"""Builds the stress program and runs it: `stress_build.py [--seed N] [--seconds S] ...`.

Its options stand in tests/native/stress/main.c.

It is the core and the files of tests/native/stress in one program, without Python. HORO_SANITIZE chooses the flavour,
as it does for the tests, with whose module it shares the core's object files.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native_build
from native_build import FLAVOUR, ROOT, SANITIZE_FLAGS
from sanitize import ADDR_NO_RANDOMIZE, OPTIONS

__all__ = ["build", "environment", "main"]

STRESS = Path(__file__).resolve().parent / "stress"


def _digest() -> str:
    """Of everything that the program is made from."""
    digest = hashlib.sha256(FLAVOUR.encode())
    own = [path for path in STRESS.iterdir() if path.suffix in {".c", ".h"}]
    for path in [Path(__file__), *native_build.inputs(), *sorted(own)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile(folder: Path, program: Path) -> None:
    """All own files at once; raises subprocess.CalledProcessError, the compiler has printed why."""
    compiler = os.environ.get("CC", "cc").split()
    wanted = native_build.native_build
    flags = [*wanted.COMPILE_FLAGS, "-g", *wanted.WARNING_FLAGS, *SANITIZE_FLAGS[FLAVOUR]]
    flags += ["-O2", f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src'}"]

    def compile_one(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(made)], check=True, timeout=300)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        own = list(pool.map(compile_one, sorted(STRESS.glob("*.c"))))
    objects = [*own, *map(str, native_build.core_objects())]
    link = [*compiler, *SANITIZE_FLAGS[FLAVOUR], *objects, "-pthread", "-lm", "-ldl", "-o", str(program)]
    subprocess.run(link, check=True, timeout=120)


def build() -> Path:
    """Compiles if anything has changed; safe under pytest-xdist. Returns the path of the program."""
    folder = ROOT / "build" / f"stress-{FLAVOUR or 'plain'}"
    folder.mkdir(parents=True, exist_ok=True)
    digest = _digest()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, program = folder / "stamp", folder / "stress"
        if not program.exists() or not stamp.exists() or stamp.read_text() != digest:
            _compile(folder, program)
            stamp.write_text(digest)
    return program


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """For the program: the sanitizer is linked into it, so nothing must be loaded before."""
    result = {**OPTIONS, **base}
    result.pop("LD_PRELOAD", None)
    return result


def main(arguments: list[str]) -> None:
    """Becomes the program."""
    program = build()
    if FLAVOUR == "thread":
        ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)  # see sanitize.py
    os.execve(program, [str(program), *arguments], environment(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
