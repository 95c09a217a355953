"""Numbers of the core that may only fall, and the file with their ceilings, ceilings.json.

    python tests/tidy/tidy_ceilings.py           the numbers of now
    python tests/tidy/tidy_ceilings.py --write   lowers the ceilings in the file to them

A number above its ceiling is a finding, and so is one below it, which names the new ceiling.

The graph has which files of the core call and include which, which modules of horo import which; and their circles.

A node of the core's graph is a file of native/src. An edge leads from a file to the one that defines a function that it
calls, and from a file to a header that it includes. A template is read as a part of each file that includes it. Calls
through a pointer are no edges: a pointer is how a lower room reaches a higher one without knowing it.
"""

import graphlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidy_c import COMMENT, LITERAL, code_only, is_static, items
from tidy_files import ROOT, tree_of
from tidy_python import imports

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_CALL = re.compile(r"(?<![\w.>])([a-z_]\w*)\s*\(")
TEMPLATE = "_template.h"
"""The end of the name of a header that is no contract, but a part of the file that includes it."""


@dataclass
class Graph:
    """Edges from each node, with the reason of the first one between two nodes."""

    edges: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, source: str, target: str, why: str) -> None:
        if _unit(source) != _unit(target):
            self.edges.setdefault(source, {}).setdefault(target, why)

    def circle(self) -> str:
        """One of the circles, as a text with the reason of each step; empty where there is none."""
        try:
            graphlib.TopologicalSorter(self.edges).prepare()
        except graphlib.CycleError as error:
            way = error.args[1][::-1]  # from what is needed to what needs it
            steps = (f"{node} ({self.edges[last][node]})" for last, node in itertools.pairwise(way))
            return " -> ".join([way[0], *steps])
        return ""


def _unit(node: str) -> str:
    """A C file and its own header are one thing: what leads from one to the other is no edge."""
    return node[:-2] if node.endswith((".c", ".h")) else node


# ---- the core --------------------------------------------------------------------------------------------------------


def functions(text: str) -> int:
    """Functions that a file defines."""
    return sum(item.function_name is not None for item in items(code_only(text)))


def declarations(text: str) -> int:
    """Functions that a header offers: declared, or defined in it."""
    return len(set(_declared(text)) | {name for name, _ in _defined(code_only(text))})


def without_comments(text: str) -> str:
    """The text with comments left out; literals and preprocessor lines stay."""
    pattern = rf"{LITERAL}|{COMMENT}"
    return re.sub(pattern, lambda m: " " if m.group(0).startswith("/") else m.group(0), text, flags=re.DOTALL)


def _declared(text: str) -> Iterator[str]:
    for item in items(code_only(text)):
        if item.body is None and not item.head.startswith(("typedef", "_Static_assert")):
            head = re.sub(r"__attribute__\s*\(\(.*?\)\)", "", item.head)
            match = re.match(r"[^(=]*?(\w+)\s*\((?!\s*\*)", head)
            if match:
                yield match.group(1)


def _defined(code: str) -> Iterator[tuple[str, str]]:
    """(name, body) of each function."""
    for item in items(code):
        if item.function_name is not None:
            yield item.function_name, item.body or ""


def native_graph(texts: Mapping[str, str]) -> Graph:
    """The graph of sources by their names below native/src."""
    graph = Graph()
    whole = {name: _with_templates(name, texts) for name in texts if not name.endswith(TEMPLATE)}
    shared: dict[str, str] = {}
    own: dict[str, list[tuple[str, str]]] = {}
    for name, text in whole.items():
        code = code_only(text)
        own[name] = list(_defined(code))
        statics = {item.function_name for item in items(code) if is_static(item)} if name.endswith(".c") else set()
        shared |= {function: name for function, _ in own[name] if function not in statics}
    for name, text in whole.items():
        for target in _INCLUDE.findall(text):
            if target in whole:
                graph.add(name, target, "included")
        here = {function for function, _ in own[name]}
        for function, body in own[name]:
            for called in _CALL.findall(body):
                if called not in here and called in shared:
                    graph.add(name, shared[called], f"{function} calls {called}")
    return graph


def _with_templates(name: str, texts: Mapping[str, str], depth: int = 0) -> str:
    templates = [t for t in dict.fromkeys(_INCLUDE.findall(texts[name])) if t.endswith(TEMPLATE) and t in texts]
    inner = [_with_templates(template, texts, depth + 1) for template in templates] if depth < 8 else []
    return "\n".join([texts[name], *inner])


# ---- horo ------------------------------------------------------------------------------------------------------------


def python_graph(texts: Mapping[str, str]) -> Graph:
    """The graph of modules by their dotted names; imports for types and inside functions count as well.

    A package is the node of its ``__init__``. That importing a module runs the ``__init__`` of its packages is no edge.
    """
    graph = Graph()
    for module, text in texts.items():
        is_package = any(name.startswith(f"{module}.") for name in texts)
        package = module if is_package else module.rpartition(".")[0]
        for target, line, _ in imports(tree_of(text), package, for_types=True):
            known = target if target in texts else target.rpartition(".")[0]
            if known in texts:
                graph.add(module, known, f"line {line}")
    return graph


def read_native(root: Path) -> dict[str, str]:
    """The C files and headers of native/src by their names below it."""
    folder = root / "native" / "src"
    paths = sorted(path for path in folder.rglob("*") if path.suffix in {".c", ".h"})
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def read_python(root: Path) -> dict[str, str]:
    """The modules of horo by their dotted names; ``horo.runner`` may lie beside the package or in it."""
    places = {"horo": root / "horo"}
    if not (root / "horo" / "runner").is_dir() or (root / "horo" / "runner").is_symlink():
        places["horo.runner"] = root / "runner"
    texts: dict[str, str] = {}
    for package, folder in places.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package == "horo" and parts[0] == "runner" and "horo.runner" in places:
                continue
            name = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            texts[name] = path.read_text(encoding="utf-8")
    return texts


FILE = Path(__file__).with_name("ceilings.json")

DECLARATIONS_MAX = 24
"""Of a header without a row in the file."""

ROOMS: dict[str, tuple[str, str]] = {
    "joining": (r"join|stand_in", r"engine/(join|stand_in)\.c|engine/membership/.*|engine/agree/join\.c"),
    "stranded memory": (r"strand", r"mpi/.*|transport/mpi\.c|node/(node|bury)\.[ch]|context\.c"),
    "NCCL": (r"nccl", r"engine/(by_)?nccl.*|engine/gpu/.*|backend/nccl.*|device/libraries.*"),
}
"""Per subject, the words by which a file names it, and the files that may. Comments do not count."""

SUBJECT_FOLDERS = {"joining": "engine/"}  # the public interface, the wire and context.c name every operation

OTHER_WORDS = {"pthread_join"}

LINES_STEP = 500
FUNCTIONS_STEP = 50
"""Ceilings of what every change moves a little, in steps."""


@dataclass(frozen=True)
class Number:
    """One measured value, and the text that explains it where it is too high."""

    value: int
    why: Callable[[], str] = lambda: ""


def numbers(native: Mapping[str, str]) -> dict[str, Number]:
    """All numbers by name, of the core's sources as `read_native` reads them."""
    found = {
        "lines of native/src": Number(_step(sum(len(text.splitlines()) for text in native.values()), LINES_STEP)),
        "functions of native/src": Number(_step(sum(map(functions, native.values())), FUNCTIONS_STEP)),
    }
    for subject in ROOMS:
        names = _outside(subject, native)
        found[f"files that name {subject} outside its rooms"] = Number(len(names), lambda names=names: " ".join(names))
    for name, text in native.items():
        is_contract = name.endswith(".h") and not name.endswith(TEMPLATE)
        if is_contract and (count := declarations(text)) > DECLARATIONS_MAX:
            found[f"declarations of {name}"] = Number(count)
    return found


def _step(value: int, step: int) -> int:
    return -(-value // step) * step


def _outside(subject: str, native: Mapping[str, str]) -> list[str]:
    """Files that name the subject though they are none of its rooms."""
    words, rooms = ROOMS[subject]
    found = []
    for name, text in native.items():
        if not name.startswith(SUBJECT_FOLDERS.get(subject, "")) or re.fullmatch(rooms, name):
            continue
        matches = re.findall(rf"\w*(?:{words})\w*", without_comments(text), re.IGNORECASE)
        if set(matches) - OTHER_WORDS:
            found.append(name)
    return found


def read_ceilings() -> dict[str, int]:
    """The ceilings by name."""
    ceilings: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))
    return ceilings


def compare(measured: Mapping[str, Number], ceilings: Mapping[str, int]) -> list[str]:
    """One finding per number that is not at its ceiling; a header without a row has one of its own."""
    found = []
    for name, number in measured.items():
        ceiling = ceilings.get(name, DECLARATIONS_MAX if name.startswith("declarations of ") else 0)
        if number.value > ceiling:
            found.append(f"{name}: {number.value}, and the ceiling is {ceiling}\n{number.why()}".rstrip())
        elif number.value < ceiling:
            found.append(f"{name}: {number.value}, below the ceiling of {ceiling}: write {number.value}")
    found += [f"{name}: delete the row" for name in ceilings if name not in measured]
    return found


def main(words: list[str]) -> None:
    measured = numbers(read_native(ROOT))
    if words == ["--write"]:
        old = read_ceilings()
        lowered = {name: min(number.value, old.get(name, 0)) for name, number in measured.items() if name in old}
        FILE.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        return
    for name, number in measured.items():
        print(f"{name}: {number.value}", *number.why().splitlines(), sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1:])
