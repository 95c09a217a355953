"""Gathers the documents of this repository, and the files they link to, in a folder that mkdocs can read.

    python docs/site.py FOLDER

The documents lie where a reader of a checkout looks for them, some outside docs/; a site needs them below one folder.
Links stay as they are, since everything keeps its place.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS = ("docs", "benchmarks", "examples")
STYLE = "docs/site.css"


def documents() -> list[Path]:
    below = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    return [*(ROOT / name for name in TOP), *below]


def linked(document: Path) -> list[Path]:
    """Files of the repository to which a document links; a folder stands for its README."""
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    names = [target for target in targets if not re.match(r"[a-z][a-z+.-]*:", target)]
    return [path for name in names if (path := (document.parent / name).resolve()).is_file()]


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "docs").mkdir(parents=True)
    shutil.copyfile(ROOT / STYLE, folder / STYLE)
    for document in documents():
        for path in (document, *linked(document)):
            place = folder / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
