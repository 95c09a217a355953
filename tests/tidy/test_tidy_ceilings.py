"""Numbers that may only fall: wide headers, subjects outside their rooms, size; and that there are no circles."""

import pytest
import tidy_ceilings
import tidy_graph
from tidy_ceilings import Number, compare
from tidy_files import ROOT, report


def test_numbers_are_at_their_ceilings() -> None:
    measured = tidy_ceilings.numbers(tidy_graph.read_native(ROOT))
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


def test_files_and_modules_use_each_other_in_one_direction() -> None:
    assert tidy_graph.native_graph(tidy_graph.read_native(ROOT)).circle() == ""
    assert tidy_graph.python_graph(tidy_graph.read_python(ROOT)).circle() == ""


def test_a_call_through_a_pointer_or_of_a_static_function_makes_no_circle() -> None:
    graph = tidy_graph.native_graph(NATIVE)
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
    assert step in tidy_graph.native_graph(NATIVE | changes).circle()


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
    number = tidy_ceilings.numbers(names)["files that name joining outside its rooms"]
    assert (number.value, number.why()) == (1, "engine/b.c")


MODULES = {
    "horo": "", "horo.a": "from horo import b\n", "horo.b": "if TYPE_CHECKING:\n    from . import c\n",
    "horo.c": "def f():\n    from horo.a import name\n", "horo.p": "from horo.p.inner import x\n",
    "horo.p.inner": "import horo.a\n",
}  # fmt: skip


def test_circles_of_modules_have_imports_for_types_and_in_functions() -> None:
    assert "horo.c (line 2)" in tidy_graph.python_graph(MODULES).circle()
    ended = MODULES | {"horo.c": "import json\n"}
    assert tidy_graph.python_graph(ended).circle() == ""
    assert "horo.p (line 1)" in tidy_graph.python_graph(ended | {"horo.p.inner": "from . import y\n"}).circle()
