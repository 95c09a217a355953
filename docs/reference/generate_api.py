"""Writes api.md from the signatures and docstrings of horo.torch: ``python docs/reference/generate_api.py``."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horo.errors
import horo.torch as hvd

PAGE = Path(__file__).with_name("api.md")
COLUMNS_MAX = 110

HEAD = """\
# horo.torch

<!-- Generated from the docstrings of horo/torch by docs/reference/generate_api.py; change them there. -->

```python
import horo.torch as hvd
```

This page lists every public name. [Move a Horovod script to horo](../how-to/migrate-from-horovod.md#what-differs)
lists the differences from Horovod's functions of the same names. Entries do not repeat this:

* `name=` connects the calls of all ranks and is equal on all. Calls without a name are connected in the order in which
  each rank makes them, for each kind of operation. A name can be in use once at a time.
* `process_set=` names the ranks that take part; others do not call the function.
* `root_rank=` is the rank whose values all get, by its number in the job also in a process set; it is equal on all.
* Grouped forms do one operation, with one name, on at least one tensor: equally many on all ranks, of any dtypes.
  In-place forms (`_`) return their argument, which autograd must not have computed. The handle of an asynchronous form
  (`_async`) gives what the plain form returns, or a tuple of that if it is grouped.
* A call that needs a job raises `NotInitializedError` before `init()`. A call in which other ranks take part raises
  `GroupError` (alias `HorovodInternalError`) if one of them is lost or has shut down.
"""

COMMON = {
    "name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.",
    "process_set: The ranks that take part; others do not call it.",
    "root_rank: The rank whose values all get, by its number in the job also in a process set; equal on all ranks.",
    "NotInitializedError: Before `init()`.",
    "GroupError: A rank is lost or has shut down.",
    "UsageError: `tensor` is no tensor, or another argument is wrong.",
    "UsageError: `tensor` is no tensor or has no dimension.",
    "UnsupportedError: Another device, layout or dtype.",
    "UnsupportedError: Another device or layout.",
    "MismatchError: Ranks gave other shapes, dtypes or options under one name.",
    "MismatchError: Ranks gave other shapes, dtypes or roots under one name.",
    "MismatchError: Ranks gave other dtypes or dimensions under one name.",
}
"""Entries of docstrings that ``HEAD`` or the rules for operations have for the whole page."""

SECTIONS = (
    ("Start, end, and who is who", ("horo.torch.lifecycle", "horo.torch.engine.topology")),
    (
        "Operations on tensors",
        (
            "horo.torch.ops.reduce_op",
            "horo.torch.ops.allreduce",
            "horo.torch.ops.reducescatter",
            "horo.torch.ops.sparse",
            "horo.torch.ops.allgather",
            "horo.torch.ops.broadcast",
            "horo.torch.ops.barrier",
            "horo.torch.ops.join",
            "horo.torch.ops.alltoall",
            "horo.torch.engine.handles",
        ),
    ),
    (
        "Training",
        (
            "horo.torch.optimizer.model",
            "horo.torch.data.shard",
            "horo.torch.optimizer.distributed",
            "horo.torch.nn.sync_batch_norm",
            "horo.torch.functions.metrics",
            "horo.torch.functions.schedules",
        ),
    ),
    ("Equal models, optimizers and objects", ("horo.torch.functions.broadcast_state", "horo.torch.functions.objects")),
    ("Compression", ("horo.torch.ops.compression",)),
    ("Sets of ranks", ("horo.torch.ops.process_set",)),
    ("Timeline", ("horo.torch.timeline",)),
    ("What this installation can do", ("horo.torch.horovod_names.info",)),
)
"""Title, and the modules that define what it lists."""
_MODULES = [module for _, modules in SECTIONS for module in modules]

QUESTIONS = ("horo.torch.engine.topology", "horo.torch.horovod_names.info")
"""Modules whose functions have no arguments and return at once; they are rows of one table."""
INTERNAL = {"find_members", "team_in"}
"""Methods of public classes that only horo calls."""
AT_ONCE = "Returns at once."
_BAR = "\\|"
"""A bar in a cell of a table; without the backslash it would end the cell."""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    left = set(hvd.__all__)
    for title, modules in SECTIONS:
        names = [name for name in hvd.__all__ if _home(name) in modules]
        left -= set(names)
        parts.append(f"\n## {title}\n")
        if "horo.torch.ops.allreduce" in modules:
            parts.append("\n" + _markdown(_module_text("horo.torch.ops.allreduce")) + "\n" + _reductions(names))
            parts.append("\n**Gradients.** " + _markdown(_module_text("horo.torch.ops.autograd")) + "\n")
            names = [name for name in names if not isinstance(getattr(hvd, name), int)]
        names.sort(key=_position)
        asked = [name for name in names if _home(name) in QUESTIONS]
        parts += [_entry(name) for name in names if name not in asked and not _form_of(name)]
        parts += _questions(asked)
    left -= {name for name in left if _home(name) == "horo.errors"}
    if left:
        raise SystemExit(f"{sorted(left)}: their modules belong to no section; add them to SECTIONS")
    return "".join([*parts, _errors()])


def _home(name: str) -> str:
    """The module that defines a public name."""
    value = getattr(hvd, name)
    if isinstance(value, int):
        return "horo.torch.ops.allreduce"
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _position(name: str) -> tuple[int, int]:
    """Orders names as their modules do: what belongs together stands together there."""
    value = getattr(hvd, name)
    if inspect.isfunction(value) or inspect.isclass(value):
        return _MODULES.index(value.__module__), inspect.getsourcelines(value)[1]
    return _MODULES.index(_home(name)), sys.maxsize


def _module_text(module: str) -> str:
    """A module's docstring without its title."""
    return (inspect.getdoc(sys.modules[module]) or "").split("\n\n", 1)[1].replace("What they have in common:\n\n", "")


def _reductions(names: list[str]) -> str:
    said = {name: _beside_constant("horo.torch.ops.allreduce", name) for name in names if _is_reduction(name)}
    rows = [f"| `{name}` | {text.replace('|', _BAR)} |\n" for name, text in said.items()]
    return "\nReductions, for `op=`:\n\n| name | result |\n|---|---|\n" + "".join(rows)


def _is_reduction(name: str) -> bool:
    return isinstance(getattr(hvd, name), int)


def _beside_constant(module: str, name: str) -> str:
    """The text under ``name = ...`` in the source, empty if there is none."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        target = getattr(statement, "target", None)
        if isinstance(target, ast.Name) and target.id == name and isinstance(following, ast.Expr):
            return _inline(str(ast.literal_eval(following.value)))
    return "element by element"


def _entry(name: str) -> str:
    value = getattr(hvd, name)
    if inspect.isfunction(value):
        return f"\n### {name}\n\n{_function(value)}"
    if inspect.isclass(value):
        return f"\n### {name}\n\n{_class(value)}"
    return f"\n### {name}\n\n{_beside_constant(_home(name), name)}\n"


def _questions(names: list[str]) -> list[str]:
    """A table of functions that return at once, with no arguments."""
    rows = []
    for name in names:
        text = _markdown((inspect.getdoc(getattr(hvd, name)) or "").split("\n\nExample:")[0])
        text = text.replace(AT_ONCE, "").replace("Raises:\n\n* ", "Raises ")
        rows.append(f"| `{name}()` | {' '.join(text.split())} |\n")
    return ["\nThese return at once:\n\n| call | result |\n|---|---|\n", *rows] if rows else []


def _function(function: Callable[..., Any]) -> str:
    said = inspect.getdoc(function) or ""
    says_when = re.search(r"\b([Bb]locks?|returns? at once)\b", said, re.IGNORECASE)
    forms = sorted((name for name in hvd.__all__ if _form_of(name) is function), key=_position)
    shapes = "\n".join(_signature(getattr(hvd, name), function) for name in forms)
    return (
        f"```python\n{_signature(function, None)}\n```\n\n{_markdown(said)}\n"
        + ("" if says_when else f"\n{AT_ONCE}\n")
        + (f"\nForms:\n\n```python\n{shapes}\n```\n" if forms else "")
    )


def _form_of(name: str) -> Callable[..., Any] | None:
    """The function of which another one is the grouped, asynchronous or in-place form."""
    base = re.sub(r"_(async)?_?$", "", name.removeprefix("grouped_"))
    return getattr(hvd, base, None) if base != name else None


def _class(cls: type[Any]) -> str:
    parts = [_markdown(inspect.getdoc(cls) or ""), "\n"]
    shown = [(name, member) for name, member in vars(cls).items() if name not in INTERNAL and not name.startswith("_")]
    members = [(name, member) for name, member in shown if not isinstance(member, cls)]  # of an enumeration
    lines = []
    for name, member in members:
        kind = member.fget if isinstance(member, property) else member
        said = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        brackets = "()" if inspect.isfunction(member) else ""
        lines.append(f"* `{name}{brackets}`: {_inline(said)}\n")
    return "".join([*parts, "\n", *lines] if lines else parts)


def _signature(function: Callable[..., Any], base: Callable[..., Any] | None) -> str:
    """The signature as it is written: defaults by name, as ``global_process_set``.

    Of arguments that ``base`` has as well, only the names.
    """
    tree = _tree(function)
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    known = set(_arguments(_tree(base).args)) if base else set()
    arguments = [re.split(":| =", line)[0] if line in known else line for line in _arguments(tree.args)]
    line = f"{tree.name}({', '.join(arguments)}){returns}"
    if len(line) > COLUMNS_MAX:
        lines = [", ".join(arguments)] if base else arguments
        line = f"{tree.name}(\n" + "".join(f"    {text},\n" for text in lines) + f"){returns}"
    return line


def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function} is no plain function")
    return tree


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        yield _argument(argument, default)
    if arguments.vararg or arguments.kwonlyargs:
        yield "*" + (ast.unparse(arguments.vararg) if arguments.vararg else "")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield "**" + ast.unparse(arguments.kwarg)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def _inline(text: str) -> str:
    return text.replace("``", "`")


def _markdown(text: str) -> str:
    """A docstring: its sections become lists, its paragraphs single lines."""
    parts = []
    for block in _inline(text).split("\n\n"):
        title, _, rest = block.partition("\n")
        if title == "Example:":
            parts.append(f"```python\n{textwrap.dedent(rest)}\n```")
        elif title in ("Args:", "Returns:", "Raises:"):
            parts += _section(title, textwrap.dedent(rest))
        elif block.startswith("- "):
            items = re.sub(r"\n(?!- )\s*", " ", block).splitlines()
            parts.append("\n".join("* " + item.removeprefix("- ") for item in items))
        else:
            parts.append(block.replace("\n", " "))
    return "\n\n".join(parts)


def _section(title: str, body: str) -> list[str]:
    """Arguments, return or errors, without those that are known from ``HEAD`` or from another function."""
    entries = [entry for entry in re.sub(r"\n\s+", " ", body).splitlines() if entry not in COMMON]
    if title == "Raises:" and entries and entries[0].startswith("As "):
        further = entries[0].partition("; ")[2]
        return [] if not further or "synchronize" in further else [f"Raises {further}"]
    if title == "Returns:":
        return [f"Returns: {' '.join(entries)}"]
    named = [entry.partition(": ") for entry in entries]
    lines = [f"* `{name}`: {said}" for name, _, said in named if not re.fullmatch(r"As for `\w+`\.", said)]
    head = "Arguments" if title == "Args:" else "Raises"
    return [f"{head}:\n\n" + "\n".join(lines)] if lines else []


def _errors() -> str:
    public = [name for name in horo.errors.__all__ if inspect.isclass(getattr(horo.errors, name))]
    classes = sorted({getattr(horo.errors, name) for name in public}, key=lambda c: inspect.getsourcelines(c)[1])
    rows = []
    for cls in classes:
        bases = ", ".join(f"`{'builtins.' * (base.__name__ == cls.__name__)}{base.__name__}`" for base in cls.__bases__)
        rows.append(f"| `{cls.__name__}` | {bases} | {_inline(inspect.getdoc(cls) or '')} |\n")
    return (
        "\n## Errors\n\n`HorovodInternalError`, which scripts catch to begin anew, is `GroupError`. "
        "All classes are in `horo.errors`, and `horo.torch` has them too.\n\n"
        f"| class | is a | when |\n|---|---|---|\n{''.join(rows)}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
