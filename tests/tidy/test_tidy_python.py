"""House rules of the Python sources, and a bad sample for each rule so that it is known to find something."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import tidy_graph
import tidy_python
from tidy_files import ROOT, below, report, repository_files

Check = Callable[[Path, str], list[str]]


def run(check: Check, paths: list[Path]) -> list[str]:
    assert paths
    return [line for path in paths for line in check(path.relative_to(ROOT), path.read_text(encoding="utf-8"))]


def test_files_and_functions_are_short() -> None:
    findings = run(tidy_python.check_sizes, repository_files(".py"))
    assert not findings, report(findings)


@pytest.mark.parametrize(
    "check",
    [
        tidy_python.check_imports,
        tidy_python.check_rooms,
        tidy_python.check_environment,
        tidy_python.check_all,
        tidy_python.check_messages,
    ],
    ids=lambda check: check.__name__,
)
def test_package_keeps(check: Check) -> None:
    findings = run(check, sources())
    assert not findings, report(findings)


def test_modules_import_each_other_in_one_direction() -> None:
    texts = {module: text for module, text in tidy_graph.read_python(ROOT).items() if module != "horo"}
    assert tidy_graph.python_graph(texts).circles() == []  # the version in horo is for all


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    findings = run(tidy_python.check_docstrings, below("horo", "runner", "native", ".ci", suffixes=(".py",)))
    assert not findings, report(findings)


def test_each_class_has_a_name_of_its_own() -> None:
    named = {path: tidy_python.public_classes(path.read_text(encoding="utf-8")) for path in sources()}
    count = Counter(name for names in named.values() for name in names)
    twice = [f"{path.relative_to(ROOT)}: {name}" for path, names in named.items() for name in names if count[name] > 1]
    assert not twice, report(twice)


def sources() -> list[Path]:
    return below("horo", "runner", suffixes=(".py",))


@pytest.mark.parametrize("module", ["horo", "horo.runner"])
def test_light_modules_do_not_load_heavy_ones(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'cffi', 'horo._native'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


LONG_FUNCTION = "def f():\n" + "    work()\n" * 70

BAD: list[tuple[Check, str, str, str]] = [
    (tidy_python.check_sizes, "horo/a.py", "x = 1\n" * 500, "500 lines"),
    (tidy_python.check_sizes, "tests/a.py", "x = 1\n" * 700, "700 lines"),
    (tidy_python.check_sizes, "horo/a.py", LONG_FUNCTION, "f has 71 lines"),
    (tidy_python.check_imports, "runner/cli/entry.py", "import torch", "imports torch"),
    (tidy_python.check_imports, "runner/cli/entry.py", "from horo.core import context", "imports horo.core.context"),
    (tidy_python.check_imports, "runner/cli/entry.py", "def f():\n    import horo.torch", "must work without torch"),
    (tidy_python.check_imports, "horo/__init__.py", "from .torch import init", "imports horo.torch.init"),
    (
        tidy_python.check_imports,
        "horo/__init__.py",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "imports torch",
    ),
    (
        tidy_python.check_imports,
        "horo/torch/ops/allreduce.py",
        "from horo._native import lib",
        "only horo/core touches cffi",
    ),
    (
        tidy_python.check_imports,
        "horo/torch/ops/allreduce.py",
        "def f():\n    import cffi",
        "only horo/core touches cffi",
    ),
    (tidy_python.check_imports, "horo/bootstrap/a.py", "from ..torch import x", "arrows point down"),
    (tidy_python.check_imports, "horo/torch/ops/allreduce.py", "import horo.runner.cli", "does not know its launcher"),
    (tidy_python.check_imports, "horo/errors.py", "from horo.config import table", "bottom"),
    (tidy_python.check_rooms, "horo/bootstrap/auth/a.py", "from horo.bootstrap.net import dial", "may import none"),
    (tidy_python.check_rooms, "horo/bootstrap/net/a.py", "from ..store.server import x", "net may import auth"),
    (tidy_python.check_rooms, "runner/agent/a.py", "def f():\n    import horo.runner.job.report", "agent may import"),
    (tidy_python.check_rooms, "runner/hosts.py", "from horo.runner.config import Job", "hosts may import none"),
    (tidy_python.check_docstrings, "horo/a.py", '"""What is checked once."""', "What is checked once. ...: begin"),
    (tidy_python.check_docstrings, "horo/a.py", 'x = 1\n"""That of all."""', "a.py:2"),
    (tidy_python.check_docstrings, "horo/a.py", 'def f():\n    """How many are left."""', "How many are left. ..."),
    (tidy_python.check_docstrings, "native/a.py", '"""Why it is not there."""', "Why it is not"),
    (tidy_python.check_docstrings, ".ci/a.py", '"""When no rank runs: ends."""', "When no rank"),
    (tidy_python.check_messages, "horo/a.py", 'raise A("what listens there is old")', "what listens there is ..."),
    (tidy_python.check_messages, "horo/a.py", 'raise A(f"{b}: who came is {c}")', "who came is ..."),
    (tidy_python.check_environment, "horo/torch/ops/allreduce.py", "import os\nos.environ['A']", "py:2"),
    (tidy_python.check_environment, "horo/core/context.py", "import os\nos.getenv('A')", "environment"),
    (tidy_python.check_environment, "horo/core/context.py", "from os import environ", "environment"),
    (tidy_python.check_all, "horo/a.py", "def f(): pass", "no __all__"),
]


@pytest.mark.parametrize(("check", "name", "text", "expected"), BAD)
def test_check_finds_the_bad_sample(check: Check, name: str, text: str, expected: str) -> None:
    findings = check(Path(name), text)
    assert len(findings) == 1, findings
    assert expected in findings[0]


GOOD: list[tuple[Check, str, str]] = [
    (
        tidy_python.check_sizes,
        "horo/a.py",
        'def f():\n    """Title.\n' + "\n    text\n" * 50 + '    """\n    return 1\n',
    ),
    (tidy_python.check_imports, "runner/cli/entry.py", "def f():\n    from horo.core import context"),
    (tidy_python.check_imports, "runner/cli/entry.py", "if TYPE_CHECKING:\n    import torch"),
    (tidy_python.check_imports, "horo/core/context.py", "from horo._native import lib"),
    (tidy_python.check_imports, "horo/torch/ops/allreduce.py", "import torch\nfrom horo.core.context import Context"),
    (tidy_python.check_imports, "horo/torchlike.py", "import horo.torchlike_too"),
    (tidy_python.check_rooms, "horo/bootstrap/net/a.py", "from ..auth.frames import x\nfrom .dial import dial"),
    (tidy_python.check_rooms, "horo/bootstrap/job.py", "from horo.bootstrap.launchers.detect import detect_launch"),
    (tidy_python.check_docstrings, "horo/a.py", 'def f():\n    """Whether it is there."""'),
    (tidy_python.check_docstrings, "horo/a.py", 'def f():\n    """The ranks that wait. How long, is not known."""'),
    (tidy_python.check_messages, "horo/a.py", 'raise A(f"{b} is what nobody wants")'),
    (tidy_python.check_messages, "horo/a.py", 'raise A(f"how many? say {b}")'),
    (tidy_python.check_environment, "horo/config/table.py", "import os\nos.environ"),
    (tidy_python.check_environment, "runner/agent/__main__.py", "import os\nos.environ"),
    (tidy_python.check_all, "horo/a.py", "import os\n__all__ = ['os']"),
    (tidy_python.check_all, "horo/a.py", '"""Only a docstring."""'),
]


@pytest.mark.parametrize(("check", "name", "text"), GOOD)
def test_check_is_silent_on_the_good_sample(check: Check, name: str, text: str) -> None:
    assert check(Path(name), text) == []
