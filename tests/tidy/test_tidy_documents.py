"""Every page is in the index, and what is generated from the sources is current."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tidy_files import ROOT, repository_files

DOCS = ROOT / "docs"


def pages_missing_in(index: str, pages: list[str]) -> list[str]:
    """The pages, named relative to the index, that it does not link to."""
    return [page for page in pages if f"]({page})" not in index]


def test_every_page_is_listed_in_the_index() -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    pages.remove("README.md")
    assert "how-to/from-ddp.md" in pages
    assert pages_missing_in((DOCS / "README.md").read_text(encoding="utf-8"), pages) == []


def test_a_page_that_is_not_listed_is_found() -> None:
    assert pages_missing_in("[a](how-to/a.md) how-to/b.md", ["how-to/a.md", "how-to/b.md"]) == ["how-to/b.md"]


def test_every_example_is_listed() -> None:
    scripts = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert scripts
    assert pages_missing_in((ROOT / "examples" / "README.md").read_text(encoding="utf-8"), scripts) == []


def test_reference_of_the_api_is_current() -> None:
    pytest.importorskip("torch")
    path = DOCS / "reference" / "generate_api.py"
    spec = importlib.util.spec_from_file_location("generate_api", path)
    if spec is None or spec.loader is None:
        raise AssertionError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = Path(module.PAGE).read_text(encoding="utf-8")
    assert written == module.page(), f"run python {path.relative_to(ROOT)}"


def parity_findings(page: str, is_there: Callable[[str, str], bool]) -> list[str]:
    """Rows of the parity page whose state is none of its words, or that name no test, or one that is not there."""
    found = []
    for row in re.findall(r"^\| (.+) \|$", page, re.MULTILINE):
        cells = [cell.strip() for cell in row.split(" | ")]
        if cells[:2] == ["Horovod", "here"]:
            continue
        state, tests = cells[1], re.findall(r"`(tests/[^`:]+)::(\w+)`", cells[-1])
        if state not in ("same", "better", "later", "not planned"):
            found.append(f"{cells[0]}: {state!r} is no state")
        elif state in ("same", "better") and not tests:
            found.append(f"{cells[0]}: no test is named")
        found += [f"{cells[0]}: there is no {file}::{name}" for file, name in tests if not is_there(file, name)]
    return found


def has_test(file: str, name: str) -> bool:
    path = ROOT / file
    return path.is_file() and f"def {name}(" in path.read_text(encoding="utf-8")


def test_what_is_said_to_be_as_in_horovod_has_a_test() -> None:
    page = (DOCS / "reference" / "horovod-parity.md").read_text(encoding="utf-8")
    assert page.count("| better |") > 20
    assert parity_findings(page, has_test) == []


WRONG_ROWS = [
    ("| a | same | how | words |", "a: no test is named"),
    ("| a | perhaps | how | `tests/a.py::test_b` |", "a: 'perhaps' is no state"),
    ("| a | better | how | `tests/a.py::test_c` |", "a: there is no tests/a.py::test_c"),
]


@pytest.mark.parametrize(("row", "finding"), WRONG_ROWS, ids=[finding for _, finding in WRONG_ROWS])
def test_a_row_without_its_test_is_found(row: str, finding: str) -> None:
    assert parity_findings(
        f"| Horovod | here | how | shown by |\n|---|---|---|---|\n{row}\n", lambda _, name: name == "test_b"
    ) == [finding]


def broken_rows(page: str) -> list[str]:
    """Rows of tables with more cells, or fewer, than the head of their table."""
    found, cells = [], 0
    for line in re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL).splitlines():
        row = re.fullmatch(r" *\|(.*)\| *", line)
        count = len(re.split(r"(?<!\\)\|", row[1])) if row else 0
        if cells and count not in (0, cells):
            found.append(line.strip())
        cells = 0 if not row else cells or count
    return found


def test_rows_of_tables_have_the_cells_of_their_head() -> None:
    pages = repository_files(".md")
    assert DOCS / "reference" / "api.md" in pages
    assert {str(page.relative_to(ROOT)): rows for page in pages if (rows := broken_rows(page.read_text("utf-8")))} == {}


def test_a_row_that_a_bar_cuts_is_found() -> None:
    rows = ["| a | b |", "|---|---|", "| `x \\| y` | |x| |", "| c | `d \\| e` |"]
    assert broken_rows("\n".join([*rows, "", "| f |", "```", "| g | h |", "```"])) == [rows[2]]
