"""Which files of the core call and include which, which modules of horo import which, and the circles among them.

A node of the core's graph is a file of native/src. An edge leads from a file to the one that defines a function that it
calls, and from a file to a header that it includes. A template is read as a part of each file that includes it. Calls
through a pointer are no edges: a pointer is how a lower room reaches a higher one without knowing it.
"""

import graphlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidy_c import COMMENT, LITERAL, code_only, is_static, items
from tidy_files import tree_of
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
