"""Rules for C that need no compiler: each takes a path and its text and returns findings.

The reader is a brace counter over text without comments, strings and preprocessor lines, which is enough because
clang-format-shaped C has every definition at depth 0.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidy_files import NOUN_CLAUSES, finding

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 120

# Which folders of native/src a folder may include from (its own always). Arrows point down only; context.c, the
# composition root, sees all. A new folder needs a line here.
MAY_INCLUDE: dict[str, set[str]] = {
    "base": set(),
    "kernel": {"base"},
    "wire": {"base"},
    "arena": {"base", "kernel"},
    "mpi": {"base"},
    "device": {"base"},
    "transport": {"base", "mpi"},
    "node": {"base", "kernel", "arena", "mpi", "transport"},
    "cross": {"base", "kernel", "transport"},
    "collective": {"base", "kernel", "arena", "mpi", "transport", "node", "cross"},
    "backend": {"base", "kernel", "arena", "mpi", "transport", "node", "collective", "device"},
    "engine": {"base", "kernel", "wire", "arena", "mpi", "transport", "node", "collective", "backend", "device"},
}

HAVE_ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "engine": {
        "drive": (), "requests": ("drive",), "agree": (), "announce": ("requests",), "round": ("drive", "requests"),
        "lead": ("drive", "agree", "announce", "round"), "execute": ("group", "requests"),
        "group": ("drive", "requests", "announce", "round", "lead", "execute"), "gpu": ("engine.h",),
        "membership": ("engine.h", "gpu"), "report": ("engine.h", "gpu"),
        "pairs": ("drive", "requests", "lead"),
    }
}  # fmt: skip
"""Per folder that is divided, its rooms, and for each the rooms and headers of it that it may include from."""
ROOT_FILES = {"context.c"}

BANNED_CALLS: dict[str, str] = {
    **dict.fromkeys(
        ("strcpy", "strcat", "strncpy", "strncat", "sprintf", "vsprintf", "gets"), "use snprintf or memcpy"
    ),
    **dict.fromkeys(("atoi", "atol", "atoll", "atof"), "cannot report an error; use strtol and check"),
    **dict.fromkeys(("rand", "srand", "random", "strtok", "localtime", "gmtime"), "hidden global state"),
    **dict.fromkeys(("alloca",), "unbounded stack"),
    **dict.fromkeys(("gethostbyname", "gethostbyaddr", "getaddrinfo", "getnameinfo"), "no name service in C"),
    **dict.fromkeys(("system", "popen", "fork", "vfork"), "no processes in C"),
    **dict.fromkeys(("exit", "_exit", "abort"), "a library returns a status"),
    **dict.fromkeys(("printf", "puts", "putchar", "perror"), "use hr_log"),
    **dict.fromkeys(("getenv", "setenv", "putenv"), "horo/config/table.py reads the environment"),
    **dict.fromkeys(("setjmp", "longjmp"), "return a status"),
}

# Attributes, and macros that stand before a definition and expand to a whole one.
_WHOLE_MACROS = r"^(?:[A-Z][A-Z0-9_]*(?:\([^()]*\)\s*|[ ]*\n\s*))+"
_WITHOUT_NAME = re.compile(rf"__attribute__\s*\(\(.*?\)\)|_Static_assert|{_WHOLE_MACROS}")
_STATIC = re.compile(r"(?:inline\s+)?static\b|HR_INLINE\b")
_THINGS_AND_PERSONS = ("What", "Who", "Whom")
COMMENT = r"//[^\n]*|/\*.*?\*/"
LITERAL = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
_CONTROL = {"if", "for", "while", "switch", "do", "else"}


@dataclass(frozen=True)
class Item:
    """Something at file scope: ``head`` is its text up to the body, ``body`` the text between its braces or None."""

    head: str
    body: str | None
    first_line: int
    last_line: int

    @property
    def function_name(self) -> str | None:
        """Name of the function that this defines, or None."""
        if self.body is None or "=" in self.head:
            return None
        match = re.search(r"(\w+)\s*\(", _WITHOUT_NAME.sub("", self.head))
        return match.group(1) if match and match.group(1) not in _CONTROL else None


def code_only(text: str) -> str:
    """The text with comments, literals and preprocessor lines blanked; line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group(0))

    text = re.sub(rf"{COMMENT}|{LITERAL}", blank, text, flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)


def items(code: str) -> Iterator[Item]:
    """Definitions and declarations at file scope of ``code_only`` text."""
    start = depth = body_start = 0
    body: str | None = None
    for position, character in enumerate(code):
        if character == "{":
            if depth == 0:
                body_start = position
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                body = code[body_start + 1 : position]
        ends = depth == 0 and (character == ";" or (character == "}" and _is_function(code[start:body_start])))
        if ends:
            head = code[start:body_start] if body is not None else code[start:position]
            if body is not None and character == ";":
                head += code[body_start + len(body) + 2 : position]
            begin = start + len(code[start:position]) - len(code[start:position].lstrip())
            yield Item(head.strip(), body, code.count("\n", 0, begin) + 1, code.count("\n", 0, position) + 1)
            start, body = position + 1, None


def _is_function(head: str) -> bool:
    return "=" not in head and ")" in head and not re.match(r"\s*(typedef|struct\s+\w+\s*$|enum|union\s+\w+\s*$)", head)


def is_static(item: Item) -> bool:
    """Whether only the file itself sees the function."""
    return _STATIC.match(_WITHOUT_NAME.sub("", item.head)) is not None


def check_sizes(path: Path, text: str) -> list[str]:
    """Files under 500 lines, functions of at most 70, lines of at most 120 columns."""
    found = []
    lines = text.splitlines()
    if len(lines) >= FILE_LINES_MAX:
        found.append(finding(path, len(lines), f"{len(lines)} lines; files stay under {FILE_LINES_MAX}"))
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_COLUMNS_MAX:
            found.append(finding(path, number, f"{len(line)} columns; at most {LINE_COLUMNS_MAX}"))
    for item in items(code_only(text)):
        length = item.last_line - item.first_line + 1
        if item.function_name and length > FUNCTION_LINES_MAX:
            found.append(
                finding(path, item.first_line, f"{item.function_name} has {length} lines; at most {FUNCTION_LINES_MAX}")
            )
    return found


def check_comments(path: Path, text: str) -> list[str]:
    """A comment before a function, a struct or a field begins with its subject or with a verb, as a docstring does.

    Other comments may begin with where, how or when, but not with a clause that stands for a thing or a person.
    """
    found = []
    in_bodies = [
        range(item.first_line, item.last_line + 1) for item in items(code_only(text)) if item.function_name is not None
    ]
    for match in re.finditer(rf"{LITERAL}|{COMMENT}", text, flags=re.DOTALL):
        words = match.group(0).lstrip("/*").split()
        words = words[1:] if words[:1] == ["*"] else words
        line = text.count("\n", 0, match.start()) + 1
        begins_line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip() == ""
        is_heading = begins_line and not any(line in body for body in in_bodies)
        if words and (words[0].title() in _THINGS_AND_PERSONS or (words[0] in NOUN_CLAUSES and is_heading)):
            found.append(finding(path, line, f"{' '.join(words[:4])} ...: begin with the noun"))
    return found


def check_includes(path: Path, text: str) -> list[str]:
    """Arrows between the folders of native/src point down only. ``path`` is relative to native/src."""
    found = []
    folder = path.parts[0] if len(path.parts) > 1 else None
    if folder is None and path.name not in ROOT_FILES:
        return [finding(path, 1, f"only {', '.join(sorted(ROOT_FILES))} may lie directly in native/src")]
    if folder is not None and folder not in MAY_INCLUDE:
        return [finding(path, 1, f"folder {folder} has no line in MAY_INCLUDE (tests/tidy/tidy_c.py)")]
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match or match.group(1) in ("horo.h", "horo_gpu.h", "horo_log.h", "horo_pairs.h"):
            continue
        target = match.group(1).split("/")
        if len(target) not in (2, 3) or ".." in target or (len(target) == 3 and target[0] not in HAVE_ROOMS):
            found.append(finding(path, number, f'"{match.group(1)}": include as "folder/file.h"'))
        elif target[-1] == "private.h" and tuple(target[:-1]) != path.parts[:-1]:
            found.append(finding(path, number, f"{match.group(1)} is for the files beside it"))
        elif len(path.parts) == 3 and target[0] == folder and tuple(target[:-1]) != path.parts[:-1]:
            above = ", ".join(HAVE_ROOMS[folder].get(path.parts[1], ())) or "none"
            if target[1] not in HAVE_ROOMS[folder].get(path.parts[1], ()):
                found.append(finding(path, number, f"room {path.parts[1]} may include of {folder}: {above}"))
        elif folder is not None and target[0] != folder and target[0] not in MAY_INCLUDE[folder]:
            allowed = ", ".join(sorted(MAY_INCLUDE[folder])) or "nothing"
            found.append(finding(path, number, f"{folder} includes {target[0]}; it may include {allowed}"))
    return found


def check_calls(path: Path, text: str) -> list[str]:
    """No call of a banned function."""
    found = []
    for number, line in enumerate(code_only(text).splitlines(), 1):
        for name in re.findall(r"(?<![\w.>])(\w+)\s*\(", line):
            if name in BANNED_CALLS:
                found.append(finding(path, number, f"{name} is banned: {BANNED_CALLS[name]}"))
    return found


def check_names(path: Path, text: str) -> list[str]:
    """Shared functions are hr_ or horo_, statics bare, and no type of ours ends in _t."""
    found = []
    code = code_only(text)
    for item in items(code):
        name = item.function_name
        bare = is_static(item)
        if name and not bare and not name.startswith(("hr_", "horo_")):
            found.append(finding(path, item.first_line, f"{name} is not static, so it is named hr_{name}"))
        if name and bare and path.suffix == ".c" and name.startswith(("hr_", "horo_")):
            found.append(finding(path, item.first_line, f"{name} is static, so its name is bare"))
        declared = re.search(r"\b(\w+_t)$", item.head) if item.head.startswith("typedef") else None
        tagged = re.match(r"(?:struct|union|enum)\s+(\w+_t)\b", item.head)
        for match in filter(None, (declared, tagged)):
            found.append(finding(path, item.first_line, f"type {match.group(1)}: _t belongs to POSIX"))
    return found


def check_statuses(path: Path, text: str) -> list[str]:
    """A function declared hr_status returns no progress and no truth, and nobody drops what it returns unsaid."""
    code = code_only(text)
    found = []
    for item in items(code):
        if item.body is not None and re.match(r"(?:static )?(?:inline )?hr_status\b", item.head):
            for match in re.finditer(r"return (\d+|HR_(?:STILL|MOVED|DONE)|HORO_IN_PROGRESS);", item.body):
                line = item.last_line - item.body.count("\n", match.start())
                found.append(finding(path, line, f"{item.function_name} is an hr_status: no {match.group(1)}"))
    statuses = _statuses(path) | set(_STATUS.findall(code))
    for match in re.finditer(r"(?<=[;{}])\s+(\w+)\(", code):
        if match.group(1) in statuses:
            line = code.count("\n", 0, match.end()) + 1
            found.append(finding(path, line, f"the status of {match.group(1)} is dropped: (void), or look at it"))
    return found


_STATUS = re.compile(r"^(?:static )?(?:inline )?hr_status (\w+)\(", re.MULTILINE)


@functools.cache
def _statuses_below(folder: Path) -> set[str]:
    return {name for header in folder.rglob("*.h") for name in _STATUS.findall(header.read_text(encoding="utf-8"))}


def _statuses(path: Path) -> set[str]:
    """Functions that headers of the core declare hr_status."""
    sources = [folder for folder in path.parents if folder.name == "src"]
    return _statuses_below(sources[0]) if sources else set()


def check_globals(path: Path, text: str) -> list[str]:
    """No variable that can change at file scope, nor a static one inside a function."""
    found = []
    code = code_only(text)
    for item in items(code):
        if item.function_name:
            body = item.body or ""
            for match in re.finditer(r"\b(?:static|_Thread_local|__thread)\b([^;{]*)", body):
                line = item.last_line - body.count("\n", match.start())
                if _is_mutable(match.group(1)):
                    found.append(finding(path, line, f"static variable in {item.function_name} can change"))
        elif _is_variable(item) and _is_mutable(item.head):
            found.append(finding(path, item.first_line, f"'{' '.join(item.head.split())[:60]}' can change"))
    return found


def _is_variable(item: Item) -> bool:
    head = item.head
    if not head or re.match(r"(typedef|extern|_Static_assert|static_assert)\b", head):
        return False
    before_value = head.split("=")[0]
    if "=" not in head and re.match(r"(struct|union|enum)\b[^*]*$", head) and len(head.split()) <= 2:
        return False
    if "=" not in head and item.body is not None and re.match(r"(struct|union|enum)\b", head):
        return len(re.sub(r"__attribute__\s*\(\(.*?\)\)", "", head).split()) > 2  # "struct tag {...} name"
    is_function_pointer = re.match(r"[^(]*\(\s*\*", before_value) is not None
    return "(" not in before_value or is_function_pointer


def _is_mutable(declaration: str) -> bool:
    """Whether the declared object itself can change: a pointer needs const after its last star."""
    before_value = re.sub(r"\[[^\]]*\]", "", declaration.split("=", maxsplit=1)[0])
    function_pointer = re.match(r"[^(]*\(\s*\*([^)]*)\)", before_value)
    own_part = function_pointer.group(1) if function_pointer else before_value.rsplit("*", 1)[-1]
    return not re.search(r"\bconst\b", own_part)
