"""The command line: words that are right and wrong, what ranks run, what users mean otherwise, and ``--attach``."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from jobs import Hororun, run_python
from parsing import parsed

from horo import __version__
from horo.runner.agent.command import StartError, with_python
from horo.runner.cli import attach as module
from horo.runner.cli import check_build, main
from horo.runner.config import EXIT_UNREACHABLE, JobError
from horo.runner.hosts import HostSpec
from horo.runner.job.attach_server import address_of
from horo.runner.job.forwarded_variables import outer_rank


def test_the_command_begins_at_the_first_word_that_is_no_option() -> None:
    assert parsed("-np 2 -H a:2 python train.py -np 7 -- x").command == ("python", "train.py", "-np", "7", "--", "x")
    assert parsed("--num-proc=2 --verbose -- -x 1").command == ("-x", "1")
    assert parsed("-np 2 -x A=1 python").exports == {"A": "1"}


def test_options_become_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/d")
    job = parsed(
        "-np 3 -H a:2,me@b:1:port=2222 --oversubscribe --grace-seconds 1.5 --start-timeout 7 --host-timeout 9 "
        "--network-interfaces e0,e1 --network-interface e2 --store-port 1000 --master-port 1001 -x DATA -x B=2 "
        "--no-keep-memory --no-move-ranks "
        "-p 23 -i key --ssh-args=-v --remote-shell rsh --remote-python /py --prefix-timestamp "
        "--output-filename out --verbose cmd"
    )
    assert job.hosts == (HostSpec("a", slots=2), HostSpec("b", "me", 2222, 1))
    assert (job.size, job.oversubscribe, job.grace_s, job.start_timeout_s, job.host_timeout_s) == (3, True, 1.5, 7, 9)
    assert (job.interfaces, job.store_port, job.master_port) == (("e0", "e1", "e2"), 1000, 1001)
    assert job.torch_env and not parsed("-np 1 --no-torch-env cmd").torch_env
    assert not job.keep_memory
    assert parsed("-np 1 cmd").keep_memory
    assert job.exports == {
        "HORO_START_TIMEOUT": "7",
        "HORO_LEAVE_CROWDED_CORES": "0",
        "HORO_NETWORK_INTERFACES": "e0,e1,e2",
        "DATA": "/d",
        "B": "2",
    }
    assert (job.ssh.program, job.ssh.port, job.ssh.identity_file) == ("rsh", 23, "key")
    assert (job.ssh.arguments, job.python) == (("-v",), "/py")
    output = job.output
    assert (output.prefix, output.timestamp, output.directory, output.verbose) == (True, True, "out", True)
    assert not parsed("-np 1 --no-prefix cmd").output.prefix


def test_training_options_become_variables_of_the_ranks() -> None:
    job = parsed(
        "-np 1 --fusion-threshold-mb 32 --cycle-time-ms 2.5 --cache-capacity 9 "
        "--stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 50 --log-level debug cmd"
    )
    assert job.exports == {
        "HORO_FUSION_THRESHOLD": str(32 << 20),
        "HORO_CYCLE_TIME": "2.5",
        "HORO_CACHE_CAPACITY": "9",
        "HORO_STALL_CHECK_TIME_SECONDS": "5",
        "HORO_STALL_SHUTDOWN_TIME_SECONDS": "50",
        "HORO_LOG_LEVEL": "debug",
    }
    for option, value in (("--stall-check", "0"), ("--no-stall-check", "1")):
        assert parsed(f"-np 1 {option} cmd").exports["HORO_STALL_CHECK_DISABLE"] == value


OF_TEXT = "--output-filename --remote-python --remote-shell --mpirun -i"
STALL_TIMES = "--stall-check-warning-time-seconds --stall-check-shutdown-time-seconds"
WRONG = [
    *((f"-np {count} cmd", f"-np {count}") for count in (0, -2)),
    ("-np two cmd", "'two'"),
    ("-np 2", "no command"),
    ("-np 2 --", "no command"),
    ("cmd", "-np N"),
    ("-np", "-np"),
    ("-np 2 --bogus cmd", "--bogus"),
    ("-np 2 -H a:x cmd", "'x'"),
    ("-np 2 -H a:1 --hostfile f cmd", "--hostfile"),
    ("-np 2 --hostfile /no/such/file cmd", "/no/such/file"),
    ("-np 3 -H localhost:2 cmd", "3 ranks but there are 2 slots"),
    ("-np 2 -x NO_SUCH_VARIABLE_HERE cmd", "NO_SUCH_VARIABLE_HERE"),
    ("-np 2 --grace-seconds -1 cmd", "-1"),
    ("-np 2 --grace-seconds nan cmd", "nan"),
    ("-np 2 --start-timeout 0 cmd", "0"),
    ("-np 2 --store-port 70000 cmd", "70000"),
    ("-np 2 --log-level loud cmd", "--log-level: 'loud' is not one of trace, debug, info, warning"),
    ("-np 2 --launcher rsh cmd", "'rsh' is none of auto, ssh, slurm, mpi, jsrun"),
    ("-np 2 --bind-to socket cmd", "'socket' is none of core, numa, none"),
    ("-np 2 --cycle-time-ms 5000 cmd", "--cycle-time-ms: '5000' is not a number from 0 to 1000 ms"),
    ("-np 2 --fusion-threshold-mb 2000000 cmd", "-mb: '2000000' is not an integer from 0 to 1048576 MB"),
    ("-np 2 -x HORO_OVERLAP=maybe cmd", "HORO_OVERLAP='maybe' is not one of auto, always, never"),
    ("-np 2 --ssh-args ' cmd", "--ssh-args"),
    ("-np 1 --mpi -H a:1 --mpi-args ' cmd", "--mpi-args"),
    ("-np 1 --mpi -H a:1 --binding-args ' cmd", "--binding-args"),
    ("-np 2 -- ", "the command is an empty word"),
    ("-np 2 -m ", "-m needs the name of a module"),
    ("-np 2 -m", "-m needs the name of a module"),
    ("train.py -np 2", "'-np' stands after the command 'train.py' and belongs to it"),
    ("-m train -n2", "'-n2' stands after the command '-m train' and belongs to it"),
    *((f"-np 1 -H a:1 {option}  cmd", "its value is empty") for option in OF_TEXT.split()),
    *((f"-np 1 --no-prefix --prefix-{what} cmd", f"-{what} has no effect beside") for what in ("timestamp", "host")),
    *((f"-np 1 --no-stall-check {time} 3 cmd", f"{time} has no effect beside") for time in STALL_TIMES.split()),
    (
        "-np 1 --stall-check-warning-time-seconds 0 --stall-check-shutdown-time-seconds 3 cmd",
        "--stall-check-shutdown-time-seconds has no effect where --stall-check-warning-time-seconds is 0",
    ),
    ("--check-hosts -np 2", "--check-hosts starts no rank: leave out -np"),
    ("--check-hosts -n2", "--check-hosts starts no rank: leave out -n"),
    ("--check-hosts train.py", "--check-hosts starts no rank: leave out the command 'train.py'"),
    ("--check-hosts --mpi", "--check-hosts is for --launcher slurm and ssh; ranks of this job are started by mpi"),
    ("-cb -np 2", "-cb looks at this installation and starts nothing: leave out -np"),
    ("--check-build train.py", "leave out the command 'train.py'"),
    ("--check-build --check-hosts", "--check-build looks at this installation and starts nothing: leave out --check"),
    ("-np 1 -p22 cmd", "-p is for remote hosts, and this job has none: name them with -H or --hostfile"),
    ("-np 1 --log-level info -x HORO_LOG_LEVEL=debug cmd", "--log-level and -x HORO_LOG_LEVEL both set HORO_LOG_LEVEL"),
    ("-np 1 --log-level info -x HOROVOD_LOG_LEVEL=off cmd", "--log-level and -x HOROVOD_LOG_LEVEL both set"),
    ("-np 1 --no-move-ranks -x HORO_LEAVE_CROWDED_CORES=1 cmd", "--no-move-ranks and -x HORO_LEAVE_CROWDED_CORES"),
    ("-np 1 --network-interfaces lo -x HORO_NETWORK_INTERFACES=a cmd", "--network-interfaces and -x HORO_NETWORK"),
    ("-np 1 -x HOROVOD_RANK=3 cmd", "-x HOROVOD_RANK: hororun sets HOROVOD_RANK for every rank: leave it out"),
    ("-np 1 -x HORO_SECRET=3 cmd", "-x HORO_SECRET: hororun sets"),
    ("-np 1 -x HORO_HOST_MARK=3 cmd", "-x HORO_HOST_MARK: hororun sets"),
    ("-np 1 --master-port 5000 --no-torch-env cmd", "--master-port has no effect beside --no-torch-env"),
    ("-np 2 -H a:1 -H b:1 cmd", "-H is given twice: name all hosts in one HOSTS"),
    ("-np 2 --hostfile a --hostfile b cmd", "--hostfile is given twice: name all hosts in one FILE"),
    ("-np 2 --port-range 5 cmd", "--port-range: '5' is not a range of ports as 40000-40100, from 1024 to 65535"),
    ("-np 2 --network-interfaces a,,b cmd", "--network-interfaces: 'a,,b' is no list of names"),
]


@pytest.mark.parametrize(("line", "fault"), WRONG)
def test_a_wrong_command_is_one_sentence_and_code_2(line: str, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(line.split(" "))
    except SystemExit as exit_now:
        code = exit_now.code  # type: ignore[assignment]
    captured = capfd.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("hororun: ")
    assert captured.err.count("\n") == 1
    assert fault in captured.err


def show(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "horo", *words, environment=environment)


@pytest.mark.parametrize("name", ["HORO_START_TIMEOUT", "HOROVOD_START_TIMEOUT"])
def test_a_start_timeout_of_the_environment_is_named_with_its_variable(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "7")
    assert (parsed("-np 1 cmd").start_timeout_s, parsed("-np 1 --start-timeout 3 cmd").start_timeout_s) == (7, 3)
    monkeypatch.setenv(name, "soon")
    assert show("--help").returncode == 0
    assert parsed("-np 1 --start-timeout 3 cmd").exports == {"HORO_START_TIMEOUT": "3"}
    assert main(["-np", "1", "cmd"]) == 2
    assert capfd.readouterr().err.startswith(f"hororun: {name}='soon' is not a number from 0.1 to")


def test_an_unreadable_line_of_a_host_file_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text("h1 slots=4\nh2 cores=4\n")
    assert main(["-np", "2", "--hostfile", str(path), "cmd"]) == 2
    assert f"{path}, line 2, 'h2 cores=4'" in capfd.readouterr().err
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["-np", "2", "--hostfile", str(path), "cmd"]) == 2
    assert "not text" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_is_asked_most_loads_little(option: str) -> None:
    code = (
        "import sys; from horo.runner.cli import main\n"
        "try: main([sys.argv[1]])\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "heavy = {'torch', 'numpy', 'cffi', 'ctypes', 'asyncio', 'subprocess', 'horo.core.context', 'horo._native'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = run_python("-c", code, option, check=True)
    assert ("usage: hororun" in done.stdout) or done.stdout == f"hororun {__version__}\n"


def test_help_fits_and_every_option_is_in_the_reference() -> None:
    text = show("--help").stdout
    *lines, last = text.splitlines()
    assert max(map(len, lines)) <= 120
    page = Path(last).read_text()  # where this horo is installed
    for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", text.partition("examples:")[0]):
        assert re.search(rf"(`|^|  ){word}\b", page, re.MULTILINE), f"{word} is not in {last}"


def horovodrun(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from horo.runner.cli import main_for_horovod; sys.exit(main_for_horovod())"
    return run_python("-c", code, *words)


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_horovodrun_has_the_version_that_the_module_horovod_has(option: str) -> None:
    assert horovodrun(option).stdout == "0.28.1\n"


HOROVODS_TABLE = r"""Horovod v0\.28\.1:

Available Frameworks:
    \[ \] TensorFlow
    \[[ X]\] PyTorch
    \[ \] MXNet

Available Controllers:
    \[[ X]\] MPI
    \[X\] Gloo

Available Tensor Operations:
    \[[ X]\] NCCL
    \[ \] DDL
    \[ \] CCL
    \[[ X]\] MPI
    \[X\] Gloo

horo .*"""


@pytest.mark.parametrize("option", ["-cb", "--check-build"])
def test_horovodrun_shows_horovods_table_of_what_is_there_and_then_horos(option: str) -> None:
    done, own = horovodrun(option), show(option)
    assert re.match(HOROVODS_TABLE, done.stdout)
    assert done.stdout.endswith(own.stdout)
    assert show("--horovod", option).stdout == done.stdout
    for part in (__version__, sys.executable, "Native core", "PyTorch", "arena", "TCP", "MPI", "NCCL", "ssh"):
        assert part in own.stdout
    assert own.returncode == (0 if "[X] arena" in own.stdout else 1)


def test_check_build_fails_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_build, "find_spec", lambda name: None)
    assert check_build.check_build() == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "init() fails here: horo.torch needs PyTorch, which is not installed: pip install torch"


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


def test_check_build_shows_what_the_environment_has_set_and_fails_where_init_would() -> None:
    lines = show("--check-build", HOROVOD_CYCLE_TIME="2", HORO_LOG_LEVEL="").stdout.splitlines()
    assert [line.split() for line in lines if "HOROVOD_" in line] == [
        ["[X]", "cycle_time_ms", "2.0", "HOROVOD_CYCLE_TIME"]
    ]
    assert "Settings from the environment:" in lines
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


@pytest.fixture
def full() -> Iterator[int]:
    """This process listens as a hororun does, takes nobody, and its queue is full."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(address_of(os.getpid()))
        listener.listen(0)
        first.connect(address_of(os.getpid()))
        yield os.getpid()


def test_a_full_queue_ends_the_wait_with_the_reason_and_ctrl_c_in_order(
    full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONNECT_S", 1)
    with pytest.raises(JobError, match=f"--attach {full}: no answer within 1 s: it is stopped") as caught:
        module.attach(full, stacks=False)
    assert caught.value.code == EXIT_UNREACHABLE
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=KeyboardInterrupt))
    assert module.attach(full, stacks=True) == 130
