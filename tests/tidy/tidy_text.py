"""Rules for text and documents: each takes a path and its text and returns findings."""

from __future__ import annotations

import re
from pathlib import Path

from tidy_files import finding

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
    return re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", "", m.group(0)), text, flags=re.MULTILINE | re.DOTALL)


def check_decisions(names: list[str]) -> list[str]:
    """A number of a decision is used once; that of one that has fallen is used no more."""
    bad_form = [name for name in names if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name)]
    if bad_form:
        return [f"{name}: the form is 0001-some-words.md" for name in bad_form]
    have = [name[:4] for name in names]
    return [f"number {number} is used twice" for number in sorted(set(have)) if have.count(number) > 1]


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
