"""House rules, held over all sources and documents; each finds a bad sample. Ceilings, circles, choice of cases."""

import dataclasses
import itertools
import re
import runpy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tidy_c
import tidy_ceilings
import tidy_python
import tidy_text
from breaks.breaks import BREAKS, Break
from cases import CASES, SEEDS, pairwise, some_of, spread
from tidy_ceilings import Number, compare
from tidy_files import ROOT, below, finding, report, repository_files

import horo

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
    (tidy_text.check_source("raise ValueError(f'the host {host} was told of the end')\n"),
     [(1, "'was told': name who does what")]),
    (tidy_text.check_source("NAMES = {'is told': 1}\n"), []),
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
    assert tidy_text.check_page(f"# Title\n\nA page.\n{sentence}\n" if len(sentence) < 100 else f"{sentence}\n")
    assert tidy_text.check_source(f'"""A module.\n\n{sentence}\n"""\n')


DOCS = ROOT / "docs"
TEXT_SUFFIXES = (".py", ".c", ".h", ".md", ".toml", ".txt", ".in", ".cfg", ".yaml", ".yml", "")
GENERATED = {DOCS / "performance.md", DOCS / "reference" / "api.md", DOCS / "reference" / "environment.md"}
"""Pages whose words are those of their sources."""
WORDS_IN_DOCS = 60_000
"""Words of all pages below docs/, as ``wc -w`` counts them. The ceiling only falls."""


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def c_files() -> list[Path]:
    return below("native", suffixes=(".c", ".h"))


def core_files() -> list[Path]:
    """Without those that are Python's: what it calls has names of its own, and is variable."""
    return [path for path in c_files() if path.parent.name != "python"]


def modules() -> list[Path]:
    return below("horo", "runner", suffixes=(".py",))


def texts() -> list[Path]:
    """Files with text; "" is for Makefile and the scripts of .ci, and a corpus of the fuzz tests may be anything."""
    return [
        path
        for path in repository_files()
        if path.suffix in TEXT_SUFFIXES and path.name != "LICENSE" and "corpus" not in path.parts
    ]


def includes(path: Path, text: str) -> list[str]:
    sources = ROOT / "native" / "src"
    return tidy_c.check_includes(path.relative_to(sources), text) if sources in path.parents else []


def of_root(check: Check) -> Check:
    """The check with paths relative to the root."""
    return lambda path, text: check(path.relative_to(ROOT), text)


RULES: dict[str, tuple[Check, Callable[[], Sequence[Path]]]] = {
    "sizes of C": (tidy_c.check_sizes, lambda: below("native", "tests", suffixes=(".c", ".h"))),
    "calls": (tidy_c.check_calls, c_files),
    "names": (tidy_c.check_names, core_files),
    "statuses": (tidy_c.check_statuses, c_files),
    "globals": (tidy_c.check_globals, core_files),
    "comments": (tidy_c.check_comments, c_files),
    "includes": (includes, c_files),
    "sizes of Python": (of_root(tidy_python.check_sizes), lambda: repository_files(".py")),
    "imports": (of_root(tidy_python.check_imports), modules),
    "rooms": (of_root(tidy_python.check_rooms), modules),
    "environment": (of_root(tidy_python.check_environment), modules),
    "all": (of_root(tidy_python.check_all), modules),
    "messages": (of_root(tidy_python.check_messages), modules),
    "docstrings": (
        of_root(tidy_python.check_docstrings),
        lambda: below("horo", "runner", "native", ".ci", suffixes=(".py",)),
    ),
    "leftovers": (tidy_text.check_leftovers, texts),
    "whitespace": (tidy_text.check_whitespace, texts),
    "links": (tidy_text.check_links, lambda: repository_files(".md")),
    "tables": (tidy_text.check_tables, lambda: repository_files(".md")),
    "decisions": (tidy_text.check_decision, lambda: sorted((DOCS / "adr").glob("*.md"))),
}


@pytest.mark.parametrize("rule", RULES)
def test_sources_keep(rule: str) -> None:
    check, files = RULES[rule]
    paths = files()
    assert paths
    findings = [line for path in paths for line in check(path, path.read_text(encoding="utf-8"))]
    assert not findings, report(findings)


def test_each_class_has_a_name_each_error_code_a_class_and_all_parts_one_version() -> None:
    names = Counter(name for path in modules() for name in tidy_python.public_classes(path.read_text(encoding="utf-8")))
    assert [name for name, count in names.items() if count > 1] == []
    native = {version for path in c_files() for version in tidy_text.native_versions(path.read_text())}
    assert native == {horo.__version__}
    assert tidy_text.changelog_versions(read("CHANGELOG.md"))[0] == horo.__version__
    assert tidy_text.unmapped_errors(read("native", "include", "horo.h"), read("horo", "errors.py")) == []


@pytest.mark.parametrize(
    ("lock", "pinned"),
    [("requirements-dev.lock", "requirements-dev.txt"), ("requirements.lock", ".ci/requirements.txt")],
)
def test_what_is_pinned_has_hashes(lock: str, pinned: str) -> None:
    locked = read(".ci", lock)
    wanted = {tidy_text.pin(line) for line in read(*pinned.split("/")).splitlines() if "==" in line}
    assert wanted <= set(tidy_text.hashed_pins(locked)), "run `make lock`"
    assert "://" not in locked


def test_every_page_and_every_example_is_listed_and_every_decision_has_its_number() -> None:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path != DOCS / "README.md")
    assert tidy_text.missing_links(read("docs", "README.md"), pages) == []
    scripts = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert tidy_text.missing_links(read("examples", "README.md"), scripts) == []
    assert tidy_text.check_numbers([path.name for path in (DOCS / "adr").glob("*.md")]) == []


def test_reference_of_the_api_is_current() -> None:
    pytest.importorskip("torch")
    path = DOCS / "reference" / "generate_api.py"
    module = runpy.run_path(str(path))
    assert module["PAGE"].read_text(encoding="utf-8") == module["page"](), f"run python {path.relative_to(ROOT)}"


def misfits(broken: Break) -> list[str]:
    """Its text, if that is not once in the file, and names of tests that none of its files has."""
    files, _, names = broken.tests.partition(" -k ")
    shown = "".join(map(read, files.split())) + read("tests", "native", "ranks.py")  # which names the layouts
    unknown = [name for name in re.findall(r"\w+", names) if name != "or" and name not in shown]
    return unknown if read(broken.file).count(broken.old) == 1 else [broken.old, *unknown]


def test_each_break_and_what_is_said_to_be_as_in_horovod_has_tests() -> None:
    assert {broken.name: found for broken in BREAKS if (found := misfits(broken))} == {}
    assert misfits(dataclasses.replace(BREAKS[0], old="}", tests="tests/conftest.py -k no_such")) == ["}", "no_such"]

    def has_test(file: str, name: str) -> bool:
        return (ROOT / file).is_file() and f"def {name}(" in read(file)

    page = read("docs", "reference", "horovod-parity.md")
    assert page.count("| better |") > 20
    assert tidy_text.parity_findings(page, has_test) == []


def test_pages_docstrings_and_messages_are_plain_and_documents_get_no_longer() -> None:
    pages = [path for path in repository_files(".md") if path not in GENERATED]
    checked = [(path, tidy_text.check_page) for path in pages]
    checked += [(path, tidy_text.check_source) for path in modules()]
    findings = [finding(path, *item) for path, check in checked for item in check(path.read_text(encoding="utf-8"))]
    assert not findings, report(findings)
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in DOCS.rglob("*.md"))
    assert words <= WORDS_IN_DOCS, f"{words} words: shorten a page before you lengthen another"
    assert words > WORDS_IN_DOCS - 6000, f"WORDS_IN_DOCS can be {words}"


def _product(*sizes: int) -> list[tuple[str, dict[str, int]]]:
    combinations = itertools.product(*map(range, sizes))
    return [(f"test[{values}]", {f"p{i}": value for i, value in enumerate(values)}) for values in combinations]


def _traits(cases: list[tuple[str, dict[str, int]]]) -> list[tuple[str, set[object]]]:
    return [(name, set(params.items())) for name, params in cases]


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 7), (40,)], ids=str)
@pytest.mark.parametrize("most", [1, 1000])
def test_every_value_of_every_parameter_occurs(sizes: tuple[int, ...], most: int) -> None:
    cases = _product(*sizes)
    chosen = spread(_traits(cases), most)
    taken = [params for name, params in cases if name in chosen]
    for i, size in enumerate(sizes):
        assert {params[f"p{i}"] for params in taken} == set(range(size))
    assert min(most, len(cases)) <= len(chosen) <= max(most, sum(sizes))
    assert chosen == spread(_traits(cases[::-1]), most), "the order of the cases makes no difference"


def test_every_pair_of_values_of_any_two_parameters_occurs() -> None:
    cases = _product(3, 4, 5)
    taken = [params for name, params in cases if name in pairwise(cases)]
    for a, b in itertools.combinations(("p0", "p1", "p2"), 2):
        assert {(params[a], params[b]) for params in taken} == {(params[a], params[b]) for _, params in cases}
    assert len(taken) < len(cases) / 2


@pytest.mark.parametrize("cases", [_product(100), _product(2, 3), _product(4, 5)[1:]], ids=len)
def test_few_cases_and_those_of_one_list_or_no_product_are_all_taken(cases: list[tuple[str, dict[str, int]]]) -> None:
    assert pairwise(cases) == {name for name, _ in cases}


def test_parameters_in_a_row_count_as_one() -> None:
    rows = [(object(), object()) for _ in range(9)]
    cases: list[tuple[str, dict[str, object]]] = [
        (f"{i} {a} {b}", {"one": one, "a": a, "b": b, "other": other})
        for i, (one, other) in enumerate(rows)
        for a in range(3)
        for b in range(3)
    ]
    assert len(some_of(cases)) == len(cases)
    chosen = some_of(cases, rows=[("a",), ("one", "other")])
    assert CASES < len(chosen) < len(cases) / 2
    assert {name[:-2] for name in chosen} == {name[:-2] for name, _ in cases}


def test_of_random_schedules_alone_some_are_taken() -> None:
    assert len(some_of([(f"test[{seed}]", {"seed": seed}) for seed in range(9)])) == SEEDS


def test_numbers_are_at_their_ceilings() -> None:
    measured = tidy_ceilings.numbers(tidy_ceilings.read_native(ROOT))
    findings = compare(measured, tidy_ceilings.read_ceilings())
    assert not findings, report([*findings, "python tests/tidy/tidy_ceilings.py --write lowers ceilings"])


@pytest.mark.parametrize(
    ("measured", "ceilings", "expected"),
    [
        ({"files that name joining": Number(2, lambda: "a.c b.c")}, {}, "2, and the ceiling is 0\na.c b.c"),
        ({"functions": Number(50)}, {"functions": 100}, "functions: 50, below the ceiling of 100: write 50"),
        ({"declarations of a.h": Number(25)}, {}, "declarations of a.h: 25, and the ceiling is 24"),
        ({}, {"functions": 100}, "functions: delete the row"),
    ],
)
def test_what_is_off_its_ceiling_is_found(measured: dict[str, Number], ceilings: dict[str, int], expected: str) -> None:
    (finding,) = compare(measured, ceilings)
    assert finding.endswith(expected)


NATIVE = {
    "base/a.h": "void hr_a(void);\nint hr_table(void);\n",
    "base/a.c": '#include "base/a.h"\n#include "base/b.h"\n'
    "static int find(void) { return 1; }\nvoid hr_a(void) { hr_b(); }\nint hr_table(void) { return find(); }\n",
    "base/b.h": "void hr_b(void);\nHR_INLINE void hr_twice(void) { hr_b(); }\ntypedef void (*horo_hook)(int);\n",
    "base/b.c": '#include "base/b.h"\n'
    "static int find(void) { return 2; }\nvoid hr_b(void) { self->hr_a(); /* hr_a() */ find(); }\n",
    "base/c.c": '#include "base/c_template.h"\n',
    "base/c_template.h": "static void of_c(void) { hr_of_d(); }\n",
    "base/d.c": '#include "base/c_template.h"\nvoid hr_of_d(void) {}\n',
}


def test_files_and_modules_use_each_other_in_one_direction_but_through_pointers() -> None:
    assert tidy_ceilings.native_graph(tidy_ceilings.read_native(ROOT)).circle() == ""
    assert tidy_ceilings.python_graph(tidy_ceilings.read_python(ROOT)).circle() == ""
    graph = tidy_ceilings.native_graph(NATIVE)
    assert graph.edges["base/a.c"] == {"base/b.h": "included", "base/b.c": "hr_a calls hr_b"}
    assert graph.edges["base/c.c"] == {"base/d.c": "of_c calls hr_of_d"}  # of the template; d.c calls itself
    assert graph.circle() == ""


CIRCLES = [
    ({"base/b.c": "static void find(void) { hr_a(); }\nvoid hr_b(void) { find(); }\n"}, "base/a.c (find calls hr_a)"),
    ({"base/a.h": '#include "base/b.h"\n', "base/b.h": '#include "base/a.h"\nvoid hr_b(void);\n'}, "a.h (included)"),
    (
        {
            "base/a.h": "HR_INLINE int hr_x(void) { return hr_b(); }\n",
            "base/b.c": '#include "base/a.h"\nint hr_b(void) { return 0; }\n',
        },
        "base/b.c (hr_x calls hr_b)",
    ),
]


@pytest.mark.parametrize(("changes", "step"), CIRCLES)
def test_a_circle_of_calls_includes_or_inline_functions_is_named(changes: dict[str, str], step: str) -> None:
    assert step in tidy_ceilings.native_graph(NATIVE | changes).circle()


def test_declarations_are_functions_that_a_header_offers() -> None:
    assert tidy_ceilings.declarations(NATIVE["base/b.h"]) == 2
    assert tidy_ceilings.declarations("struct hr_x;\nstruct hr_x { int (*read)(void); };\nextern int a;\n") == 0


def test_a_subject_is_named_outside_its_rooms_in_code_alone() -> None:
    names = {
        "engine/a.c": "/* a joined rank */ int x;",
        "engine/b.c": 'const char *text = "has joined";',
        "engine/join.c": "int hr_join(void);",
        "engine/c.c": "void f(void) { pthread_join(thread, 0); }",
        "wire/wire.h": "int joined;",
    }
    number = tidy_ceilings.numbers(names)["files that name joining outside its rooms"]
    assert (number.value, number.why()) == (1, "engine/b.c")


MODULES = {
    "horo": "", "horo.a": "from horo import b\n", "horo.b": "if TYPE_CHECKING:\n    from . import c\n",
    "horo.c": "def f():\n    from horo.a import name\n", "horo.p": "from horo.p.inner import x\n",
    "horo.p.inner": "import horo.a\n",
}  # fmt: skip


def test_circles_of_modules_have_imports_for_types_and_in_functions() -> None:
    assert "horo.c (line 2)" in tidy_ceilings.python_graph(MODULES).circle()
    ended = MODULES | {"horo.c": "import json\n"}
    assert tidy_ceilings.python_graph(ended).circle() == ""
    assert "horo.p (line 1)" in tidy_ceilings.python_graph(ended | {"horo.p.inner": "from . import y\n"}).circle()
