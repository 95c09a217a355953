"""`make` says in one sentence what is missing on a machine, before it changes anything."""

from __future__ import annotations

import subprocess
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
