"""`make` names what is missing before it changes anything; failed tests run again, which finds the flaky ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tidy_files import ROOT

# A Python that lacks one thing: the answers to the questions that .ci/venv asks, in its order.
FAKE = """#!/usr/bin/env bash
case "$*" in
    *sys.executable*) {starts} && echo "$0" ;;
    *version_info*) {is_new} ;;
    --version) echo "Python 3.9.1" ;;
    *sysconfig*) echo "{include}" ;;
    *ensurepip*) false ;;
    *pip*) false ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


def create(python: str, folder: Path, compiler: str = "true") -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".ci" / "venv"), python, str(folder)]
    environment = {"PATH": "/usr/bin:/bin", "CC": compiler}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def fake_python(folder: Path, *, starts: bool = True, is_new: bool = True, has_headers: bool = True) -> str:
    if has_headers:
        (folder / "Python.h").touch()
    script = folder / "python3"
    words = {True: "true", False: "false"}
    script.write_text(FAKE.format(starts=words[starts], is_new=words[is_new], include=folder))
    script.chmod(0o755)
    return str(script)


LACKS = [
    ({"starts": False}, "does not start"),
    ({"is_new": False}, "Python 3.9.1 at"),
    ({"has_headers": False}, "Python.h is missing"),
    ({}, "neither ensurepip nor pip"),
]


@pytest.mark.parametrize(("lack", "message"), LACKS)
def test_what_a_python_lacks_is_one_sentence(tmp_path: Path, lack: dict[str, bool], message: str) -> None:
    done = create(fake_python(tmp_path, **lack), tmp_path / "venv")
    assert (done.returncode, done.stderr.startswith("make: "), done.stderr.count("\n")) == (1, True, 1)
    assert message in done.stderr


def test_what_is_missing_is_named_and_an_environment_stays(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "kept").touch()
    assert "'no-such-python' is not there" in create("no-such-python", tmp_path / "venv").stderr
    assert (tmp_path / "venv" / "kept").exists()
    done = create(fake_python(tmp_path), tmp_path / "venv", compiler="no-such-compiler")
    assert "the C compiler 'no-such-compiler' is not there" in done.stderr


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
    cache, env = folder / "cache", {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take long to load
    pytest_again = f'exec "{sys.executable}" -m pytest -q -p no:xdist $PYTEST_ARGS test_it.py'
    first = f'PYTEST_ARGS="-o cache_dir={cache}"; {pytest_again}'
    log = folder / "log"
    with log.open("wb") as output:
        done = subprocess.run(["sh", "-c", first], cwd=folder, env=env, stdout=output, timeout=120, check=False)
    assert done.returncode != 0
    command = [ROOT / ".ci" / "again", cache, log, "sh", "-c", pytest_again]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


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
