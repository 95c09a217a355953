"""The fenced blocks of a Markdown page.

The first word after the fence is the language, all that a reader's browser looks at. What follows says how the block
is tested: ``script=NAME`` is a whole script with a test of its own; ``fragment`` is compiled, not run. Other Python
blocks run, see ``document_rank.py``.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = [ROOT / "README.md", *HOW_TO, ROOT / "docs" / "reference" / "hororun.md"]
"""What a user reads and copies from; ``docs/reference/api.md`` is made of docstrings, whose examples run elsewhere."""


class Block(NamedTuple):
    page: Path
    line: int
    """Of the first line of the code, from 1."""
    language: str
    mark: str
    code: str

    def compiled(self) -> object:
        """The code, with the page and its lines in tracebacks."""
        return compile("\n" * (self.line - 1) + self.code, str(self.page), "exec")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```(\w*) ?(\S*)\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL):
        indent, language, mark, code = match.groups()
        plain = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        found.append(Block(page, text.count("\n", 0, match.start(4)) + 1, language, mark, plain))
    return found


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


def runs_here(block: Block) -> bool:
    """Whether the block is run as it stands, and this torch has what it uses."""
    if block.mark or ("scaler" in block.code and not hasattr(torch.amp, "GradScaler")):
        return False
    try:
        return ".numpy()" not in block.code or torch.ones(1).numpy() is not None
    except RuntimeError:  # torch cannot use the numpy that is installed
        return False
