"""Documents, docstrings and messages are plain English, and the documents get no longer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tidy_words
from tidy_files import NOUN_CLAUSES, ROOT, below, finding, report, repository_files

GENERATED = {"docs/performance.md", "docs/reference/api.md", "docs/reference/environment.md"}
"""Pages whose words are those of their sources."""

NOT_YET = {
    "docs/explanation/gpu-testing.md",
    "docs/how-to/autotune.md",
    "docs/how-to/gpus.md",
    "docs/how-to/timeline.md",
}
"""Pages that are not rewritten yet. The list only shrinks: rewrite a page, and take it out."""

FINDINGS_IN_SOURCES = 28
"""Findings in docstrings and messages of horo/ and runner/: at most so many, and never more again."""

WORDS_IN_DOCS = 71_000
"""Words of all pages below docs/, as ``wc -w`` counts them. The ceiling only falls; the target is 60 000."""


def findings_of_pages() -> dict[str, list[str]]:
    """The findings of each page that has any, by its path."""
    pages = {path.relative_to(ROOT).as_posix(): path for path in repository_files(".md")}
    return {
        name: [finding(path, *item) for item in tidy_words.check_page(path.read_text(encoding="utf-8"))]
        for name, path in pages.items()
        if name not in GENERATED
    }


def test_pages_that_are_rewritten_are_plain() -> None:
    findings = [line for name, lines in findings_of_pages().items() if name not in NOT_YET for line in lines]
    assert not findings, report(findings)


def test_the_list_of_pages_not_rewritten_only_shrinks() -> None:
    found = findings_of_pages()
    plain = sorted(name for name in NOT_YET if not found.get(name))
    assert plain == [], "these have no findings, or are gone: take them out of NOT_YET"


def test_docstrings_and_messages_get_no_worse() -> None:
    findings = [
        finding(path, *item)
        for path in below("horo", "runner", suffixes=(".py",))
        for item in tidy_words.check_source(path.read_text(encoding="utf-8"))
    ]
    assert len(findings) <= FINDINGS_IN_SOURCES, report(findings)
    assert len(findings) > FINDINGS_IN_SOURCES - 25, f"FINDINGS_IN_SOURCES can be {len(findings)}"


def test_documents_get_no_longer() -> None:
    words = sum(tidy_words.word_count(path.read_text(encoding="utf-8")) for path in Path(ROOT, "docs").rglob("*.md"))
    assert words <= WORDS_IN_DOCS, f"{words} words: shorten a page before you lengthen another"
    assert words > WORDS_IN_DOCS - 6000, f"WORDS_IN_DOCS can be {words}"


WORDS_OF_A_DECISION = 400


def findings_of_decision(page: str) -> list[str]:
    """A decision is half a page, and its title begins with a verb, not with an article or a clause."""
    title = re.match(r"# \d+\. (\w+)", page)
    found = [] if title else ["the first line is not '# N. Title'"]
    if title and title[1] in {"A", "An", "The", "There", "All", "Every", "Each", "No", "Nobody", *NOUN_CLAUSES}:
        found.append(f"the title begins with '{title[1]}', not with a verb")
    words = tidy_words.word_count(page)
    return found + ([f"{words} words, more than {WORDS_OF_A_DECISION}"] if words > WORDS_OF_A_DECISION else [])


def test_decisions_are_imperatives_of_half_a_page() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert pages
    assert {page.name: found for page in pages if (found := findings_of_decision(page.read_text("utf-8")))} == {}


@pytest.mark.parametrize("page", ["# 1. Nobody drives\n", "# A title\n", "# 2. Write\n" + "word " * 400])
def test_a_bad_decision_is_found(page: str) -> None:
    assert len(findings_of_decision(page)) == 1


BAD = [
    "The rank says that it is late.",
    "Rank 0 is told of the loss.",
    "A kernel stands in front of the copy.",
    "When the driver comes to the record, it stops.",
    "It is known what word that rank has.",
    "What a rank has submitted goes on.",
    "Where memory is short, nothing is kept.",
    "A set that is gone has no deadline, since none is set.",
    "One " + "word " * 40 + "too many.",
]


@pytest.mark.parametrize("sentence", BAD)
def test_a_bad_sentence_is_found(sentence: str) -> None:
    assert tidy_words.check_page(f"# Title\n\nA page.\n{sentence}\n" if len(sentence) < 100 else f"{sentence}\n")
    assert tidy_words.check_source(f'"""A module.\n\n{sentence}\n"""\n')


GOOD = [
    "The rank logs a warning when another rank is late.",
    "What does a rank do?",
    "Look for the file. `the rank says what word that rank has`",
    "```\nWhat a rank has\n```",
    "| option | " + "a cell of a table may be long " * 6 + "|",
    "1. " + "Short sentences. " * 5 + "\n2. Another item.\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_plain_text_has_no_findings(text: str) -> None:
    assert tidy_words.check_page(text + "\n") == []


def test_a_message_is_checked() -> None:
    assert tidy_words.check_source("raise ValueError(f'the host {host} was told of the end')\n") == [
        (1, "'was told': name who does what")
    ]
    assert tidy_words.check_source("NAMES = {'is told': 1}\n") == []
