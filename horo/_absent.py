"""Gives the failed import of a missing module an error that states the reason and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["explain_imports", "explain_part"]

_PARTS = {"horo._native": "its extension, the native core, is not built", "horo.runner": "it has no launcher"}
"""Parts that a source folder may lack."""


class _Finder:
    """An import finder that finds no module. Raises ImportError if ``explain`` returns a message for the module."""

    def __init__(self, explain: Callable[[str], str]) -> None:
        self._explain = explain

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        text = self._explain(fullname)
        if text:
            raise ImportError(text, name=fullname)


def explain_imports(explain: Callable[[str], str]) -> None:
    """Registers ``explain``: from a missing module's name it makes the message of the ImportError, or an empty text."""
    sys.meta_path.append(_Finder(explain))


def explain_part(name: str) -> str:
    """The reason why a part of horo is missing, and the command that installs it; empty for any other module."""
    if name not in _PARTS:
        return ""
    from pathlib import Path  # noqa: PLC0415 - import horo stays light

    package = Path(__file__).resolve().parent
    root = package.parent
    if not (root / "native" / "build.py").is_file():
        return (
            f"the horo in {package} is not complete ({name} is missing): pip install --force-reinstall horo-torch, or "
            "the path of its wheel or checkout"
        )
    here = f"{root} holds horo's source, and {_PARTS[name]}"
    others = [folder for folder in map(Path, sys.path) if folder.resolve() != root]
    hidden = next((folder for folder in others if any((folder / "horo").glob("_native*.so"))), None)
    if hidden is not None:
        return (
            f"{here}: it hides the horo that is installed in {hidden}; start from another folder and keep this one off "
            f"PYTHONPATH, or build it: pip install -e {root}"
        )
    return f"{here}: pip install -e {root}"
