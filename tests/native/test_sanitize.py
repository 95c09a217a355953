"""Sanitizer runs: a run under a sanitizer proves first that it would see a fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
from native_build import FLAVOUR

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
    # Without the names of functions, for which the sanitizer would read all that the compiler tells of the core.
    options = {name: f"{value}:symbolize=0" for name, value in os.environ.items() if name.endswith("SAN_OPTIONS")}
    environment = {**os.environ, **options}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=FOLDER,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert report in result.stderr
    assert "survived" not in result.stdout


@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
def test_a_part_of_the_tests_can_be_chosen(sanitizer: str) -> None:
    everything = sanitize.selection(sanitizer, [])
    files = [str(FOLDER / f"test_{name}.py") for name in sanitize.FILES[sanitizer]]
    assert everything[: len(files)] == files
    assert [file for file in files if not Path(file).is_file()] == [], "name the file that has its tests now"
    for word in everything[len(files) :]:
        file, _, test = word.removeprefix("--deselect=").partition("::")
        assert f"\ndef {test}" in (FOLDER.parent.parent / file).read_text(), "name the test as it is called now"
    assert sanitize.selection(sanitizer, ["-k", "ring", "-x"]) == [*everything, "-k", "ring", "-x"]
    for path in (__file__, f"{__file__}::test_some[1::2]"):
        assert sanitize.selection(sanitizer, ["-x", path]) == ["-x", path]
