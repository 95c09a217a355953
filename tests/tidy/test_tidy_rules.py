"""Each rule finds a bad sample, so that it is known to find something; the sources show on what it is silent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tidy_c
import tidy_python
import tidy_text
import tidy_words

Check = Callable[[Path, str], list[str]]
LONG_C = "static int long_one(void) {\n" + "    work();\n" * 70 + "}\n"
LONG_PYTHON = "def f():\n" + "    work()\n" * 70

# fmt: off
BAD: list[tuple[Check, str, str, str]] = [
    (tidy_c.check_sizes, "base/a.c", "int x;\n" * 500, "500 lines"),
    (tidy_c.check_sizes, "base/a.c", LONG_C, "long_one has 72 lines"),
    (tidy_c.check_sizes, "base/a.c", "/* " + "x" * 120 + " */\n", "columns"),
    (tidy_c.check_calls, "base/a.c", "static void f(char *a) {\n    strcpy(a, b);\n}\n", "a.c:2: strcpy"),
    (tidy_c.check_names, "base/a.c", "int helper(int a) { return a; }", "helper is not static"),
    (tidy_c.check_names, "base/a.c", "static int hr_helper(int a) { return a; }", "bare"),
    (tidy_c.check_names, "base/a.h", "typedef struct { int a; } thing_t;", "thing_t"),
    (tidy_c.check_names, "base/a.h", "struct thing_t { int a; };", "thing_t"),
    (tidy_c.check_statuses, "base/a.c", "hr_status hr_f(void) {\n    return 1;\n}\n", "a.c:2: hr_f is an hr_status"),
    (tidy_c.check_statuses, "base/a.c", "hr_status hr_f(void);\nint g(void) {\n    hr_f();\n}\n", "a.c:3: the status"),
    (tidy_c.check_globals, "base/a.c", "static int counter;", "counter"),
    (tidy_c.check_globals, "base/a.c", "struct hr_x hr_state = {0};", "hr_state"),
    (tidy_c.check_globals, "base/a.c", "static struct { int a; } hidden;", "hidden"),
    (tidy_c.check_globals, "base/a.c", "static const char *names[] = {NULL};", "names"),
    (tidy_c.check_globals, "base/a.c", "static void (*hook)(int);", "hook"),
    (tidy_c.check_globals, "base/a.c", "int hr_f(void) {\n    static int n = 0;\n    return n++;\n}", "a.c:2: static"),
    (tidy_c.check_comments, "base/a.c", "/* How many are left. */\nint hr_left(void);\n", "a.c:1: How many are left."),
    (tidy_c.check_comments, "base/a.h", "struct hr_a {\n    // Where it is.\n    int at;\n};\n", "a.h:2: Where it is."),
    (tidy_c.check_comments, "base/a.c", "int hr_f(int a) {\n    a++; /* what is left */\n}\n", "a.c:2: what is left"),
    (tidy_c.check_includes, "base/a.c", '#include "engine/agree.h"\n', "base includes engine"),
    (tidy_c.check_includes, "engine/a.c", '#include "engine/agree/private.h"\n', "for the files beside it"),
    (tidy_c.check_includes, "engine/agree/a.c", '#include "engine/lane.h"\n', "room agree may include of engine: none"),
    (tidy_c.check_includes, "base/a.c", '#include "base/b/a.h"\n', "include as"),
    (tidy_c.check_includes, "engine/a.c", '#include "../base/map.h"\n', "folder/file.h"),
    (tidy_c.check_includes, "surprise/a.c", "", "no line in MAY_INCLUDE"),
    (tidy_c.check_includes, "surprise.c", "", "directly in native/src"),
    (tidy_python.check_sizes, "horo/a.py", "x = 1\n" * 500, "500 lines"),
    (tidy_python.check_sizes, "tests/a.py", "x = 1\n" * 700, "700 lines"),
    (tidy_python.check_sizes, "horo/a.py", LONG_PYTHON, "f has 71 lines"),
    (tidy_python.check_imports, "runner/cli/entry.py", "from horo.core import context", "imports horo.core.context"),
    (tidy_python.check_imports, "runner/cli/entry.py", "def f():\n    import horo.torch", "must work without torch"),
    (tidy_python.check_imports, "horo/__init__.py", "from .torch import init", "imports horo.torch.init"),
    (tidy_python.check_imports, "horo/__init__.py", "try:\n    import torch\nexcept E:\n    pass", "imports torch"),
    (tidy_python.check_imports, "horo/torch/ops/a.py", "def f():\n    import cffi", "only horo/core touches cffi"),
    (tidy_python.check_rooms, "horo/bootstrap/auth/a.py", "from horo.bootstrap.net import dial", "may import none"),
    (tidy_python.check_rooms, "runner/agent/a.py", "def f():\n    import horo.runner.job.report", "agent may import"),
    (tidy_python.check_docstrings, "horo/a.py", 'x = 1\n"""That of all."""', "a.py:2"),
    (tidy_python.check_docstrings, "horo/a.py", 'def f():\n    """How many are left."""', "How many are left. ..."),
    (tidy_python.check_messages, "horo/a.py", 'raise A(f"{b}: who came is {c}")', "who came is ..."),
    (tidy_python.check_environment, "horo/torch/ops/allreduce.py", "import os\nos.environ['A']", "py:2"),
    (tidy_python.check_environment, "horo/core/context.py", "from os import environ", "environment"),
    (tidy_python.check_all, "horo/a.py", "def f(): pass", "no __all__"),
    (tidy_text.check_leftovers, "a.py", "# TO" + "DO: later", "leftover"),
    (tidy_text.check_leftovers, "a.py", "path: /ho" + "me/ann/file", "machine path"),
    (tidy_text.check_leftovers, "a.py", "pip install --index" + "-url x", "registry"),
    (tidy_text.check_whitespace, "a.py", "a", "newline"),
    (tidy_text.check_whitespace, "a.py", "a \n", "space"),
    (tidy_text.check_whitespace, "a.py", "\ta\n", "tab"),
    (tidy_text.check_links, __file__, "[a](missing.md)", "no such file"),
    (tidy_text.check_links, "page.md", "[a](#missing)", "no such file"),
    (tidy_text.check_tables, "a.md", "| a | b |\n|---|---|\n| `x \\| y` | |x| |\n\n| f |\n", "a.md:3"),
    (tidy_text.check_decision, "a.md", "# 1. Nobody drives\n", "'Nobody'"),
    (tidy_text.check_decision, "a.md", "# A title\n", "first line"),
    (tidy_text.check_decision, "a.md", "# 2. Write\n" + "word " * 400, "words"),
]
# fmt: on


@pytest.mark.parametrize(("check", "name", "text", "expected"), BAD)
def test_check_finds_the_bad_sample(check: Check, name: str, text: str, expected: str) -> None:
    findings = check(Path(name), text)
    assert len(findings) == 1, findings
    assert expected in findings[0]


def test_an_anchor_is_a_heading(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("# Title\n## The second part, 42\n")
    assert tidy_text.check_links(page, "[a](page.md#the-second-part-42)") == []
    assert len(tidy_text.check_links(page, "[a](page.md#missing)")) == 1


ROW = "| Horovod | here | how | shown by |\n|---|---|---|---|\n| a | {} |\n"
READ: list[tuple[Any, Any]] = [
    (tidy_text.check_numbers(["0001-a.md", "0001-b.md"]), ["number 0001 is used twice"]),
    (tidy_text.check_numbers(["0001_A.md"]), ["0001_A.md: the form is 0001-some-words.md"]),
    (tidy_text.missing_links("[a](how-to/a.md) how-to/b.md", ["how-to/a.md", "how-to/b.md"]), ["how-to/b.md"]),
    (tidy_text.changelog_versions("# x\n## [Unreleased]\n## [1.2.3] - 2026-01-01\n## 1.2.2\n"), ["1.2.3", "1.2.2"]),
    (tidy_text.native_versions('return "1.2.3+abi4";'), ["1.2.3"]),
    (tidy_text.unmapped_errors("HORO_ERR_A = -1,\nHORO_ERR_B = -2,", '"HORO_ERR_A": X, "HORO_ERR_C": Y'),
     ["HORO_ERR_B", "HORO_ERR_C"]),
    (tidy_text.hashed_pins("A_b==1.0 ; python_version >= '3.11' \\\n    --hash=sha256:00\nc==2\n"), ["a-b==1.0"]),
    (tidy_text.pin('A_b==1.0; python_version >= "3.11"'), "a-b==1.0"),
    (tidy_text.parity_findings(ROW.format("same | how | words"), lambda *_: True), ["a: no test is named"]),
    (tidy_text.parity_findings(ROW.format("perhaps | how | `tests/a.py::t`"), lambda *_: True),
     ["a: 'perhaps' is no state"]),
    (tidy_text.parity_findings(ROW.format("better | how | `tests/a.py::t`"), lambda *_: False),
     ["a: there is no tests/a.py::t"]),
    (tidy_words.check_source("raise ValueError(f'the host {host} was told of the end')\n"),
     [(1, "'was told': name who does what")]),
    (tidy_words.check_source("NAMES = {'is told': 1}\n"), []),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected"), READ)
def test_what_is_read_of_texts(found: object, expected: object) -> None:
    assert found == expected


BAD_SENTENCES = [
    "The rank says that it is late.", "Rank 0 is told of the loss.", "A kernel stands in front of the copy.",
    "When the driver comes to the record, it stops.", "It is known what word that rank has.",
    "What a rank has submitted goes on.", "A set that is gone has no deadline, since none is set.",
    "One " + "word " * 40 + "too many.",
]  # fmt: skip


@pytest.mark.parametrize("sentence", BAD_SENTENCES)
def test_a_bad_sentence_is_found(sentence: str) -> None:
    assert tidy_words.check_page(f"# Title\n\nA page.\n{sentence}\n" if len(sentence) < 100 else f"{sentence}\n")
    assert tidy_words.check_source(f'"""A module.\n\n{sentence}\n"""\n')
