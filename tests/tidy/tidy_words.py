"""Rules for plain English: each function takes a text and returns findings as (line, words).

Components do not speak, hear or want; a sentence begins with its subject, has at most 35 words and one
subordinate clause. Regular expressions cannot know all of that, so these find the common habits with few
false alarms.
"""

import ast
import re
from collections.abc import Iterator

from tidy_files import tree_of

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
