"""Modules that are not there: an import that finds none says why, where horo knows more than Python does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["explain_imports", "explain_part"]

_PARTS = {"horo._native": "its extension, the native core, is not built", "horo.runner": "it has no launcher"}
"""Parts that a source folder may lack."""


class _Finder:
    """Raises ImportError for a module that ``explain`` has a sentence about; finds nothing."""

    def __init__(self, explain: Callable[[str], str]) -> None:
        self._explain = explain

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        text = self._explain(fullname)
        if text:
            raise ImportError(text, name=fullname)


def explain_imports(explain: Callable[[str], str]) -> None:
    """From now on ``explain`` is asked about modules that were found nowhere: for a sentence, or an empty one."""
    sys.meta_path.append(_Finder(explain))


def explain_part(name: str) -> str:
    """Why a part of horo is missing, and what to type."""
    if name not in _PARTS:
        return ""
    from pathlib import Path  # noqa: PLC0415 - import horo stays light

    package = Path(__file__).resolve().parent
    root = package.parent
    if not (root / "native" / "build.py").is_file():
        return f"the horo in {package} is not complete ({name} is missing): pip install --force-reinstall horo"
    here = f"{root} holds horo's source, and {_PARTS[name]}"
    others = [folder for folder in map(Path, sys.path) if folder.resolve() != root]
    hidden = next((folder for folder in others if any((folder / "horo").glob("_native*.so"))), None)
    if hidden is not None:
        return (
            f"{here}: it hides the horo that is installed in {hidden}; start from another folder and keep this one off "
            f"PYTHONPATH, or build it: pip install -e {root}"
        )
    return f"{here}: pip install -e {root}"
