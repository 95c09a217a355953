"""Documents, versions, error codes and leftovers, each rule with a bad sample that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import tidy_text
from tidy_files import ROOT, below, report, repository_files

import horo

TEXT_SUFFIXES = (".py", ".c", ".h", ".md", ".toml", ".txt", ".in", ".cfg", ".yaml", ".yml", "")


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def is_text(path: Path) -> bool:
    # "" stands for Makefile and the scripts of .ci; a corpus of the fuzz tests may be anything.
    return path.suffix in TEXT_SUFFIXES and path.name != "LICENSE" and "corpus" not in path.parts


def test_no_leftovers_and_no_machine_paths() -> None:
    findings = [
        line
        for path in filter(is_text, repository_files())
        for line in tidy_text.check_leftovers(path, path.read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


def test_whitespace() -> None:
    findings = [
        line
        for path in filter(is_text, repository_files())
        for line in tidy_text.check_whitespace(path, path.read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


def test_links_of_all_documents_lead_somewhere() -> None:
    documents = repository_files(".md")
    assert documents
    findings = [line for path in documents for line in tidy_text.check_links(path, path.read_text(encoding="utf-8"))]
    assert not findings, report(findings)


def test_numbers_of_decisions_are_used_once() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert names
    assert tidy_text.check_decisions(names) == []


def test_decisions_are_listed_in_the_index() -> None:
    index = read("docs", "README.md")
    missing = [path.name for path in (ROOT / "docs" / "adr").glob("*.md") if f"adr/{path.name}" not in index]
    assert missing == []


def test_changelog_native_core_and_package_have_one_version() -> None:
    native = {v for path in below("native", suffixes=(".c", ".h")) for v in tidy_text.native_versions(path.read_text())}
    assert native == {horo.__version__}
    assert tidy_text.changelog_versions(read("CHANGELOG.md"))[0] == horo.__version__


def test_every_error_code_has_a_class() -> None:
    assert tidy_text.unmapped_errors(read("native", "include", "horo.h"), read("horo", "errors.py")) == []


BAD_LINES = [
    "# TO" + "DO: later",
    "x = 1  # FIX" + "ME",
    "see /ro" + "ot/project/file",
    "path: /ho" + "me/ann/file",
    "pip install --index" + "-url x",
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_leftover_is_found(line: str) -> None:
    assert len(tidy_text.check_leftovers(Path("a.py"), f"fine\n{line}\n")) == 1


@pytest.mark.parametrize("line", ["mkstemp XXXXXX", "../wo" + "rk/x", "framework/home", "https://example.org/page"])
def test_harmless_line_is_no_leftover(line: str) -> None:
    assert tidy_text.check_leftovers(Path("a.py"), line) == []


@pytest.mark.parametrize(("text", "expected"), [("a", "newline"), ("a \n", "space"), ("\ta\n", "tab")])
def test_bad_whitespace_is_found(text: str, expected: str) -> None:
    findings = tidy_text.check_whitespace(Path("a.py"), text)
    assert len(findings) == 1
    assert expected in findings[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[a](other.md)", 0),
        ("[a](other.md#the-second-part-42)", 0),
        ("[a](https://example.org/x)", 0),
        ("# Here I am\n[a](#here-i-am)", 0),
        ("```\n[a](missing.md)\n```\n", 0),
        ("[a](missing.md)", 1),
        ("[a](other.md#missing)", 1),
        ("[a](#missing)", 1),
    ],
)
def test_broken_link_is_found(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "other.md").write_text("# Title\n## The second part, 42\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(tidy_text.check_links(page, text)) == count


@pytest.mark.parametrize("names", [["0001-a.md", "0001-b.md"], ["1-a.md"], ["0001_A.md"]])
def test_bad_numbers_of_decisions_are_found(names: list[str]) -> None:
    assert tidy_text.check_decisions(names)


def test_versions_are_read() -> None:
    assert tidy_text.changelog_versions("# x\n## [Unreleased]\n## [1.2.3] - 2026-01-01\n## 1.2.2\n") == [
        "1.2.3",
        "1.2.2",
    ]
    assert tidy_text.native_versions('return "1.2.3+abi4";') == ["1.2.3"]


def test_unmapped_error_is_found_in_both_directions() -> None:
    header = "HORO_ERR_A = -1,\nHORO_ERR_B = -2,"
    assert tidy_text.unmapped_errors(header, '"HORO_ERR_A": X, "HORO_ERR_C": Y') == ["HORO_ERR_B", "HORO_ERR_C"]


@pytest.mark.parametrize(
    ("lock", "pinned"),
    [("requirements-dev.lock", "requirements-dev.txt"), ("requirements.lock", ".ci/requirements.txt")],
)
def test_what_is_pinned_has_hashes(lock: str, pinned: str) -> None:
    locked = read(".ci", lock)
    wanted = {tidy_text.pin(line) for line in read(*pinned.split("/")).splitlines() if "==" in line}
    assert wanted <= set(tidy_text.hashed_pins(locked)), "run `make lock`"
    assert "://" not in locked


def test_a_pin_without_hashes_is_found() -> None:
    lock = "A_b==1.0 ; python_version >= '3.11' \\\n    --hash=sha256:00\nc==2\n"
    assert tidy_text.hashed_pins(lock) == ["a-b==1.0"]
    assert tidy_text.pin('A_b==1.0; python_version >= "3.11"') == "a-b==1.0"
