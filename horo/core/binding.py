"""The extension with the native core, or an error with the reason and the command to type."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["BUILD", "ffi", "lib", "path"]

BUILD = f"pip install -e {Path(__file__).resolve().parents[2]}"


def _reason() -> str:
    """The reason why the extension is missing, and the command that installs it."""
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if not (root / "native" / "build.py").is_file():
        return (
            f"the horo in {package} is not complete (horo._native is missing): pip install --force-reinstall "
            "horo-torch, or the path of its wheel or checkout"
        )
    here = f"{root} holds horo's source, and its extension, the native core, is not built"
    others = [folder for folder in map(Path, sys.path) if folder.resolve() != root]
    hidden = next((folder for folder in others if any((folder / "horo").glob("_native*.so"))), None)
    if hidden is not None:
        return (
            f"{here}: it hides the horo that is installed in {hidden}; start from another folder and keep this one off "
            f"PYTHONPATH, or build it: {BUILD}"
        )
    return f"{here}: {BUILD}"


try:
    from horo._native import __file__ as path
    from horo._native import ffi, lib
except ModuleNotFoundError as error:
    if error.name != "horo._native":
        raise
    raise ImportError(_reason(), name=error.name) from None
