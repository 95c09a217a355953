"""Builds the core together with the shims of tests/native/shim into one cffi module for tests.

The shims expose single parts (kernels, wire, transports) that the public header rightly hides.
HORO_SANITIZE=address|thread chooses the flavour; each has a folder of its own below build/.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from cffi import FFI
from setuptools import Distribution

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "native"))
from parallel import ParallelBuild  # noqa: E402  (native/parallel.py)

import build as native_build  # noqa: E402  (native/build.py)

CHECK_FLAGS = ["-DHR_CHECK_QUIET=1"]
"""The engine takes every turn that it would spare, and ends the process if one moves."""
SHIM = Path(__file__).resolve().parent / "shim"
SANITIZE_FLAGS = {
    "": [],
    # Both in one run, since they go together. Python's own flags, which distutils passes on, have -fwrapv: with it,
    # signed overflow is no fault to report.
    # -O1 comes behind -O2: with as many checks, the vector kernels alone took a quarter of a minute longer to compile.
    "address": [
        *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        *("-fno-omit-frame-pointer", "-fno-wrapv"),
    ],
    "thread": ["-O1", "-fsanitize=thread"],
}
FLAVOUR = os.environ.get("HORO_SANITIZE", "")
if FLAVOUR not in SANITIZE_FLAGS:
    raise ValueError(f"HORO_SANITIZE is {FLAVOUR!r}, it must be empty, address or thread")

_FOLDER = ROOT / "build" / f"native-test-{FLAVOUR or 'plain'}"
_LIBRARY = _FOLDER / "_native_test.abi3.so"
_STAMP = _FOLDER / "stamp"


def inputs() -> list[Path]:
    """What the module is made from."""
    folders = [ROOT / "native", SHIM]
    found = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in {".c", ".h", ".py"})
    return [Path(__file__), *found]


def is_built() -> bool:
    """Whether nothing has changed since it was compiled."""
    return _built_from() == _digest()


def build() -> Path:
    """Compiles if anything has changed; safe under pytest-xdist. Returns the path of the module."""
    digest = _digest()
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _built_from() != digest:
            _compile(_FOLDER, SANITIZE_FLAGS[FLAVOUR])
            _STAMP.write_text(digest)
    return _LIBRARY


@functools.cache
def load() -> ModuleType:
    """Imports the module, compiled if anything has changed."""
    library = build()
    spec = importlib.util.spec_from_file_location("_native_test", library)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {library}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built_from() -> str:
    """The digest of what the module there was made from; empty: there is none."""
    return _STAMP.read_text() if _LIBRARY.exists() and _STAMP.exists() else ""


def _digest() -> str:
    digest = hashlib.sha256(FLAVOUR.encode())
    for path in inputs():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile(folder: Path, flags: list[str]) -> None:
    ffi = FFI()
    headers = [*native_build.HEADERS, SHIM / "shim.h"]
    ffi.cdef("\n".join(native_build.declarations(h.read_text(encoding="utf-8")) for h in headers))
    ffi.set_source(
        "_native_test",
        "\n".join(f'#include "{h.name}"' for h in headers),
        sources=[
            *(str(ROOT / source) for source in (*native_build.sources(), *native_build.CALLS)),
            *(str(path) for path in sorted(SHIM.glob("*.c"))),
        ],
        include_dirs=[str(ROOT / "native/include"), str(ROOT / "native/src"), str(SHIM)],
        extra_compile_args=[
            *(*native_build.COMPILE_FLAGS, "-O2"),
            *(*native_build.WARNING_FLAGS, *CHECK_FLAGS, *flags),
        ],
        extra_link_args=[*native_build.LINK_FLAGS, *flags],
        py_limited_api=True,
    )
    extension = ffi.distutils_extension(str(folder), verbose=False)
    builder = ParallelBuild(Distribution({"ext_modules": [extension]}))
    builder.build_temp = str(folder)
    builder.build_lib = str(folder)
    builder.force = True  # something has changed, and it knows nothing of headers
    builder.ensure_finalized()
    builder.run()
