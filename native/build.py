"""Builds the cffi binding of the native core, and the module of calls: one abi3 extension, linked with libc alone."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
HEADERS = [ROOT / "native" / "include" / name for name in ("horo.h", "horo_gpu.h", "horo_log.h", "horo_pairs.h")]

CALLS = ["native/python/calls.c", "native/python/gradients.c", "native/python/slot.c"]
"""The module ``horo._calls``, which needs Python's headers."""

COMPILE_FLAGS = [
    "-g1",  # lines of stacks; variables, which Python's own -g adds, take as long as all else of compiling
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-O3",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-pthread",
    "-ffp-contract=off",
]
# For development and CI; an installation must not fail because a newer compiler knows a new warning. -Wformat=2 has
# what distributions make an error in every extension: Debian's Python brings -Werror=format-security.
WARNING_FLAGS = ["-Wall", "-Wextra", "-Wformat=2", "-Wconversion", "-Wshadow", "-Werror"]
# They make an overflow end the process. For what is installed: a sanitizer finds more without them. FORTIFY at level 2
# checks buffers whose size the compiler knows, so a copy of a tensor costs nothing more.
HARDENING_FLAGS = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
HARDENING_LINK_FLAGS = ["-Wl,-z,relro,-z,now,-z,noexecstack"]
LINK_FLAGS = ["-pthread", "-ldl"]  # dlopen is in a library of its own up to glibc 2.33


def declarations(header: str) -> str:
    """The header as cffi reads it: without the preprocessor, the skipped part and HORO_API."""
    text = re.sub(r"/\* cffi: skip \*/.*?/\* cffi: end \*/", "", header, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace("HORO_API ", "")


def sources() -> list[str]:
    """All C files of the core, relative to the project root as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "native" / "src").rglob("*.c"))


def headers() -> list[str]:
    """The files that C files include."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "native").rglob("*.h"))


ffibuilder = FFI()
ffibuilder.cdef("\n".join(declarations(header.read_text(encoding="utf-8")) for header in HEADERS))
ffibuilder.set_source(
    "horo._native",
    "\n".join(f'#include "{header.name}"' for header in HEADERS),
    sources=[*sources(), *CALLS],
    depends=headers(),
    include_dirs=["native/include", "native/src"],
    extra_compile_args=[*COMPILE_FLAGS, *HARDENING_FLAGS],
    extra_link_args=[*LINK_FLAGS, *HARDENING_LINK_FLAGS],
    py_limited_api=True,
)
