"""Rules for Python, on the syntax tree: each takes a path relative to the root and its text and returns findings."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from tidy_files import NOUN_CLAUSES, finding, tree_of

FILE_LINES_MAX = 500
TEST_FILE_LINES_MAX = 700  # a list of cases is read one at a time
FUNCTION_LINES_MAX = 70


@dataclass(frozen=True)
class ImportRule:
    """Files that match ``where`` (but not ``unless``) must not import ``what``; with ``lazily``, functions may."""

    where: str
    what: tuple[str, ...]
    why: str
    unless: tuple[str, ...] = ()
    lazily: bool = False


TORCH = ("torch", "horo.torch")
CORE = ("horo.core", "horo._native", "cffi")
IMPORT_RULES = (
    ImportRule("runner", (*TORCH, *CORE, "numpy"), "hororun --help answers in under 150 ms", lazily=True),
    ImportRule("runner", ("horo.torch",), "the launcher must work without torch"),
    ImportRule("horo/__init__.py", (*TORCH, *CORE, "numpy", "horo.runner"), "import horo stays light", lazily=True),
    ImportRule(
        "horo", ("cffi", "horo._native", "horo.core.binding"), "only horo/core touches cffi", unless=("horo/core",)
    ),
    ImportRule("horo/bootstrap", ("horo.torch",), "arrows point down: torch uses the bootstrap"),
    ImportRule("horo/bootstrap", ("torch",), "hororun uses parts of the bootstrap", lazily=True),
    ImportRule("horo/torch", ("horo.runner",), "arrows point down: a rank does not know its launcher"),
    ImportRule(
        "horo/torch", ("horo.lightning", "lightning", "pytorch_lightning"), "arrows point down: Lightning uses torch"
    ),
    ImportRule("horo/errors.py", ("horo",), "the bottom imports nothing of horo"),
    ImportRule("horo/config/table.py", (*TORCH, *CORE), "knobs are read before anything is loaded"),
)

ROOMS: dict[str, tuple[str, ...]] = {
    "horo.bootstrap.auth": (),
    "horo.bootstrap.log": (),
    "horo.bootstrap.net": ("auth",),
    "horo.bootstrap.store": ("auth", "net"),
    "horo.bootstrap.packed": (),
    "horo.bootstrap.rendezvous": ("store.protocol",),
    "horo.bootstrap.host": ("auth", "net", "packed", "rendezvous"),
    "horo.bootstrap.mpi": ("auth", "host", "net", "store"),
    "horo.bootstrap.launchers": ("auth", "host", "log", "mpi", "net", "store"),
    "horo.torch.compat": (),
    "horo.torch.engine": ("compat",),
    "horo.torch.ops": ("compat", "engine"),
    "horo.torch.functions": ("compat", "engine", "ops"),
    "horo.torch.nn": ("compat", "engine", "ops"),
    "horo.torch.data": ("engine", "functions", "ops"),
    "horo.torch.optimizer": ("compat", "engine", "ops", "functions"),
    "horo.torch.distributed": ("compat", "engine"),
    "horo.torch.elastic": ("compat", "engine", "ops", "functions", "optimizer"),
    "horo.lightning": ("bootstrap.launchers", "config", "errors", "runner.call", "torch"),
    "horo.runner.hosts": (),
    "horo.runner.loop": (),
    "horo.runner.processes": (),
    "horo.runner.text": (),
    "horo.runner.config": ("hosts",),
    "horo.runner.network": ("hosts",),
    "horo.runner.stdout": ("config", "hosts"),
    "horo.runner.agent": ("config", "loop", "network", "text", "processes"),
    "horo.runner.start": ("config", "hosts", "text"),
    "horo.runner.elastic": ("agent", "config", "hosts", "loop", "job", "network", "text", "processes"),
    "horo.runner.job": ("agent", "config", "hosts", "loop", "network", "text", "processes", "start", "stdout"),
}
"""Per room, a folder or a module, what of the same package it may import. Others may import all."""


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below ``tree``, with handlers and cases. Most of a tree are expressions, which nobody visits."""
    for child in _inner(tree):
        yield child
        yield from statements(child)


def _inner(node: ast.AST) -> list[ast.AST]:
    return [child for name in ("body", "handlers", "orelse", "finalbody", "cases") for child in getattr(node, name, ())]


def check_sizes(path: Path, text: str) -> list[str]:
    """Files under 500 lines (tests: 700), functions of at most 70 (the docstring not counted)."""
    found = []
    line_count = len(text.splitlines())
    limit = TEST_FILE_LINES_MAX if path.parts[0] == "tests" else FILE_LINES_MAX
    if line_count >= limit:
        found.append(finding(path, line_count, f"{line_count} lines; files stay under {limit}"))
    for node in statements(tree_of(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if length > FUNCTION_LINES_MAX:
                found.append(
                    finding(path, node.lineno, f"{node.name} has {length} lines; at most {FUNCTION_LINES_MAX}")
                )
    return found


def imports(tree: ast.Module, package: str, *, for_types: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Every import as (absolute module, line, at module level); ``for_types``: those that no run does, too."""

    def visit(node: ast.AST, is_top: bool) -> Iterator[tuple[str, int, bool]]:
        for child in _inner(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, is_top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, base]).rstrip(".")
                yield from ((f"{base}.{alias.name}", child.lineno, is_top) for alias in child.names)
            elif for_types or not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from visit(child, is_top and not is_function)

    yield from visit(tree, is_top=True)


def check_imports(path: Path, text: str) -> list[str]:
    """Import directions, by ``IMPORT_RULES``."""
    rules = [
        rule
        for rule in IMPORT_RULES
        if _lies_in(path, rule.where) and not any(_lies_in(path, other) for other in rule.unless)
    ]
    found = []
    for module, line, is_top in imports(tree_of(text), _dotted(path.parent)):
        for rule in rules:
            names_it = any(_is_within(module, name) for name in rule.what)
            if names_it and (is_top or not rule.lazily):
                found.append(finding(path, line, f"imports {module}: {rule.why}"))
    return found


def check_rooms(path: Path, text: str) -> list[str]:
    """Which room may import which, by ``ROOMS``."""
    own = _dotted(path.with_suffix(""))
    found = []
    for room, others in ROOMS.items():
        if not _is_within(own, room):
            continue
        package = room.rpartition(".")[0]
        allowed = (room, *(f"{package}.{other}" for other in others))
        for module, line, _ in imports(tree_of(text), _dotted(path.parent)):
            if _is_within(module, package) and not any(_is_within(module, name) for name in allowed):
                found.append(finding(path, line, f"imports {module}: {room} may import {', '.join(others) or 'none'}"))
    return found


def _dotted(path: Path) -> str:
    """The module or package at ``path``."""
    return ".".join(("horo", *path.parts) if path.parts[:1] == ("runner",) else path.parts)


def _is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _lies_in(path: PurePath, where: str) -> bool:
    return path == PurePath(where) or PurePath(where) in path.parents


def check_docstrings(path: Path, text: str) -> list[str]:
    """A docstring, also one of a variable, begins with its subject or with a verb: no clause stands for a noun."""
    found = []
    for node in statements(tree_of(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words = node.value.value.split()
            if words and words[0] in NOUN_CLAUSES:
                found.append(finding(path, node.lineno, f"{' '.join(words[:4])} ...: begin with the noun"))
    return found


def check_messages(path: Path, text: str) -> list[str]:
    """The message of an error, behind the name of a call (``"join: ..."``), begins as a docstring does, or asks."""
    found = []
    for node in statements(tree_of(text)):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        message = node.exc.args[0]
        parts = message.values if isinstance(message, ast.JoinedStr) else [message]
        texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)][:1]
        words = texts[0].removeprefix(": ").split() if texts else []
        is_question = bool(texts) and re.match(r"[^.,:;(]*\?", texts[0]) is not None
        if words and words[0].title() in NOUN_CLAUSES and not is_question:
            found.append(finding(path, node.lineno, f"{' '.join(words[:4])} ...: begin with the noun"))
    return found


def public_classes(text: str) -> list[str]:
    """The names of a module's own classes that other modules may use."""
    return [node.name for node in tree_of(text).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


def check_environment(path: Path, text: str) -> list[str]:
    """Only horo/config/table.py reads the environment within horo/. (The launcher builds those of its children.)"""
    if path.parts[0] != "horo" or path == PurePath("horo/config/table.py"):
        return []
    names = {"environ", "environb", "getenv", "putenv", "getenvb"}
    if not any(name in text for name in names):
        return []
    found = []
    for node in ast.walk(tree_of(text)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        is_import = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if is_attribute or is_import:
            found.append(finding(path, getattr(node, "lineno", 1), "only horo/config/table.py reads the environment"))
    return found


def check_all(path: Path, text: str) -> list[str]:
    """Every module of the package says in ``__all__`` what it offers."""
    tree = tree_of(text)
    has_code = any(isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) for n in tree.body)
    if path.name == "__main__.py" or not has_code:
        return []
    targets = [t for n in tree.body for t in (n.targets if isinstance(n, ast.Assign) else [getattr(n, "target", None)])]
    if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
        return []
    return [finding(path, 1, "no __all__")]
