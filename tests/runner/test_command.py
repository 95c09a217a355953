"""What ranks run: any command, a Python script, or a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from horo.runner.agent.command import StartError, with_python
from horo.runner.cli import parse

from jobs import Hororun

SHOW = "import os, sys\nprint(os.environ['HOROVOD_RANK'], sys.executable, *sys.argv)\n"


def test_a_script_runs_under_the_python_of_its_host(hororun: Hororun, where: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    done = hororun.run("-np", "2", "train.py", "--epochs", "3", "-np", "9", where=where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} {sys.executable} train.py --epochs 3 -np 9" for r in (0, 1)]


def test_a_module_runs_under_the_python_of_its_host(hororun: Hororun, where: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SHOW)
    done = hororun.run("-np", "2", "-m", "package.train", "-m", "x", where=where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "package" / "train.py"
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} {sys.executable} {script} -m x" for r in (0, 1)]


def test_with_python_looks_at_the_first_word_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    python = sys.executable
    assert with_python(["train.py", "a"], str(tmp_path), "", "h") == [python, "train.py", "a"]
    assert with_python([str(script)], "/", "", "h") == [python, str(script)]
    assert with_python(["-m", "package", "a"], "/", "", "h") == [python, "-m", "package", "a"]
    assert with_python(["python", "train.py"], "/", "", "h") == ["python", "train.py"]
    # A program of PATH whose name ends in .py, like those that docutils installs, is a program.
    assert with_python(["train.py"], "/", str(tmp_path), "h") == ["train.py"]
    with pytest.raises(StartError, match=r"no script './train.py' on h in /$"):
        with_python(["./train.py"], "/", str(tmp_path), "h")


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        ("plain", 127, "; for the file in {cwd}, write ./plain after 'chmod +x plain'"),
        ("program", 127, "'program' is in no folder of PATH there; for the file in {cwd}, write ./program"),
        ("./plain", 126, "'./plain' on {host} is not executable: 'chmod +x ./plain', or write its interpreter first"),
    ],
)
def test_a_command_that_is_nearly_right_is_told_what_is_missing(
    hororun: Hororun, tmp_path: Path, command: str, code: int, sentence: str
) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "program").touch(0o755)
    for host in ("localhost", "one"):
        done = hororun.run("-np", "1", command, where=f"{host}:1", cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)
        assert done.stderr.endswith(sentence.format(host=host, cwd=tmp_path) + "\n")


@pytest.mark.parametrize("words", ["-n 2", "-n2", "-np2", "-np=2", "--num-proc 2"])
def test_the_number_of_ranks_may_be_written_as_other_launchers_have_it(words: str) -> None:
    job = parse([*words.split(), "-H", "a:2", "train.py", "-n7", "-np9"])
    assert job is not None
    assert (job.size, job.command) == (2, ("train.py", "-n7", "-np9"))


def test_a_dry_run_shows_the_python(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = hororun.run("-np", "2", "--dry-run", "train.py", "x", where="localhost:2", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == f"each rank: {sys.executable} train.py x"
    done = hororun.run(
        "-np", "2", "--dry-run", "--remote-python", "/py", "train.py", where="localhost:1,one:1", cwd=tmp_path
    )
    assert done.stdout.splitlines()[-2:] == [
        f"each rank here: {sys.executable} train.py",
        "each rank elsewhere: /py train.py",
    ]
