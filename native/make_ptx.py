"""Makes native/src/device/kernels.ptx of the kernels beside it, with NVIDIA's compiler at run time (NVRTC). No GPU is
needed.

    pip install nvidia-cuda-nvrtc-cu11==11.8.89 nvidia-cuda-nvcc-cu11==11.8.89
    python native/make_ptx.py

The second package has ptxas, which checks the text; without it that is left out. The core is built without either: the
text is committed, becomes a part of the core, and the driver of a GPU translates it when it is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["NVRTC_VERSION", "PTX", "assemble", "digest", "find_nvrtc", "find_ptxas", "make_ptx"]

DEVICE = Path(__file__).resolve().parent / "src" / "device"
PTX = DEVICE / "kernels.ptx"
SOURCES = ["pack.cu", "adasum.cu"]
HEADERS = ["kernels.cuh", "pack_piece.h", "adasum_piece.h"]

NVRTC_VERSION = (11, 8)
"""Another version writes other text for the same kernels."""
TARGET = "compute_52"
"""The oldest that this compiler makes without a warning; newer GPUs take it as well."""
PTX_VERSION = "6.0"
"""The version that the text says it needs, in place of the compiler's own 7.8: the oldest driver that horo takes, of
CUDA 11.4, reads 7.4. ptxas says whether that is enough."""

_OPTIONS = [f"--gpu-architecture={TARGET}", "--fmad=false", "--std=c++11", "-default-device"]
_HEADER = """\
// Made by native/make_ptx.py; not to be changed by hand. Of sources whose SHA-256 is
// {digest}
"""


def _folder(package: str) -> Path | None:
    """The folder where pip has put a part of CUDA."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{package}")
    except ModuleNotFoundError:
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def digest() -> str:
    """The digest of the sources, by which the text says what it was made of."""
    return hashlib.sha256(b"".join((DEVICE / name).read_bytes() for name in SOURCES + HEADERS)).hexdigest()


def find_nvrtc() -> Path | None:
    """The library of `NVRTC_VERSION`'s major version that pip has installed."""
    folder = _folder("cuda_nvrtc")
    found = sorted(folder.glob(f"lib/libnvrtc.so.{NVRTC_VERSION[0]}.*")) if folder is not None else []
    return found[0] if found else None


def find_ptxas() -> Path | None:
    """The assembler that pip has installed."""
    folder = _folder("cuda_nvcc")
    path = folder / "bin" / "ptxas" if folder is not None else None
    return path if path is not None and path.exists() else None


def make_ptx(library: Path) -> str:
    """The text of kernels.ptx.

    Raises:
        RuntimeError: with the compiler's words, or because it is of another version.
    """
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(code: int) -> None:
        if code:
            raise RuntimeError(nvrtc.nvrtcGetErrorString(code).decode())

    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    if (major.value, minor.value) != NVRTC_VERSION:
        raise RuntimeError(f"{library} is version {major.value}.{minor.value}, not {NVRTC_VERSION}")
    program = ctypes.c_void_p()
    files = SOURCES + HEADERS
    texts = (ctypes.c_char_p * len(files))(*((DEVICE / name).read_bytes() for name in files))
    names = (ctypes.c_char_p * len(files))(*(f"device/{name}".encode() for name in files))
    all_of_them = "".join(f'#include "device/{name}"\n' for name in SOURCES).encode()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), all_of_them, b"kernels.cu", len(files), texts, names))
    options = (ctypes.c_char_p * len(_OPTIONS))(*(option.encode() for option in _OPTIONS))
    code = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), options)
    if code:
        raise RuntimeError(_text_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
    ptx = _text_of(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    lines = [line.rstrip() for line in ptx.splitlines() if line.strip() and not line.startswith("//")]
    text = "\n".join(lines) + "\n"
    return _HEADER.format(digest=digest()) + re.sub(
        r"^\.version .*$", f".version {PTX_VERSION}", text, count=1, flags=re.MULTILINE
    )


def _text_of(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    get(program, room)
    return room.value.decode()


def assemble(ptxas: Path, text: str, target: str = "sm_52") -> str:
    """The objections of ptxas to the text; empty: it has none."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernels.ptx")
        source.write_text(text, encoding="utf-8")
        words = [str(ptxas), f"--gpu-name={target}", "--warning-as-error", "-o", str(Path(folder, "kernels.cubin"))]
        words.append(str(source))
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return (done.stdout + done.stderr).strip() or (f"it ended with {done.returncode}" if done.returncode else "")


def main() -> None:
    library = find_nvrtc()
    if library is None:
        sys.exit("NVRTC is not there: pip install nvidia-cuda-nvrtc-cu11==11.8.89")
    text = make_ptx(library)
    ptxas = find_ptxas()
    if ptxas is None:
        print("ptxas is not there, so the text is not checked")
    else:
        complaint = assemble(ptxas, text)
        if complaint:
            sys.exit(complaint)
    PTX.write_text(text, encoding="utf-8")
    print(f"{PTX}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
