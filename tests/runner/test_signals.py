"""Signals to a job, the time between SIGTERM and SIGKILL, and jobs that are stopped for a while."""

import contextlib
import os
import pty
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import Flags, Hororun, Launched, make_remote_shell, shell, state_of, wait_until
from parsing import parsed

from horo.runner.job.signals import SignalsToRanks
from horo.runner.loop import Timer
from horo.runner.processes import send_signal

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


class Job:
    """Three hosts with the signals that each has got, by its agent or passed on, and calls whose time comes later."""

    def __init__(self) -> None:
        self.got: list[list[int]] = [[], [], []]
        self.hosts = [SimpleNamespace(pass_on=got.append) for got in self.got]
        self._due: list[Callable[[], None]] = []
        self.signals = SignalsToRanks(self, lambda: self.hosts)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self._due.append(call)
        return Timer(delay_s, len(self._due), call)

    def run(self) -> None:
        """The time of all calls has come."""
        due, self._due = self._due, []
        for call in due:
            call()

    def agent_gets(self, host: int, number: int) -> None:
        self.got[host].append(number)
        self.signals.came_to(self.hosts[host], number)


@pytest.mark.parametrize("agents", [[0], [2, 1], [0, 1, 2]])
def test_a_signal_to_some_agents_reaches_the_ranks_of_all_hosts_once(agents: list[int]) -> None:
    job = Job()
    for agent in agents:
        job.agent_gets(agent, USR1)
    job.run()
    job.run()
    assert job.got == [[USR1]] * 3


def test_a_signal_to_hororun_and_to_its_agents_is_one() -> None:
    job = Job()
    job.agent_gets(0, USR1)
    job.signals.came_here(USR1)
    job.run()
    assert job.got == [[USR1]] * 3
    job.signals.came_here(USR1)  # what the agents got with it is with the ranks, and goes no further
    job.signals.came_to(job.hosts[1], USR1)
    job.run()
    assert job.got == [[USR1] * 2] * 3


def test_signals_that_differ_or_come_later_are_not_one() -> None:
    job = Job()
    job.agent_gets(0, USR1)
    job.agent_gets(1, USR2)
    job.run()
    assert [sorted(got) for got in job.got] == [[USR1, USR2]] * 3
    job.agent_gets(2, USR1)
    job.run()
    assert [got.count(USR1) for got in job.got] == [2] * 3
    job.signals.came_here(USR2)
    job.run()
    job.agent_gets(2, USR2)
    job.run()
    assert [got.count(USR2) for got in job.got] == [3] * 3


NOTES = """
import os, signal, sys
rank = os.environ["HOROVOD_RANK"]
def note(number, frame):
    open(f"{folder}/got.{int(number)}.{rank}", "w").close()
    if {ends}:
        sys.exit()
for number in {numbers}:
    signal.signal(number, note)
open(f"{folder}/up.{rank}", "w").close()
while True:
    signal.pause()
"""
"""Ranks that trap signals and note each in a file of its own."""
TRAPPED = [
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGABRT, signal.SIGQUIT),
    *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR),
    *(signal.SIGRTMIN, signal.SIGRTMIN + 1, signal.SIGRTMAX),
]


def noting(flags: Flags, numbers: Sequence[int], ends: bool = False) -> list[str]:
    script = NOTES.replace("{folder}", str(flags.folder)).replace("{ends}", str(ends))
    return ["--", sys.executable, "-S", "-c", script.replace("{numbers}", str([int(number) for number in numbers]))]


def have_come(flags: Flags, numbers: Sequence[int], ranks: int) -> None:
    flags.wait([f"got.{int(number)}.{rank}" for number in numbers for rank in range(ranks)])


def test_signals_that_users_trap_reach_all_ranks(hororun: Hororun, where: str, flags: Flags) -> None:
    job = hororun.start("-np", "3", *noting(flags, TRAPPED), where=where)
    flags.wait(["up.0", "up.1", "up.2"])
    for number in TRAPPED:
        job.process.send_signal(number)
        have_come(flags, [number], 3)
    assert job.end_by(signal.SIGTERM).returncode == 143


def test_signals_that_come_to_agents_reach_all_ranks(hororun: Hororun, flags: Flags) -> None:
    # Slurm sends them to the steps of a job. SIGINT and SIGHUP, too: who trapped them in a step of plain srun has them.
    numbers = [*TRAPPED, signal.SIGINT, signal.SIGHUP]
    job = hororun.start("-np", "3", *noting(flags, numbers), where="localhost:1,one:1,two:1")
    flags.wait(["up.0", "up.1", "up.2"])
    for number in numbers:
        os.kill(job.agents()[0], number)
        have_come(flags, [number], 3)
    assert job.end_by(signal.SIGTERM).returncode == 143


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGALRM, signal.SIGRTMIN + 1])
def test_a_signal_without_trap_ends_ranks_and_is_named(hororun: Hororun, where: str, flags: Flags, number: int) -> None:
    job = hororun.start("-np", "3", *noting(flags, []), where=where)
    flags.wait(["up.0", "up.1", "up.2"])
    done = job.end_by(number)
    assert done.returncode == 128 + number
    name = "signal 35" if number == signal.SIGRTMIN + 1 else signal.Signals(number).name
    assert f"was killed by {name}" in done.stderr
    assert "SIGTERM" not in done.stderr


def test_a_signal_that_comes_twice_keeps_the_code_of_sys_exit(hororun: Hororun, where: str, flags: Flags) -> None:
    # Python traps no signals any more while it ends. The rank has said by then that it ends by sys.exit(75).
    script = "import json, os, signal\nfd = os.environ['HORO_END_PIPE'].split(':')[0]\n"
    script += "rank = os.environ['HOROVOD_RANK']\n"
    script += "note = {'error': 'SystemExit: 75', 'where': '', 'points_at': None, 'status': 75}\n"
    script += "os.write(int(fd), json.dumps(note).encode() + b'\\n')\n"
    script += f"open(f'{flags.folder}/up.{{rank}}', 'w').close()\nsignal.pause()"
    job = hororun.start("-np", "2", "--", sys.executable, "-S", "-c", script, where=where)
    flags.wait(["up.0", "up.1"])
    done = job.end_by(USR1)
    assert done.returncode == 75
    assert "ended with SystemExit: 75 (killed by SIGUSR1)" in done.stderr


def test_a_hangup_in_a_batch_job_is_a_signal_as_others(hororun: Hororun, flags: Flags) -> None:
    batch = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(flags.folder / "nodes")}
    (flags.folder / "nodes").write_text("localhost\nlocalhost\n")
    job = hororun.start("-np", "2", *noting(flags, [signal.SIGHUP], ends=True), environment=batch)
    flags.wait(["up.0", "up.1"])
    assert job.end_by(signal.SIGHUP).returncode == 0
    have_come(flags, [signal.SIGHUP], 2)


def test_a_terminal_that_is_closed_ends_an_interactive_batch_job(flags: Flags) -> None:
    batch = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(flags.folder / "nodes")}
    (flags.folder / "nodes").write_text("localhost\nlocalhost\n")
    command = [sys.executable, "-m", "horo.runner", *noting(flags, [signal.SIGHUP, signal.SIGTERM], ends=True)]
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
            os.execve(command[0], command, {**os.environ, **batch})
        finally:
            os._exit(99)
    flags.wait(["up.0", "up.1"])
    os.close(terminal)
    os.waitpid(pid, 0)
    have_come(flags, [signal.SIGTERM], 2)
    assert not list(flags.folder.glob(f"got.{int(signal.SIGHUP)}.*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_ends_reaching_hosts(hororun: Hororun, tmp_path: Path, flags: Flags, number: signal.Signals) -> None:
    hororun.remote_shell = make_remote_shell(tmp_path, f": > {flags.folder}/called; sleep 60")
    job = hororun.start("-np", "1", "true", where="one:1")
    flags.wait(["called"])
    done = job.end_by(number)
    assert done.returncode == 128 + number
    assert done.stderr.splitlines()[-1] == f"hororun: {number.name}: the job was ended"


BLOCKED = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.argv[1], sys.argv[1:])
"""
PREFIX = [sys.executable, "-S", "-c", BLOCKED]
WHO = "grep -E '^Sig(Blk|Ign)' /proc/self/status"


@pytest.mark.parametrize("way", ["direct", "agents", "mpirun"])
def test_signals_that_are_blocked_where_hororun_starts(hororun: Hororun, fake: Path, way: str, flags: Flags) -> None:
    words, where = [], "one:1" if way == "agents" else "localhost:1"
    if way == "mpirun":
        words, hororun.remote_shell = ["--mpi", "--mpirun", str(fake / "mpirun")], ""
    done = hororun.run("-np", "1", *words, "--", "sh", "-c", WHO, where=where, prefix=PREFIX)
    assert (done.returncode, done.stderr) == (0, "")
    blocked, ignored = (int(line.split()[-1], 16) for line in done.stdout.splitlines())
    assert (blocked, ignored & (1 << signal.SIGCHLD - 1)) == (0, 0)
    script = f": > {flags.folder}/up; exec sleep 300"
    job = hororun.start("-np", "1", *words, "--", "sh", "-c", script, where=where, prefix=PREFIX)
    flags.wait(["up"])
    assert job.end_by(signal.SIGTERM).returncode == 143


BATCH = [
    {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "h1", "SLURM_TASKS_PER_NODE": "2"},
    {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "h1 2"},
    {"PBS_JOBID": "1", "PBS_NODEFILE": "{file}"},
]
STUBBORN = "trap '' TERM; flag up; while :; do sleep 0.1; done"


@pytest.mark.parametrize("environment", BATCH, ids=["slurm", "lsf", "pbs"])
@pytest.mark.parametrize("where", ["", "-H h1:2 "])
def test_it_is_longer_in_batch_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], where: str
) -> None:
    assert parsed("-np 2 -H h1:2 cmd").grace_s == 5
    (tmp_path / "nodes").write_text("h1\nh1\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(file=tmp_path / "nodes"))
    assert parsed(f"-np 2 {where}cmd").grace_s == 25
    assert parsed(f"-np 2 {where}--grace-seconds 3 cmd").grace_s == 3


def test_ranks_that_were_killed_because_it_ran_out_are_named(hororun: Hororun, where: str, flags: Flags) -> None:
    script = f"test $HOROVOD_RANK = 1 && {{ flag up; exec sleep 60; }}; {STUBBORN}"
    job = hororun.start("-np", "3", "--grace-seconds", "3", *shell(script, flags), where=where)
    flags.wait([f"up.{rank}" for rank in range(3)])
    assert job.end_by(signal.SIGTERM).stderr.splitlines() == [
        "hororun: SIGTERM: ranks 0-2 were ended",
        "hororun: ranks 0,2 did not end within 3 s of SIGTERM and were killed; --grace-seconds gives more",
    ]


def test_on_a_terminal_ctrl_c_tells_which_ranks_are_awaited(hororun: Hororun, where: str, flags: Flags) -> None:
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    script = f"test $HOROVOD_RANK = 1 && {{ flag up; exec sleep 600; }}; trap '' INT; {STUBBORN}"
    job = hororun.start("-np", "3", "--grace-seconds", "1000", *shell(script, flags), where=where, stderr=end)
    flags.wait([f"up.{rank}" for rank in range(3)])
    job.process.send_signal(signal.SIGINT)
    said = bytearray()

    def told() -> bool:
        with contextlib.suppress(BlockingIOError):
            said.extend(os.read(terminal, 4096))
        return b"hororun: still waiting for the end of ranks 0,2; Ctrl-C again kills them" in said

    wait_until(told, "the ranks that run are named")
    assert job.end_by(signal.SIGINT).returncode == 130
    os.close(terminal)
    os.close(end)


LIMIT_S = 10.0
"""Long enough that no process is held up for so long by a busy machine, once it may run."""


def suspend(*jobs: Launched, longer_than_s: float) -> None:
    """Stops all processes of the jobs for longer than the limit and continues them, hororun last.

    hororun is stopped in its sleep: the time of its callbacks counts.
    """
    launchers = [job.process.pid for job in jobs]
    pids = [pid for job in jobs for pid in job.processes() if pid not in launchers]
    send_signal(pids, signal.SIGSTOP)  # a sleep of the ranks' scripts may have ended
    for launcher in launchers:
        wait_until(lambda launcher=launcher: state_of(launcher) == "S", "hororun sleeps")
        send_signal([launcher], signal.SIGSTOP)
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > longer_than_s, "the limit has passed")
    send_signal([*pids, *launchers], signal.SIGCONT)


def test_the_time_of_a_suspend_counts_neither_for_hosts_nor_as_grace(hororun: Hororun, flags: Flags) -> None:
    until_go = f"while ! test -e {flags.folder}/go; do sleep 0.1; done"
    words = ["-np", "4", "--host-timeout", str(LIMIT_S), *shell(f"flag up; {until_go}", flags)]
    going_on = hororun.start(*words, where="one:2,two:2")
    script = f"trap 'flag term' TERM; flag begun; {until_go}; flag saved"
    ending = hororun.start("-np", "2", "--grace-seconds", str(LIMIT_S), *shell(script, flags))
    flags.wait(["begun.0", "begun.1", *(f"up.{rank}" for rank in range(4))])
    ending.process.send_signal(signal.SIGTERM)
    flags.wait(["term.0", "term.1"])
    suspend(going_on, ending, longer_than_s=1.2 * LIMIT_S)
    (flags.folder / "go").touch()
    done = going_on.finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert ending.finish().returncode == 143
    flags.wait(["saved.0", "saved.1"])


def test_ctrl_z_stops_the_ranks_of_this_host_with_hororun(hororun: Hororun, flags: Flags) -> None:
    script = f"echo $$ > {flags.folder}/pid.$HOROVOD_RANK; flag up; while ! test -e {flags.folder}/go; do :; done"
    job = hororun.start("-np", "2", *shell(script, flags))
    flags.wait(["up.0", "up.1"])
    pids = [job.process.pid, int(flags.read("pid.0")), int(flags.read("pid.1"))]
    job.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: all(state_of(pid) == "T" for pid in pids), "hororun and both ranks are stopped")
    job.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not any(state_of(pid) == "T" for pid in pids), "they run again")
    (flags.folder / "go").touch()
    done = job.finish()
    assert (done.returncode, done.stderr) == (0, "")
