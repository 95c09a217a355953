"""Numbers that may only fall: circles of files and modules, wide headers, subjects outside their rooms, size."""

from __future__ import annotations

import pytest
import tidy_ceilings
import tidy_graph
from tidy_ceilings import Number, compare
from tidy_files import ROOT, report


def test_numbers_are_at_their_ceilings() -> None:
    measured = tidy_ceilings.numbers(tidy_graph.read_native(ROOT), tidy_graph.read_python(ROOT))
    findings = compare(measured, tidy_ceilings.read_ceilings())
    assert not findings, report([*findings, "python tests/tidy/tidy_ceilings.py --write lowers ceilings"])


@pytest.mark.parametrize(
    ("measured", "ceilings", "expected"),
    [
        ({"files of engine in circles": Number(2, lambda: "a -> b -> a")}, {}, "2, and the ceiling is 0\na -> b -> a"),
        ({"functions": Number(50)}, {"functions": 100}, "functions: 50, below the ceiling of 100: write 50"),
        ({"declarations of a.h": Number(25)}, {}, "declarations of a.h: 25, and the ceiling is 24"),
        ({}, {"functions": 100}, "functions: delete the row"),
    ],
)
def test_a_number_that_is_not_at_its_ceiling_is_found(
    measured: dict[str, Number], ceilings: dict[str, int], expected: str
) -> None:
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


def test_a_call_through_a_pointer_or_of_a_static_function_makes_no_circle() -> None:
    graph = tidy_graph.native_graph(NATIVE)
    assert graph.edges["base/a.c"] == {"base/b.h": "included", "base/b.c": "hr_a calls hr_b"}
    assert graph.edges["base/c.c"] == {"base/d.c": "of_c calls hr_of_d"}  # of the template; d.c calls itself
    assert graph.circles() == []


def test_a_circle_of_calls_is_named_with_its_calls() -> None:
    circling = NATIVE | {"base/b.c": "static void find(void) { hr_a(); }\nvoid hr_b(void) { find(); }\n"}
    number = tidy_ceilings.numbers(circling, {})["files of base in circles"]
    assert number.value == 2
    assert "base/a.c -> base/b.c (hr_a calls hr_b) -> base/a.c (find calls hr_a)" in number.why()


def test_a_circle_of_includes_and_inline_functions_is_found() -> None:
    circling = NATIVE | {"base/a.h": '#include "base/b.h"\n', "base/b.h": '#include "base/a.h"\nvoid hr_b(void);\n'}
    assert tidy_graph.native_graph(circling).circles() == [["base/a.h", "base/b.h"]]
    circling = NATIVE | {"base/a.h": "HR_INLINE int hr_x(void) { return hr_b(); }\n", "base/b.c": '#include "base/a.h"'}
    circling["base/b.c"] += "\nint hr_b(void) { return 0; }\n"
    assert tidy_graph.native_graph(circling).circles() == [["base/a.h", "base/b.c"]]


def test_declarations_are_functions_that_a_header_offers() -> None:
    assert tidy_graph.declarations(NATIVE["base/b.h"]) == 2
    assert tidy_graph.declarations("struct hr_x;\nstruct hr_x { int (*read)(void); };\nextern int a;\n") == 0


def test_a_subject_is_named_outside_its_rooms_in_code_alone() -> None:
    names = {
        "engine/a.c": "/* a joined rank */ int x;",
        "engine/b.c": 'const char *text = "has joined";',
        "engine/join.c": "int hr_join(void);",
        "engine/c.c": "void f(void) { pthread_join(thread, 0); }",
        "wire/wire.h": "int joined;",
    }
    number = tidy_ceilings.numbers(names, {})["files that name joining outside its rooms"]
    assert (number.value, number.why()) == (1, "engine/b.c")


def test_circles_of_modules_have_imports_for_types_and_in_functions() -> None:
    modules = {
        "horo": "",
        "horo.a": "from horo import b\n",
        "horo.b": "if TYPE_CHECKING:\n    from . import c\n",
        "horo.c": "def f():\n    from horo.a import name\n",
        "horo.p": "from horo.p.inner import x\n",
        "horo.p.inner": "import horo.a\n",
    }
    assert tidy_graph.python_graph(modules).circles() == [["horo.a", "horo.b", "horo.c"]]
    modules["horo.c"] = "import json\n"
    assert tidy_graph.python_graph(modules).circles() == []
    modules["horo.p.inner"] = "from . import y\n"
    assert tidy_graph.python_graph(modules).circles() == [["horo.p", "horo.p.inner"]]
    modules = {
        "horo.a": "from horo import b",
        "horo.b": "def f():\n    from horo.c.d import x",
        "horo.c": "",
        "horo.c.d": "if TYPE_CHECKING:\n    import horo.b",
        "horo.c.e": "from .d import y",
    }
    assert tidy_graph.python_graph(modules).circles() == [["horo.b", "horo.c.d"]]
