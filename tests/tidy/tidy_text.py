"""Rules for text, documents and plain English: each takes a text, some its path too, and returns findings.

In plain English components do not speak, hear or want; a sentence begins with its subject, has at most 35 words and
one subordinate clause. Regular expressions cannot know all of that, so these find the common habits with few false
alarms.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tidy_files import NOUN_CLAUSES, finding, tree_of

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


MAX_SENTENCE_WORDS = 35
MAX_COLUMNS = 120

Finding = tuple[int, str]

_COMPONENTS = (
    "horo|hororun|torchrun|mpirun|srun|ssh|torch|Slurm|Python|MPI|NCCL|CUDA|glibc|Linux|autograd|"
    "(?i:the |this |that |each |every |another |a |an |its |their |whose |no |which |one |other )+"
    "(?:[a-z]+ )?"
    "(?:ranks?|threads?|process(?:es)?|hosts?|leaders?|roots?|cores?|GPUs?|drivers?|kernels?|tensors?|messages?|"
    "records?|errors?|logs?|lines?|pages?|tables?|options?|flags?|variables?|settings?|words?|marks?|agents?|jobs?|"
    "launchers?|networks?|sockets?|links?|schedulers?|optimizers?|handlers?|calls?|requests?|reports?|warnings?|"
    "sentences?|stores?|timelines?|files?|batch(?:es)?|names?|coordinators?|engines?|backends?)"
)
_PERSONAL = "says?|said|tells?|told|hears?|heard|blames?|blamed|wants?|wanted|believes?|thinks?|minds?|asks nobody"
_HABITS = (
    (re.compile(rf"\b(?:{_COMPONENTS}) (?:{_PERSONAL})\b"), "a component does not act as a person"),
    (re.compile(r"\b(?:is|are|was|were|be|been|being) (?:told|heard|blamed|wanted)\b"), "name who does what"),
    (re.compile(r"\b(?:is|are|was|were|be|been) said (?!to be\b)"), "name who does what"),
    (re.compile(rf"\b(?:{_COMPONENTS}) (?:comes?|came) to (?!a stop)"), "`comes to`: name what happens"),
    (re.compile(rf"\b(?:{_COMPONENTS}) (?:stands?|stood) (?:in|at|on|beside|behind)\b"), "`stands`: use `is`"),
    (re.compile(rf"\b(?:{_COMPONENTS}) looks? (?:for|at|after|round|whether)\b"), "`looks`: name what it reads"),
    (re.compile(r"\bwhat (?:\w+ ){1,3}that\b", re.IGNORECASE), "`what X that`: use a noun"),
    (
        re.compile(r"\b(?:(?<!there )is none\b(?! of)|none is\b|nobody who|is no cost of|not without)"),
        "not by negation",
    ),
)
_BAD_START = re.compile(r"(?:What|Who|Whom|Whose|Whoever|Whatever|Where) (?!.*\?$)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|No|Fig)\.$")


def habits(text: str, first_line: int = 1) -> list[Finding]:
    """Words of a text of sentences that a component does not do, and noun clauses in the place of nouns."""
    found = []
    for pattern, rule in _HABITS:
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.start())
            found.append((line, f"'{' '.join(match.group(0).split())}': {rule}"))
    return found


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a text, with the offset at which each begins."""
    begin = 0
    for match in re.finditer(r"[.!?:](?=[\s)]|$)\s*|\n\s*\n", text):
        words = text[begin : match.end()].strip()
        if _ABBREVIATION.search(words):
            continue
        if words:
            yield begin, words
        begin = match.end()
    if text[begin:].strip():
        yield begin, text[begin:].strip()


def long_sentences(text: str, first_line: int = 1) -> list[Finding]:
    """Sentences of more words than one reads at once, and those that begin with a clause in the place of a noun."""
    found = []
    for offset, sentence in sentences(text):
        count = len(sentence.split())
        line = first_line + text.count("\n", 0, offset)
        if count > MAX_SENTENCE_WORDS:
            found.append((line, f"a sentence of {count} words: '{' '.join(sentence.split()[:6])} ...'"))
        if _BAD_START.match(" ".join(sentence.split())):
            found.append((line, f"'{' '.join(sentence.split()[:4])} ...': begin with the noun, `if` or `when`"))
    return found


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Prose of a Markdown page, item by item, without fences, headings, comments and tables, with its first line.

    Code becomes one word, and a link its text.
    """
    fence, comment = False, False
    block: list[str] = []
    begin = 1
    for number, line in enumerate([*page.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fence = not fence
        comment = comment or stripped.startswith("<!--")
        is_item = re.match(r"([*-]|\d+\.) ", stripped) is not None
        ends = fence or comment or not stripped or stripped.startswith(("#", "|", "```", "<", "!["))
        if (ends or is_item) and block:
            yield begin, _without_code("\n".join(block))
            block = []
        if not ends:
            if not block:
                begin = number
            block.append(line)
        if comment and stripped.endswith("-->"):
            comment = False


def _without_code(text: str) -> str:
    text = re.sub(r"`[^`]+`", lambda match: "code" + "\n" * match.group(0).count("\n"), text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^\s*([*-]|\d+\.) ", "", text).replace("**", "").replace("*", "")


def table_cells(page: str) -> Iterator[tuple[int, str]]:
    """The cells of tables, with their line."""
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("|"):
            yield from ((number, _without_code(cell.strip())) for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def check_page(page: str) -> list[Finding]:
    """All findings of a Markdown page: habits, long sentences and long lines outside tables."""
    found = [item for line, text in paragraphs(page) for item in habits(text, line) + long_sentences(text, line)]
    found += [item for line, cell in table_cells(page) for item in habits(cell, line)]
    fence = False
    for number, line in enumerate(page.splitlines(), 1):
        fence ^= line.lstrip().startswith("```")
        if len(line) > MAX_COLUMNS and not fence and not line.lstrip().startswith(("|", "![", "[")):
            found.append((number, f"{len(line)} columns"))
    return sorted(set(found))


def check_source(source: str) -> list[Finding]:
    """Findings in docstrings, and in the texts that a Python file raises, logs or prints."""
    found = []
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                line = node.body[0].lineno
                found += [item for block in _docstring_blocks(text) for item in long_sentences(block, line)]
                found += habits(text, line)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and not isinstance(node, ast.FormattedValue):
            text = _text_of(node)
            if text.count(" ") >= 3:
                found += habits(text, node.lineno)
    return sorted(set(found))


def _docstring_blocks(text: str) -> Iterator[str]:
    prose = re.split(r"^\s*(?:Args|Returns|Raises|Example|Examples|Yields|Attributes):\s*$", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", prose[0]):
        if not re.search(r">>>|::|\||[├└│]|\S {3,}\S", block):
            yield re.sub(r"``?[^`]+``?", "code", block)


def _text_of(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = (part.value if isinstance(part, ast.Constant) else "value" for part in node.values)
    return "".join(str(part) for part in parts)
