"""Every page is in the index, and what is generated from the sources is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tidy_files import ROOT

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
