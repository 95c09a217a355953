"""The command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import run_python
from parsing import parsed

from horo import __version__
from horo.runner.cli import check_build, main
from horo.runner.hosts import HostSpec


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


WRONG = [
    ("-np 0 cmd", "-np 0"),
    ("-np -2 cmd", "-np -2"),
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
    ("-np 1 -H a:1 --output-filename  cmd", "its value is empty"),
    ("-np 1 -H a:1 --remote-python  cmd", "its value is empty"),
    ("-np 1 -H a:1 --remote-shell  cmd", "its value is empty"),
    ("-np 1 -H a:1 --mpirun  cmd", "its value is empty"),
    ("-np 1 -H a:1 -i  cmd", "its value is empty"),
    ("-np 1 --no-prefix --prefix-timestamp cmd", "--prefix-timestamp has no effect beside --no-prefix"),
    ("-np 1 --no-prefix --prefix-host cmd", "--prefix-host has no effect beside --no-prefix"),
    ("-np 1 --no-stall-check --stall-check-warning-time-seconds 3 cmd", "warning-time-seconds has no effect beside"),
    ("-np 1 --no-stall-check --stall-check-shutdown-time-seconds 3 cmd", "shutdown-time-seconds has no effect beside"),
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


@pytest.mark.parametrize("name", ["HORO_START_TIMEOUT", "HOROVOD_START_TIMEOUT"])
def test_a_start_timeout_of_the_environment_is_named_with_its_variable(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "7")
    assert (parsed("-np 1 cmd").start_timeout_s, parsed("-np 1 --start-timeout 3 cmd").start_timeout_s) == (7, 3)
    monkeypatch.setenv(name, "soon")
    assert hororun("--help").returncode == 0
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


def hororun(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "horo.runner", *words)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_what_is_asked_most_loads_little(option: str) -> None:
    code = (
        "import sys; from horo.runner.cli import main\n"
        "try: main([sys.argv[1]])\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "heavy = {'torch', 'numpy', 'ctypes', 'asyncio', 'subprocess', 'horo.core.context', 'horo._native'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = run_python("-c", code, option, check=True)
    assert ("usage: hororun" in done.stdout) or done.stdout == f"hororun {__version__}\n"


def test_help_fits_and_every_option_is_in_the_reference() -> None:
    text = hororun("--help").stdout
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
    done, own = horovodrun(option), hororun(option)
    assert re.match(HOROVODS_TABLE, done.stdout)
    assert done.stdout.endswith(own.stdout)
    assert hororun("--horovod", option).stdout == done.stdout
    for part in (__version__, sys.executable, "Native core", "PyTorch", "arena", "TCP", "MPI", "NCCL", "ssh"):
        assert part in own.stdout
    assert own.returncode == (0 if "[X] arena" in own.stdout else 1)


def test_check_build_fails_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_build, "find_spec", lambda name: None)
    assert check_build.check_build() == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "init() fails here: horo.torch needs PyTorch, which is not installed: pip install torch"
