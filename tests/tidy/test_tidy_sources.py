"""House rules, held over all sources and documents of the repository."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tidy_c
import tidy_python
import tidy_text
import tidy_words
from breaks.breaks import BREAKS, Break
from tidy_files import ROOT, below, finding, report, repository_files

import horo

Check = Callable[[Path, str], list[str]]
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


def test_each_class_has_a_name_of_its_own() -> None:
    names = Counter(name for path in modules() for name in tidy_python.public_classes(path.read_text(encoding="utf-8")))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("module", ["horo", "horo.runner", "horo.errors"])
def test_light_modules_do_not_load_heavy_ones(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'cffi', 'horo._native'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_changelog_native_core_and_package_have_one_version() -> None:
    native = {version for path in c_files() for version in tidy_text.native_versions(path.read_text())}
    assert native == {horo.__version__}
    assert tidy_text.changelog_versions(read("CHANGELOG.md"))[0] == horo.__version__


def test_every_error_code_has_a_class() -> None:
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
    spec = importlib.util.spec_from_file_location("generate_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert Path(module.PAGE).read_text(encoding="utf-8") == module.page(), f"run python {path.relative_to(ROOT)}"


def misfits(broken: Break) -> list[str]:
    """Its text, if that is not once in the file, and names of tests that none of its files has."""
    files, _, names = broken.tests.partition(" -k ")
    shown = "".join(map(read, files.split())) + read("tests", "native", "ranks.py")  # which names the layouts
    unknown = [name for name in re.findall(r"\w+", names) if name != "or" and name not in shown]
    return unknown if read(broken.file).count(broken.old) == 1 else [broken.old, *unknown]


def test_each_break_fits_its_file_and_has_tests() -> None:
    assert {broken.name: found for broken in BREAKS if (found := misfits(broken))} == {}
    assert misfits(dataclasses.replace(BREAKS[0], old="}", tests="tests/conftest.py -k no_such")) == ["}", "no_such"]


def test_what_is_said_to_be_as_in_horovod_has_a_test() -> None:
    def has_test(file: str, name: str) -> bool:
        return (ROOT / file).is_file() and f"def {name}(" in read(file)

    page = read("docs", "reference", "horovod-parity.md")
    assert page.count("| better |") > 20
    assert tidy_text.parity_findings(page, has_test) == []


def test_pages_are_plain() -> None:
    pages = [path for path in repository_files(".md") if path not in GENERATED]
    findings = [
        finding(path, *item) for path in pages for item in tidy_words.check_page(path.read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


def test_docstrings_and_messages_are_plain() -> None:
    findings = [
        finding(path, *item) for path in modules() for item in tidy_words.check_source(path.read_text(encoding="utf-8"))
    ]
    assert not findings, report(findings)


def test_documents_get_no_longer() -> None:
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in DOCS.rglob("*.md"))
    assert words <= WORDS_IN_DOCS, f"{words} words: shorten a page before you lengthen another"
    assert words > WORDS_IN_DOCS - 6000, f"WORDS_IN_DOCS can be {words}"
