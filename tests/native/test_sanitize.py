"""Sanitizer runs: a run under a sanitizer proves first that it would see a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
from native_build import FLAVOUR
from skips import no_compiler

FOLDER = Path(__file__).resolve().parent
FAULTS = {
    "shim_fault_overflow": ("address", "AddressSanitizer: heap-buffer-overflow"),
    "shim_fault_integer": ("address", "runtime error: signed integer overflow"),
    "shim_fault_race": ("thread", "ThreadSanitizer: data race"),
}


@pytest.mark.skipif(FLAVOUR == "", reason="no sanitizer in this run (tests/native/sanitize.py starts one)")
@pytest.mark.usefixtures("native")  # built, so that the time limit is for running only
@pytest.mark.parametrize("fault", [fault for fault, (flavour, _) in FAULTS.items() if flavour == FLAVOUR])
def test_the_sanitizer_of_this_run_reports_a_deliberate_fault_and_ends_the_process(fault: str) -> None:
    report = FAULTS[fault][1]
    code = f"import native_build; print(native_build.load().lib.{fault}(), 'survived')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert report in result.stderr
    assert "survived" not in result.stdout


@pytest.mark.parametrize("arguments", [[], ["adress"]])
def test_an_unknown_sanitizer_is_named_and_the_known_ones_listed(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        sanitize.main(arguments)
    assert "address, thread" in str(caught.value)
    assert (repr(arguments[0]) if arguments else "nothing") in str(caught.value)


def test_an_unknown_flavour_of_the_build_is_refused() -> None:
    env = {**os.environ, "HORO_SANITIZE": "memory"}
    result = subprocess.run(
        [sys.executable, "-c", "import native_build"],
        cwd=FOLDER,
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "HORO_SANITIZE is 'memory'" in result.stderr


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
def test_options_that_the_user_has_set_win(sanitizer: str) -> None:
    env = sanitize.environment(sanitizer, {"ASAN_OPTIONS": "verbosity=1", "HOME": "/"})
    assert env["ASAN_OPTIONS"] == "verbosity=1"
    assert env["HORO_SANITIZE"] == sanitizer
    assert Path(env["LD_PRELOAD"]).is_file()


@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
def test_a_part_of_the_tests_can_be_chosen(sanitizer: str) -> None:
    everything = sanitize.selection(sanitizer, [])
    assert everything == [str(FOLDER / f"test_{name}.py") for name in sanitize.FILES[sanitizer]]
    assert [file for file in everything if not Path(file).is_file()] == [], "name the file that has its tests now"
    assert sanitize.selection(sanitizer, ["-k", "ring", "-x"]) == [*everything, "-k", "ring", "-x"]
    for path in (__file__, f"{__file__}::test_some[1::2]"):
        assert sanitize.selection(sanitizer, ["-x", path]) == ["-x", path]


@pytest.mark.parametrize(("target", "sanitizer"), [("asan", "address"), ("tsan", "thread")])
def test_make_passes_the_choice_on(target: str, sanitizer: str) -> None:
    make = ["make", "--dry-run", "--always-make", target, "PYTEST_ARGS=-k ring"]
    # In this run's own sanitizer, which the library is loaded for, make itself fails.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(make, cwd=FOLDER.parents[1], env=env, check=True, capture_output=True, text=True, timeout=60)
    assert f"tests/native/sanitize.py {sanitizer} -k ring\n" in done.stdout
