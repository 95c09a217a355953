"""The loop's clock, and what goes by it; processes that SIGKILL does not end."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from jobs import Flags, Hororun, shell, wait_until
from skips import apt_install

from horo.runner import loop as under_test
from horo.runner.agent.protocol import Kind, MessageReader
from horo.runner.agent.ranks import Event, HostRanks, Remained
from horo.runner.config import Ssh
from horo.runner.hosts import HostSpec
from horo.runner.job.remote import RemoteHost
from horo.runner.loop import Loop
from horo.runner.processes import Tree
from horo.runner.start.ssh import SshLauncher


class Clock:
    """Of the loop; ``passes`` lets time pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    def select(self, timeout: float | None) -> list[object]:
        assert timeout is not None
        self.passes(timeout)
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(under_test, "time", one)
    return one


@pytest.fixture
def loop(clock: Clock) -> Iterator[Loop]:
    with closing(Loop()) as one:
        yield one


@pytest.mark.parametrize("slow_s", [0.3, 0.6, 1.0, 30.0])
def test_slow_callbacks_do_not_hold_up_a_deadline(loop: Loop, clock: Clock, slow_s: float) -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x" * 1000)
    due: list[float] = []
    rounds: list[float] = []

    def read() -> None:
        os.read(read_fd, 1)
        rounds.append(clock.now_s)
        clock.passes(slow_s)

    loop.watch(read_fd, read=read)
    loop.call_later(2.0, lambda: due.append(clock.now_s))
    loop.run_until(lambda: bool(due) or len(rounds) > 100)
    os.close(read_fd)
    os.close(write_fd)
    # Due after 2 s, found out in the round after: that is at most two rounds later.
    assert due
    assert 1002.0 <= due[0] <= 1002.0 + 2 * slow_s


def test_a_sleep_of_a_stopped_process_does_not_count(loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    due: list[str] = []
    sleeps = iter([3600.0, 1.0, 0.5])  # the first lasts an hour longer than asked for

    def select(timeout: float | None) -> list[object]:
        assert timeout is not None
        clock.passes(next(sleeps))
        return []

    monkeypatch.setattr(loop._selector, "select", select)
    loop.on_stopped(lambda: due.append("stopped"))
    loop.call_later(2.5, lambda: due.append("due"))
    loop.run_until(lambda: "due" in due)
    assert due == ["stopped", "due"]
    assert next(sleeps, None) is None


def test_short_sleeps_on_a_busy_host_reach_a_deadline(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[float] = []
    monkeypatch.setattr(loop._selector, "select", lambda _timeout: clock.passes(1.0) or [])
    loop.call_later(5.0, lambda: due.append(clock.now_s))

    def look() -> None:
        loop.call_later(0.05, look)

    look()
    loop.run_until(lambda: bool(due) or clock.now_s > 2000)
    assert due
    assert 1005 <= due[0] <= 1006


def test_time_until_ctrl_z_is_undone_does_not_count(loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test.os, "kill", lambda _pid, _number: clock.passes(3600))
    before_s = loop.now_s
    loop.stop_process()
    assert loop.now_s == before_s


@pytest.mark.parametrize("host_timeout_s", [45.0, 3000.0, 0.9])
def test_an_agent_gets_a_sign_of_life_every_one_to_two_seconds(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host_timeout_s: float
) -> None:
    # An outage that begins long after the last sign has been silent for as long when it is over.
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\nexec cat > {tmp_path}/sent\n")
    shell.chmod(0o755)

    monkeypatch.setattr(loop._selector, "select", clock.select)
    remote = RemoteHost(loop, HostSpec("h1"), lambda _event: None, lambda: None)
    remote.connect(SshLauncher(Ssh(program=str(shell)), "python", 60, host_timeout_s), host_timeout_s=host_timeout_s)
    loop.run_until(lambda: clock.now_s > 1040)
    for pipe in (remote._process.stdin, remote._process.stdout, remote._process.stderr):
        assert pipe is not None
        pipe.close()
    remote._process.wait(30)
    sent = MessageReader(magic=False).feed((tmp_path / "sent").read_bytes())
    assert {message.kind for message in sent} == {Kind.PING}
    assert len(sent) >= 40 / min(2.0, host_timeout_s / 3) - 1


WITHOUT_KILL = ["setpriv", "--bounding-set", "-kill"]
SLEEPS = "until grep -q sleep /proc/$!/comm; do sleep 0.01; done"
AS_ANOTHER_USER = "setpriv --reuid 65534 --clear-groups"


@pytest.fixture
def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("processes of another user need root")
    missing = apt_install({"setpriv": "util-linux", "unshare": "util-linux"})
    if missing:
        pytest.skip(missing)


@pytest.fixture
def end_later() -> Iterator[Callable[[Path], int]]:
    """Reads a pid out of a file; ends the process when the test is over."""
    pids = []

    def read(path: Path) -> int:
        pids.append(int(path.read_text()))
        return pids[-1]

    yield read
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("needs_root")
def test_another_users_process_is_named_and_left(
    hororun: Hororun, where: str, flags: Flags, end_later: Callable[[Path], int]
) -> None:
    script = f"{AS_ANOTHER_USER} setsid sleep 300 & echo $! > {flags.folder}/pid; {SLEEPS}"
    job = hororun.start("-np", "1", "--grace-seconds", "0.2", *shell(script), where=where, prefix=WITHOUT_KILL)
    _, said = job.process.communicate(timeout=30)
    pid, host = end_later(flags.folder / "pid"), where.partition(":")[0]
    assert job.process.returncode == 0
    assert said.decode() == (
        f"hororun: process {pid} (sleep, user 65534) on {host}: SIGKILL has not ended it, and hororun leaves it; "
        "end it there\n"
    )


@pytest.mark.usefixtures("needs_root")
def test_a_rank_of_another_user_does_not_hold_up_the_end(
    hororun: Hororun, where: str, flags: Flags, end_later: Callable[[Path], int]
) -> None:
    script = f"echo $$ > {flags.folder}/pid; flag up; exec {AS_ANOTHER_USER} sleep 300"
    job = hororun.start("-np", "1", "--grace-seconds", "0.2", *shell(script, flags), where=where, prefix=WITHOUT_KILL)
    flags.wait(["up.0"])
    pid = end_later(flags.folder / "pid")
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "the rank is another user's")
    job.process.terminate()
    _, said = job.process.communicate(timeout=30)
    assert job.process.returncode == 143
    assert f"hororun: process {pid} (" in said.decode()
    assert " of rank 0 on " in said.decode()


@pytest.mark.usefixtures("needs_root")
def test_a_proc_of_another_pid_namespace_is_not_believed(hororun: Hororun) -> None:
    # There a process is the first, and its children by that /proc would be those of the machine's first process.
    inside = ["unshare", "--pid", "--fork"]
    done = hororun.run("-np", "2", "--", "sh", "-c", "echo x", prefix=inside)
    assert (done.returncode, done.stderr) == (0, "")
    script = "import os; from horo.runner.processes import Tree; print(Tree('', ancestor=os.getpid()).find())"
    found = hororun.launch([*inside, sys.executable, "-c", script]).finish()
    assert found.stdout == "set()\n"


HUNG = 2_000_000_000
"""No pid: beyond what Linux gives."""


@pytest.mark.parametrize("begin", [HostRanks.terminate, HostRanks.kill, HostRanks.interrupt])
def test_a_process_that_hangs_in_the_kernel_is_given_up_behind_sigkill(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch, begin: Callable[[HostRanks], None]
) -> None:
    """It takes SIGKILL and stays."""
    events: list[Event] = []
    tree = Tree("mark")
    monkeypatch.setattr(tree, "find", lambda: {HUNG})
    ranks = HostRanks(loop, Mock(), tree, 20.0, events.append)
    monkeypatch.setattr(loop._selector, "select", clock.select)
    begin(ranks)
    loop.run_until(lambda: ranks.finished or clock.now_s > 2000)
    assert events == [Remained("", (str(HUNG),))]
    assert clock.now_s < 1100


def test_what_remains_is_one_sentence() -> None:
    many = tuple(str(pid) for pid in range(1, 13))
    assert Remained("h1", many).sentence == (
        "processes 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more on h1: SIGKILL has not ended them, and hororun leaves "
        "them; end them there"
    )
