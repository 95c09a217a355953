"""Rules for text and documents: each takes a path and its text and returns findings."""

import re
from collections.abc import Callable
from pathlib import Path

from tidy_files import NOUN_CLAUSES, finding

# Written in pieces, so that this file does not report itself.
_LEFTOVER = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
_MACHINE_PATH = re.compile(
    r"(?<![\w.*~-])/(?:" + "|".join(("ro" + "ot", "ho" + "me", "wo" + "rk", "Us" + "ers")) + r")/\w"
)
_REGISTRY = re.compile("(?:index" + r"-url|find" + r"-links|https?://\S*/sim" + r"ple\b)")


def check_leftovers(path: Path, text: str) -> list[str]:
    """No note to self, no path of one machine, no address of a package registry."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, what in (
            (_LEFTOVER, "leftover"),
            (_MACHINE_PATH, "machine path"),
            (_REGISTRY, "registry address"),
        ):
            match = pattern.search(line)
            if match:
                found.append(finding(path, number, f"{what} '{match.group(0)}'"))
    return found


def check_whitespace(path: Path, text: str) -> list[str]:
    """Ends with one newline, no tabs outside make files, nothing after the end of a line."""
    found = []
    if text and not text.endswith("\n"):
        found.append(finding(path, text.count("\n") + 1, "no newline at the end"))
    for number, line in enumerate(text.splitlines(), 1):
        if line != line.rstrip():
            found.append(finding(path, number, "space at the end of the line"))
        if "\t" in line and path.name != "Makefile":
            found.append(finding(path, number, "tab"))
    return found


def anchors(text: str) -> set[str]:
    """The anchors that the headings of a Markdown text make: lower case, spaces to hyphens, punctuation dropped."""
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", _without_fences(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_links(path: Path, text: str) -> list[str]:
    """Every relative link of a Markdown file leads to a file, and its anchor to a heading. ``path`` is absolute."""
    found = []
    for number, line in enumerate(_without_fences(text).splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", line):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name) if name else path
            if not file.exists():
                found.append(finding(path, number, f"link to {target}: no such file"))
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
                found.append(finding(path, number, f"link to {target}: no such heading"))
    return found


def _without_fences(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", lambda m: re.sub(r"[^\n]", "", m.group(0)), text, flags=re.MULTILINE | re.DOTALL)


def check_numbers(names: list[str]) -> list[str]:
    """A number of a decision is used once; that of one that has fallen is used no more."""
    bad_form = [name for name in names if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name)]
    if bad_form:
        return [f"{name}: the form is 0001-some-words.md" for name in bad_form]
    have = [name[:4] for name in names]
    return [f"number {number} is used twice" for number in sorted(set(have)) if have.count(number) > 1]


def check_decision(path: Path, text: str) -> list[str]:
    """A decision is half a page, and its title begins with a verb, not with an article or a clause."""
    title = re.match(r"# \d+\. (\w+)", text)
    found = [] if title else [finding(path, 1, "the first line is not '# N. Title'")]
    if title and title[1] in {"A", "An", "The", "There", "All", "Every", "Each", "No", "Nobody", *NOUN_CLAUSES}:
        found.append(finding(path, 1, f"the title begins with '{title[1]}', not with a verb"))
    words = len(text.split())
    return found + ([finding(path, 1, f"{words} words, more than 400")] if words > 400 else [])


def check_tables(path: Path, text: str) -> list[str]:
    """Rows of tables have as many cells as the head of their table."""
    found, cells = [], 0
    for number, line in enumerate(_without_fences(text).splitlines(), 1):
        row = re.fullmatch(r" *\|(.*)\| *", line)
        count = len(re.split(r"(?<!\\)\|", row[1])) if row else 0
        if cells and count not in (0, cells):
            found.append(finding(path, number, f"{count} cells, and the head has {cells}"))
        cells = 0 if not row else cells or count
    return found


def missing_links(index: str, pages: list[str]) -> list[str]:
    """The pages, named relative to the index, that it does not link to."""
    return [page for page in pages if f"]({page})" not in index]


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


def changelog_versions(text: str) -> list[str]:
    """The released and coming versions of a keep-a-changelog file, newest first."""
    return re.findall(r"^## \[?(\d+\.\d+\.\d+[^\]\s]*)\]?", text, flags=re.MULTILINE)


def native_versions(text: str) -> list[str]:
    """What horo_version() can return according to its source, without the protocol number."""
    return re.findall(r'"(\d+\.\d+\.\d+)\+abi\d+"', text)


def unmapped_errors(header: str, errors_module: str) -> list[str]:
    """The HORO_ERR_ codes of the header that horo/errors.py gives no class."""
    codes = set(re.findall(r"\b(HORO_ERR_\w+)\s*=", header))
    mapped = set(re.findall(r'"(HORO_ERR_\w+)"\s*:', errors_module))
    return sorted(codes ^ mapped)


def pin(requirement: str) -> str:
    """``name==version`` of a line of requirements, with the name as it is compared."""
    name, _, version = requirement.partition(";")[0].strip().partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version.strip()}"


def hashed_pins(lock: str) -> list[str]:
    """The pins of a lock file that have at least one hash."""
    return [pin(match[1]) for match in re.finditer(r"^([\w.-]+==\S+)[^\\\n]*\\\n\s+--hash=sha256:", lock, re.MULTILINE)]
