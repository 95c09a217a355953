"""Whole jobs: what ranks are told, how they run, read each other's memory and end. Here and through agents."""

import errno
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import build_double
from jobs import TORCH_S, Flags, Hororun, kill_all, make_remote_shell, parent_of, port_for_later, shell, wait_until


def test_ranks_get_their_numbers(hororun: Hororun, where: str) -> None:
    script = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE "
    script += "$HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $HOROVOD_HOSTNAME"
    done = hororun.run("-np", "3", *shell(script), where=where)
    assert (done.returncode, done.stderr) == (0, "")
    expected = {
        "localhost:8": ["0/3 0/3 0/1 localhost", "1/3 1/3 0/1 localhost", "2/3 2/3 0/1 localhost"],
        "one:2,two:2": ["0/3 0/2 0/2 one", "1/3 1/2 0/1 one", "2/3 0/1 1/2 two"],
    }[where]
    assert sorted(done.stdout.splitlines()) == [f"[{i}] {line}" for i, line in enumerate(expected)]


TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@pytest.mark.parametrize("words", [[], ["--no-torch-env"], ["-x", "MASTER_PORT={port}"], ["--master-port", "{port}"]])
def test_variables_of_torch_are_set_unless_they_are_not_wanted(hororun: Hororun, where: str, words: list[str]) -> None:
    port = str(port_for_later())
    script = "echo " + " ".join(f"${{{name}-unset}}" for name in TORCH_NAMES)
    words = [word.format(port=port) for word in words]
    done = hororun.run("-np", "3", *words, "--no-prefix", *shell(script), where=where)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(line.split() for line in done.stdout.splitlines())
    if words == ["--no-torch-env"]:
        assert lines == [["unset"] * 7] * 3
        return
    local = {"localhost:8": ["0/3", "1/3", "2/3"], "one:2,two:2": ["0/2", "1/2", "0/1"]}[where]
    assert [line[6] for line in lines] == {"localhost:8": ["0", "0", "0"], "one:2,two:2": ["0", "0", "1"]}[where]
    assert [[*line[:2], "/".join(line[2:4]), line[4]] for line in lines] == [
        [str(rank), "3", place, "127.0.0.1"] for rank, place in enumerate(local)
    ]
    ports = {line[5] for line in lines}
    assert ports == {port} if words and port in words[-1] else len(ports) == 1


def test_a_job_listens_on_the_ports_that_are_named(hororun: Hororun, where: str) -> None:
    told = ["--port-range", "21100-21140", "--no-prefix"]
    done = hororun.run("-np", "3", *told, *shell("echo $HORO_PORT_RANGE $MASTER_PORT $HORO_STORE"), where=where)
    assert (done.returncode, done.stderr) == (0, "")
    for line in done.stdout.splitlines():
        ports, master, store = line.split()
        assert ports == "21100-21140"
        assert all(21100 <= int(port) <= 21140 for port in (master, *re.findall(r":(\d+)", store)))


def test_more_ranks_than_hororun_may_have_connections_are_refused_at_once() -> None:
    words = [sys.executable, "-m", "horo.runner", "-np", "90", "-H", "localhost:90", "true"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 96; exec "$@"', "sh", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1), done.stderr
    assert re.search(
        r"90 ranks meet in hororun, which needs \d+ open files, more than .* raise its limit \(96", done.stderr
    )


def test_the_first_failure_ends_the_job_with_its_code_and_a_report(hororun: Hororun, where: str, flags: Flags) -> None:
    script = (
        f"trap 'exit 0' TERM; flag up; cd {flags.folder}; while ! test -e up.0 -a -e up.2; do sleep 0.02; done\n"
        "test $HOROVOD_RANK = 1 && { echo first >&2; echo 'last words' >&2; exit 7; }; sleep 60 & wait"
    )
    done = hororun.run("-np", "3", "--grace-seconds", "20", *shell(script, flags), where=where)
    assert done.returncode == 7
    host = "localhost" if where.startswith("localhost") else "one"
    report = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert report == [
        f"hororun: rank 1 on {host} exited with code 7; the job was ended",
        "hororun: its last lines on stderr:",
        "  | first",
        "  | last words",
        "hororun: the others: ranks 0,2 exited with code 0 when asked to end",
    ]


@pytest.mark.parametrize(("name", "code"), [("SEGV", 139), ("TERM", 143)])
def test_a_rank_killed_by_a_signal_is_named(hororun: Hororun, where: str, flags: Flags, name: str, code: int) -> None:
    script = f"flag up; cd {flags.folder}; while ! test -e up.0 -a -e up.1; do sleep 0.02; done\n"
    script += f"test $HOROVOD_RANK = 2 && kill -{name} $$; exec sleep 60"
    done = hororun.run("-np", "3", *shell(script, flags), where=where)
    assert done.returncode == code
    assert f"rank 2 on {'localhost' if where.startswith('localhost') else 'two'} was killed by SIG{name}" in done.stderr
    assert "ranks 0-1 killed by SIGTERM when asked to end" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all_ranks(hororun: Hororun, where: str, flags: Flags, number: signal.Signals, code: int) -> None:
    # No shell: one that forks just when SIGTERM comes to its group may leave a child that the signal has missed.
    comes = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    script = f"import os, signal, sys\ndef end(*_): print('saved'); sys.exit(0)\nsignal.signal(signal.{comes}, end)\n"
    script += f"open('{flags.folder}/up.' + os.environ['HOROVOD_RANK'], 'w').close()\nwhile True: signal.pause()"
    job = hororun.start("-np", "3", sys.executable, "-S", "-c", script, where=where)
    flags.wait(["up.0", "up.1", "up.2"])
    done = job.end_by(number)
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == ["[0] saved", "[1] saved", "[2] saved"]
    assert done.stderr == f"hororun: {number.name}: ranks 0-2 were ended\n"


def test_ctrl_c_interrupts_first_then_terminates_then_kills(hororun: Hororun, where: str, flags: Flags) -> None:
    script = "import atexit, os, signal, time\n"
    script += f"def flag(name): open('{flags.folder}/' + name + '.' + os.environ['HOROVOD_RANK'], 'w').close()\n"
    script += "if os.environ['HOROVOD_RANK'] != '0': signal.signal(signal.SIGINT, lambda *_: flag('int'))\n"
    script += "if os.environ['HOROVOD_RANK'] == '2': signal.signal(signal.SIGTERM, lambda *_: flag('term'))\n"
    script += "atexit.register(flag, 'atexit')\nflag('up')\n"
    script += "try:\n    while True: time.sleep(0.05)\nfinally: flag('finally')\n"
    job = hororun.start("-np", "3", "--grace-seconds", "3", sys.executable, "-c", script, where=where)
    flags.wait(["up.0", "up.1", "up.2"])
    done = job.end_by(signal.SIGINT)
    assert done.returncode == 130
    flags.wait(["finally.0", "atexit.0", "int.1", "int.2", "term.2"])
    assert "KeyboardInterrupt" in done.stderr
    assert "hororun: SIGINT: ranks 0-2 were ended\n" in done.stderr


STUBBORN = "trap '' TERM INT HUP; (trap '' TERM; setsid sleep 300) & flag up; while :; do sleep 1; done"


def test_kill_9_of_hororun_leaves_nothing(hororun: Hororun, where: str, flags: Flags) -> None:
    job = hororun.start("-np", "3", "--grace-seconds", "0.2", *shell(STUBBORN, flags), where=where)
    flags.wait(["up.0", "up.1", "up.2"])
    job.process.kill()
    job.process.wait()
    job.nothing_is_left()


def test_kill_9_of_hororun_and_its_guard_leaves_no_rank(hororun: Hororun, flags: Flags) -> None:
    job = hororun.start("-np", "2", *shell("trap '' TERM; flag up; while :; do sleep 0.1; done", flags))
    flags.wait(["up.0", "up.1"])
    kill_all(job.processes("horo.runner"))
    job.process.wait()
    job.nothing_is_left()


def test_kill_9_of_an_agent_leaves_nothing_and_is_reported(hororun: Hororun, flags: Flags) -> None:
    job = hororun.start(
        "-np", "3", "--grace-seconds", "0.2", *shell(STUBBORN, flags), where="one:2,two:2", stderr=-1
    )  # fmt: skip
    flags.wait(["up.0", "up.1", "up.2"])
    os.kill(max(job.agents()), signal.SIGKILL)
    done = job.finish()
    assert done.returncode == 69
    assert "was lost with its host (ssh ended with code 137" in done.stderr


def test_a_host_lost_while_another_is_awaited_ends_the_start(hororun: Hororun, tmp_path: Path, flags: Flags) -> None:
    said = flags.folder / "said"
    hororun.remote_shell = make_remote_shell(
        tmp_path, f'case "$*" in *two*) sleep 60;; *) sh -c "$command" | tee {said}; exit;; esac'
    )
    job = hororun.start("-np", "2", "--start-timeout", "1000", "true", where="one:1,two:1")
    wait_until(lambda: said.exists() and b'"version"' in said.read_bytes(), "the host info is on its way")
    agents = job.processes("horo.runner.agent")
    kill_all(pid for pid in agents if parent_of(parent_of(pid)) == job.process.pid)  # behind a shell
    done = job.finish()
    assert done.returncode == 69
    assert "host one was lost" in done.stderr


def test_what_ranks_leave_behind_is_ended_whatever_it_hides(hororun: Hororun, where: str, flags: Flags) -> None:
    script = f"setsid env -i sh -c 'echo $$ > {flags.folder}/daemon; exec sleep 300' > /dev/null 2>&1 &\n"
    script += f"while ! test -s {flags.folder}/daemon; do sleep 0.02; done"
    done = hororun.run("-np", "1", *shell(script), where=where)
    assert done.returncode == 0
    wait_until(lambda: not Path(f"/proc/{flags.read('daemon').strip()}").exists(), "the daemon is gone")


def test_children_that_a_shell_left_to_hororun_are_spared(hororun: Hororun, flags: Flags) -> None:
    script = f"(sleep 300 & echo $! > {flags.folder}/pid; exec {sys.executable} -m horo.runner -np 1 true); flag done; "
    script += f"kill -0 $(cat {flags.folder}/pid) && flag spared"
    assert hororun.run("-np", "1", *shell(script, flags)).returncode == 0
    flags.wait(["done.0", "spared.0"])


def test_no_secret_is_on_a_command_line(hororun: Hororun, where: str, flags: Flags) -> None:
    script = f"echo $HORO_SECRET > {flags.folder}/secret.$HOROVOD_RANK; flag up; sleep 60"
    job = hororun.start("-np", "2", *shell(script, flags), where=where)
    flags.wait(["up.0", "up.1"])
    secret = flags.read("secret.0").strip()
    assert len(secret) == 64
    assert flags.read("secret.1").strip() == secret
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                assert secret.encode() not in (folder / "cmdline").read_bytes()
            except OSError:
                continue
    assert stat.S_IMODE(Path(f"/proc/{job.process.pid}/environ").stat().st_mode) & 0o077 == 0
    job.process.terminate()
    job.finish()


def test_exports_reach_every_host(hororun: Hororun, where: str, tmp_path: Path) -> None:
    """And ranks read nothing, and start where hororun was called."""
    exports = ["-x", "FRESH=a b", "-x", "INHERITED", "--cycle-time-ms", "3"]
    script = shell('echo "$(cat) $FRESH $INHERITED $HORO_CYCLE_TIME $(pwd)"')
    environment = {"INHERITED": "c", "HORO_CYCLE_TIME": "1"}
    done = hororun.run("-np", "3", *exports, *script, where=where, cwd=tmp_path, environment=environment)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]  a b c 3 {tmp_path}" for rank in range(3)]


def test_a_command_that_cannot_run_is_one_sentence(hororun: Hororun, where: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x = 1\n")
    (tmp_path / "no-line").write_bytes(b"\x01\x02")
    (tmp_path / "bad-line").write_text("#!/no/such/interpreter\n")
    (tmp_path / "program").write_text("#!/bin/sh\n")
    for name in ("no-line", "bad-line", "program"):
        (tmp_path / name).chmod(0o755)
    cases = {
        "no-such-command": (127, "command not found on"), "./no-such-file": (127, "no such file on"),
        "./data.txt": (126, " is not executable: 'chmod +x ./data.txt', or write its interpreter first\n"),
        "data.txt": (127, f"; for the file in {tmp_path}, write ./data.txt after 'chmod +x data.txt'\n"),
        "program": (127, f" is in no folder of PATH there; for the file in {tmp_path}, write ./program\n"),
        "./bad-line": (127, "an interpreter that does not exist"),
        "./no-line": (126, "neither a program nor a script"), str(tmp_path): (126, "is a folder"),
    }  # fmt: skip
    if where.startswith("one"):  # agents try commands as hororun does
        cases = {name: cases[name] for name in ("no-such-command", "program", "./bad-line")}
    for command, (code, fact) in cases.items():
        done = hororun.run("-np", "2", command, where=where, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert fact in done.stderr
        assert repr(command) in done.stderr


def test_a_stopped_rank_ends_too(hororun: Hororun, where: str, flags: Flags) -> None:
    script = (
        f"test $HOROVOD_RANK = 0 && {{ echo $$ > {flags.folder}/pid; exec sleep 60; }}\n"
        f"while ! test -s {flags.folder}/pid; do sleep 0.02; done; kill -STOP $(cat {flags.folder}/pid); exit 4"
    )
    assert hororun.run("-np", "2", "--grace-seconds", "0.2", *shell(script), where=where).returncode == 4


SCRIPT = str(Path(__file__).resolve().parent.parent / "moving_rank.py")
READS = "large moves read the memory of the other ranks"
PASSES = "large moves pass shared memory"


def run(
    hororun: Hororun, *words: str, double: Path | None = None, script: tuple[str, ...] = ("4",)
) -> subprocess.CompletedProcess[str]:
    """``double``: loaded in rank 1 alone."""
    command = [sys.executable, SCRIPT, *script]
    if double is not None:
        start = f'if [ "$HOROVOD_RANK" = 1 ]; then export LD_PRELOAD={shlex.quote(str(double))}; fi; exec "$@"'
        command = ["sh", "-c", start, "sh", *command]
    environment = {"HORO_LOG_LEVEL": "info", "OMP_NUM_THREADS": "1"}
    started = hororun.start("-np", "3", "--no-prefix", *words, *command, environment=environment)
    return started.finish(TORCH_S)


def check_right(done: subprocess.CompletedProcess[str], said: str, never: str) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all is right") == 3
    assert done.stderr.count(said) == 1, done.stderr[-3000:]
    assert never not in done.stderr


def test_ranks_read_each_other_where_they_may_unless_the_user_turns_it_off(hororun: Hororun) -> None:
    check_right(run(hororun), READS, PASSES)
    done = run(hororun, "--no-single-copy")
    assert (done.returncode, done.stdout.count("all is right")) == (0, 3), done.stderr[-3000:]
    assert "large moves" not in done.stderr


@pytest.mark.parametrize(
    ("defines", "reason"),
    [({"REFUSED": errno.EPERM}, "Operation not permitted"), ({"FORGES": 1}, "No such process")],
    ids=["forbidden", "another process"],
)
def test_where_one_may_not_none_does(hororun: Hororun, tmp_path: Path, defines: dict[str, int], reason: str) -> None:
    done = run(hororun, double=build_double("libpeer_memory.so", tmp_path, **defines))
    check_right(done, f"{PASSES}, since rank 1 cannot read the memory of rank 2: {reason}", READS)


def test_reads_may_end_early(hororun: Hororun, tmp_path: Path) -> None:
    check_right(run(hororun, double=build_double("libpeer_memory.so", tmp_path, PIECE=517)), READS, PASSES)


@pytest.mark.parametrize("after", [3, 5, 7])
def test_a_read_that_fails_later_is_done_again_by_all(hororun: Hororun, tmp_path: Path, after: int) -> None:
    """As of memory that belongs to a device; from 5 on it is in sums, which lie in the place of what they add up."""
    double = build_double("libpeer_memory.so", tmp_path, REFUSED=errno.EFAULT, AFTER=after)
    done = run(hororun, double=double)
    assert (done.returncode, done.stdout.count("all is right")) == (0, 3), done.stderr[-3000:]
    told = re.findall(rf"{READS}|{PASSES}, since rank 1 cannot read the memory of rank [02]: Bad address", done.stderr)
    assert len(told) == 2
    assert told[0] == READS


def test_a_rank_that_is_killed_in_a_call_is_an_error_that_names_it(hororun: Hororun) -> None:
    done = run(hororun, script=("100000", "1"))
    assert done.returncode != 0
    assert re.search(r"PeerLostError: .*rank 1 \(", done.stderr), done.stderr[-3000:]
    assert "AssertionError" not in done.stderr
