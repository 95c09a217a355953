"""House rules of the C sources, and a bad sample for each rule so that it is known to find something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tidy_c
from tidy_files import ROOT, below, report

Check = Callable[[Path, str], list[str]]
SOURCES = ROOT / "native" / "src"

CHECKS: tuple[Check, ...] = (
    tidy_c.check_sizes,
    tidy_c.check_calls,
    tidy_c.check_names,
    tidy_c.check_globals,
    tidy_c.check_comments,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_c_sources_keep(check: Check) -> None:
    files = below("native", suffixes=(".c", ".h"))
    assert files
    findings = [line for path in files for line in check(path, path.read_text(encoding="utf-8"))]
    assert not findings, report(findings)


def test_native_folders_include_downward_only() -> None:
    files = [path for path in below("native", suffixes=(".c", ".h")) if SOURCES in path.parents]
    findings = [
        line
        for path in files
        for line in tidy_c.check_includes(path.relative_to(SOURCES), path.read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


def test_test_shims_keep_the_sizes() -> None:
    findings = [
        line
        for path in below("tests", suffixes=(".c", ".h"))
        for line in tidy_c.check_sizes(path, path.read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


LONG_FUNCTION = "static int long_one(void) {\n" + "    work();\n" * 70 + "}\n"

BAD: list[tuple[Check, str, str, str]] = [
    (tidy_c.check_sizes, "base/a.c", "int x;\n" * 500, "500 lines"),
    (tidy_c.check_sizes, "base/a.c", LONG_FUNCTION, "long_one has 72 lines"),
    (tidy_c.check_sizes, "base/a.c", "/* " + "x" * 120 + " */\n", "columns"),
    (tidy_c.check_calls, "base/a.c", "static void f(char *a) {\n    strcpy(a, b);\n}\n", "a.c:2: strcpy"),
    (tidy_c.check_calls, "base/a.c", 'static void f(void) { printf("x"); }', "printf"),
    (tidy_c.check_names, "base/a.c", "int helper(int a) { return a; }", "helper is not static"),
    (tidy_c.check_names, "base/a.c", "static int hr_helper(int a) { return a; }", "bare"),
    (tidy_c.check_names, "base/a.h", "typedef struct { int a; } thing_t;", "thing_t"),
    (tidy_c.check_names, "base/a.h", "struct thing_t { int a; };", "thing_t"),
    (tidy_c.check_globals, "base/a.c", "static int counter;", "counter"),
    (tidy_c.check_globals, "base/a.c", "struct hr_x hr_state = {0};", "hr_state"),
    (tidy_c.check_globals, "base/a.c", "static struct { int a; } hidden;", "hidden"),
    (tidy_c.check_globals, "base/a.c", "static const char *names[] = {NULL};", "names"),
    (tidy_c.check_globals, "base/a.c", "static void (*hook)(int);", "hook"),
    (tidy_c.check_globals, "base/a.c", "static _Atomic int ready = 0;", "ready"),
    (
        tidy_c.check_globals,
        "base/a.c",
        "int hr_f(void) {\n    static int n = 0;\n    return n++;\n}",
        "a.c:2: static variable",
    ),
    (tidy_c.check_comments, "base/a.c", "/* How many are left. */\nint hr_left(void);\n", "a.c:1: How many are left."),
    (tidy_c.check_comments, "base/a.h", "/*\n * What it does.\n */\n#ifndef HR_A\n#endif\n", "a.h:1: What it does."),
    (tidy_c.check_comments, "base/a.h", "struct hr_a {\n    // Where it is.\n    int at;\n};\n", "a.h:2: Where it is."),
    (tidy_c.check_comments, "base/a.c", "int hr_f(int a) {\n    a++; /* what is left */\n}\n", "a.c:2: what is left"),
    (tidy_c.check_comments, "base/a.h", "struct hr_a {\n    int at; /* who has it */\n};\n", "a.h:2: who has it"),
    (tidy_c.check_includes, "engine/a.c", '#include "engine/agree/private.h"\n', "for the files beside it"),
    (tidy_c.check_includes, "engine/agree/a.c", '#include "engine/lane.h"\n', "room agree may include of engine: none"),
    (tidy_c.check_includes, "base/a.c", '#include "base/b/a.h"\n', "include as"),
    (tidy_c.check_includes, "base/a.c", '#include "engine/agree.h"\n', "base includes engine"),
    (tidy_c.check_includes, "engine/a.c", '#include "../base/map.h"\n', "folder/file.h"),
    (tidy_c.check_includes, "surprise/a.c", "", "no line in MAY_INCLUDE"),
    (tidy_c.check_includes, "surprise.c", "", "directly in native/src"),
]


@pytest.mark.parametrize(("check", "name", "text", "expected"), BAD)
def test_check_finds_the_bad_sample(check: Check, name: str, text: str, expected: str) -> None:
    findings = check(Path(name), text)
    assert len(findings) == 1, findings
    assert expected in findings[0]


GOOD = r"""
/* strcpy(a, b) in a comment; static int counter; */
#define TWICE(x) \
    ((x) + (x))
#include "base/status.h"
struct hr_thing;
struct hr_thing {
    int (*read)(void *self);
    const char *name;
};
typedef struct { int a; } horo_pair;
enum { SMALL = 4 };
_Static_assert(sizeof(int) == 4, "int");
static const char *const names[] = {"printf(", "}"};
static const struct hr_thing things[2] = {{0}, {.name = ";"}};
/* The number of those that are left; how many there were, is not known. */
int hr_declared(int a, void (*done)(int));
static inline int twice(int a) {
    static const int two[1 * 1] = {2};
    static int (*const duties[])(struct hr_thing *) = {hr_run};
    /* Where a reason stands inside a function, it may begin as it likes. */
    char text[] = "} strcpy(/*"; /* where it is */
    return a * two[0] + text[0] + '{';
}
HR_INLINE int thrice(int a) {
    return 3 * a;
}
HR_DEFINE_TABLE(static, table)
HR_DEFINE_ALL_OPS
int hr_run(const struct hr_thing *thing) {
    return thing->read((void *)0) + vtable.exit(1);
}
"""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_is_silent_on_the_good_sample(check: Check) -> None:
    assert check(Path("base/good.c"), GOOD) == []


def test_items_finds_functions_with_their_lines() -> None:
    functions = [item for item in tidy_c.items(tidy_c.code_only(GOOD)) if item.function_name]
    assert [item.function_name for item in functions] == ["twice", "thrice", "hr_run"]
    assert [(item.first_line, item.last_line) for item in functions] == [(18, 24), (25, 27), (28, 32)]
