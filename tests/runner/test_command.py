"""What ranks run, and what users mean otherwise: input, a launcher in a launcher, names of variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Hororun, run_python
from parsing import parsed

from horo.runner.agent.command import StartError, with_python
from horo.runner.cli import main
from horo.runner.job.forwarded_variables import outer_rank

SHOW = "import os, sys\nprint(os.environ['HOROVOD_RANK'], sys.executable, *sys.argv)\n"


def test_a_script_and_a_module_run_under_the_python_of_their_host(hororun: Hororun, where: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    module = tmp_path / "package" / "train.py"
    module.write_text(SHOW)
    for words, shown in (
        (["package/train.py", "--epochs", "3", "-np", "9"], "package/train.py --epochs 3 -np 9"),
        (["-m", "package.train", "-m", "x"], f"{module} -m x"),
    ):
        done = hororun.run("-np", "2", *words, where=where, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} {sys.executable} {shown}" for rank in (0, 1)]


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


@pytest.mark.parametrize("words", ["-n 2", "-n2", "-np2", "-np=2", "--num-proc 2"])
def test_the_number_of_ranks_may_be_written_as_other_launchers_have_it(words: str) -> None:
    job = parsed([*words.split(), "-H", "a:2", "train.py", "-n7", "-np9"])
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


def test_input_that_nobody_reads_is_said(hororun: Hororun, tmp_path: Path) -> None:
    said = "hororun: nothing was read from stdin: that of every rank is /dev/null\n"
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"some\n")
    os.close(write_fd)
    assert hororun.run("-np", "1", "true", stdin=read_fd).stderr == said
    os.close(read_fd)
    (tmp_path / "input").write_text("some\n")
    with (tmp_path / "input").open() as file:
        assert hororun.run("-np", "1", "true", stdin=file).stderr == said
    read_fd, write_fd = os.pipe()  # empty: as where another program has started hororun
    assert hororun.run("-np", "1", "true", stdin=read_fd).stderr == ""
    os.close(read_fd)
    os.close(write_fd)


def test_a_hororun_in_a_hororun_warns(hororun: Hororun, where: str) -> None:
    inner = [sys.executable, "-m", "horo.runner", "-np", "1", "-H", "localhost:1", "true"]
    done = hororun.run("-np", "1", "--", *inner, where=where)
    expected = (
        "[0] hororun: warning: this hororun is itself rank 0 of another hororun's job and starts a whole job of its own"
    )
    assert (done.returncode, done.stderr) == (0, expected + "\n")
    assert outer_rank({"HOROVOD_RANK": "1"}) == ""


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}, "rank 1 of a job of torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "rank 3 of a job of mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "rank 0 of a job of mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_a_hororun_below_another_launcher_is_known(environment: dict[str, str], rank: str) -> None:
    assert outer_rank(environment) == rank


WARNS = "from horo.bootstrap.job import start\nstart().close()\n"


def test_rank_0_warns_of_a_misspelt_variable(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WARNS)
    done = hororun.run("-np", "2", "train.py", cwd=tmp_path, environment={"HORO_LOGLEVEL": "debug"})
    assert done.returncode == 0
    assert done.stderr == (
        "[0] horo [0] warning: HORO_LOGLEVEL is no variable of horo and means nothing: did you mean HORO_LOG_LEVEL?\n"
    )


@pytest.mark.parametrize(("name", "way"), [("HORO_CYCLE_TIME", []), ("HOROVOD_CYCLE_TIME", ["--mpi"])])
def test_a_wrong_value_in_the_environment_is_one_line_before_any_rank_starts(
    name: str, way: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "soon")
    assert main([*way, "-np", "2", "-H", "h1:2", "no-such-command"]) == 2
    assert capsys.readouterr() == ("", f"hororun: {name}='soon' is not a number from 0 to 1000 ms\n")


def test_a_wrong_value_in_the_environment_that_an_option_replaces_is_none() -> None:
    environment = {"HORO_CYCLE_TIME": "soon", "HOROVOD_CACHE_CAPACITY": "much"}
    words = ["-np", "2", "--cycle-time-ms", "3", "-x", "HORO_CACHE_CAPACITY=7", "true"]
    job = parsed(words, environment=environment)
    assert job.exports["HORO_CYCLE_TIME"] == "3"


def show(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "horo", *words, environment=environment)


def test_check_build_shows_what_the_environment_has_set() -> None:
    lines = show("--check-build", HOROVOD_CYCLE_TIME="2", HORO_LOG_LEVEL="").stdout.splitlines()
    assert [line.split() for line in lines if "HOROVOD_" in line] == [
        ["[X]", "cycle_time_ms", "2.0", "HOROVOD_CYCLE_TIME"]
    ]
    assert "Settings from the environment:" in lines


def test_check_build_fails_where_init_would() -> None:
    done = show("--check-build", HORO_SPIN_US="x")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("init() fails here: HORO_SPIN_US='x' is not an integer")
    inside = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HORO_STORE": "127.0.0.1:1", "RANK": "1"}
    assert show("--check-build", **inside).returncode == 0


SHOWS = [["--help"], ["--check-hosts"], ["-np", "1", "--dry-run", "true"]]


def onto(stdout: str, words: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a hororun whose stdout the shell has made so."""
    script = ["sh", "-c", f'exec "$@" {stdout}', "sh", sys.executable, "-m", "horo", *words]
    done = subprocess.run(script, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [*SHOWS, ["-np", "1", "echo", "x"]], ids=" ".join)
def test_a_stdout_that_cannot_be_written_is_named(words: list[str]) -> None:
    """A full disk, and for what hororun itself shows a closed one, and a reader that has left, who needs no word."""
    code, said = onto("> /dev/full", words)
    assert said.startswith("hororun: stdout cannot be written: No space left on device")
    assert (code, said.count("\n")) == (78, 1)
    if words in SHOWS:
        code, said = onto(">&-", words)
        assert said.startswith("hororun: stdout is closed")
        assert (code, said.count("\n")) == (78, 1)
        read_fd, write_fd = os.pipe()
        os.close(read_fd)
        command = [sys.executable, "-m", "horo", *words]
        done = subprocess.run(command, stdout=write_fd, stderr=subprocess.PIPE, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (141, b"")
        os.close(write_fd)


INTERRUPTED = """
import signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from horo.runner.cli import main
sys.exit(main(["-np", "1", "true"]))
"""
"""Ctrl-C while a module is loaded."""


@pytest.mark.parametrize("at", ["horo.runner.cli.entry", "horo.runner.job.supervise"])
def test_an_interrupt_while_hororun_starts_is_one_line(at: str) -> None:
    done = run_python("-c", INTERRUPTED, at)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hororun: interrupted\n")


def test_hororun_alone_asks_what_to_run(hororun: Hororun) -> None:
    done = hororun.run(where=None, environment={"CUDA_VISIBLE_DEVICES": ""})
    said = "hororun: no command given: say what to run, like 'hororun -np 2 train.py'\n"
    assert (done.returncode, done.stderr) == (2, said)
