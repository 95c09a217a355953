"""The files of the repository that the tidy checks read, how a finding is written, and words of two checks."""

import ast
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SKIPPED_FOLDERS = {"build", "dist", "__pycache__"}
KEPT_DOT_FOLDERS = {".ci"}

NOUN_CLAUSES = ("What", "Who", "Whom", "Whose", "Which", "Where", "That", "Those", "How", "Why", "When")
"""First words of a docstring or a comment that make a reader look for the noun."""


def _is_kept(folder: str) -> bool:
    if folder in SKIPPED_FOLDERS or folder.endswith(".egg-info"):
        return False
    return not folder.startswith(".") or folder in KEPT_DOT_FOLDERS


tree_of = cache(ast.parse)
"""The syntax tree of a file, which several rules walk."""


@cache
def repository_files(*suffixes: str) -> list[Path]:
    """All files below the root with one of the suffixes (all files without), built things left out.

    Walks instead of asking git, because a source archive has no git.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = sorted(name for name in subfolders if _is_kept(name))
        paths = (Path(folder, name) for name in names if name != ".git")  # a file in a linked worktree
        # A link (horo seen twice) would report everything twice.
        found += [path for path in paths if not path.is_symlink() and (not suffixes or path.suffix in suffixes)]
    return sorted(found)


def below(*folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of these top-level folders with one of the suffixes."""
    return [path for path in repository_files(*suffixes) if path.relative_to(ROOT).parts[0] in folders]


def finding(path: Path, line: int, text: str) -> str:
    """One finding, in the form that editors jump to."""
    name = path.relative_to(ROOT) if ROOT in path.parents else path
    return f"{name}:{line}: {text}"


def report(findings: list[str]) -> str:
    """All findings as the message of a failed test."""
    return f"{len(findings)} finding(s)\n" + "\n".join(findings)
