"""The second run of failed tests, which tells flaky ones from broken ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tidy_files import ROOT

TESTS = """
from pathlib import Path
import pytest

def test_flaky():
    first = not Path("again").exists()
    Path("again").touch()
    assert not first

def test_good():
    with Path("runs").open("a") as runs:
        runs.write("x")

@pytest.mark.parametrize("case", range({broken}))
def test_broken(case):
    assert False
"""


def run_twice(folder: Path, broken: int, code: str = "") -> subprocess.CompletedProcess[str]:
    """A run of pytest on ``broken`` broken tests, a flaky and a good one, and the second run behind it."""
    (folder / "test_it.py").write_text(TESTS.format(broken=broken) + code)
    cache = folder / "cache"
    pytest_again = f'exec "{sys.executable}" -m pytest -q -p no:xdist $PYTEST_ARGS test_it.py'
    first = f'PYTEST_ARGS="-o cache_dir={cache}"; {pytest_again}'
    log = folder / "log"
    with log.open("wb") as output:
        done = subprocess.run(["sh", "-c", first], cwd=folder, stdout=output, timeout=120, check=False)
    assert done.returncode != 0
    command = [ROOT / ".ci" / "again", cache, log, "sh", "-c", pytest_again]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_test_that_passes_alone_is_flaky(tmp_path: Path) -> None:
    done = run_twice(tmp_path, broken=0)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "flaky: test_it.py::test_flaky"
    assert (tmp_path / "runs").read_text() == "x"  # in the first run only


BROKEN = [
    (1, "", "1 failed, 1 passed"),
    (10, "", "11 tests failed, more than 10"),
    (0, "\ndef test_end():\n    import os; os._exit(3)\n", "did not reach its end"),
    (0, "\ndef test_end():\n    raise KeyboardInterrupt\n", "did not reach its end"),
]


@pytest.mark.parametrize(("broken", "code", "why"), BROKEN)
def test_a_broken_test_and_a_run_that_broke_off_stay_failures(tmp_path: Path, broken: int, code: str, why: str) -> None:
    done = run_twice(tmp_path, broken=broken, code=code)
    assert done.returncode == 1
    assert why in done.stdout
    assert "flaky:" not in done.stdout
