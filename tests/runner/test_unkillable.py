"""Processes of a job that SIGKILL does not end, and a ``/proc`` that shows the processes of others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from jobs import Flags, Hororun, wait_until
from skips import apt_install

from horo.runner import loop as loop_module
from horo.runner.agent.ranks import Event, HostRanks, Remained
from horo.runner.loop import Loop
from horo.runner.processes import Guard, Tree

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


def shell(flags: Flags, script: str) -> list[str]:
    return ["-np", "1", "--grace-seconds", "0.2", "--", "sh", "-c", script.replace("FOLDER", str(flags.folder))]


@pytest.mark.usefixtures("needs_root")
def test_another_users_process_is_named_and_left(
    hororun: Hororun, where: str, flags: Flags, end_later: Callable[[Path], int]
) -> None:
    words = shell(flags, f"{AS_ANOTHER_USER} setsid sleep 300 & echo $! > FOLDER/pid; {SLEEPS}")
    job = hororun.start(*words, where=where, prefix=WITHOUT_KILL)
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
    words = shell(flags, f"echo $$ > FOLDER/pid; : > FOLDER/up.0; exec {AS_ANOTHER_USER} sleep 300")
    job = hororun.start(*words, where=where, prefix=WITHOUT_KILL)
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


class Hung(Tree):
    """A tree with a process that the kernel holds: it takes SIGKILL and stays."""

    def find(self) -> set[int]:
        return {HUNG}


HUNG = 2_000_000_000
"""No pid: beyond what Linux gives."""


class Orders(Guard):
    def __init__(self) -> None: ...

    def tell(self, tree: Tree, grace_s: float) -> None: ...


@pytest.mark.parametrize("begin", [HostRanks.terminate, HostRanks.kill, HostRanks.interrupt])
def test_a_process_that_hangs_in_the_kernel_is_given_up_behind_sigkill(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[HostRanks], None]
) -> None:
    events: list[Event] = []
    now_s = [1000.0]
    with closing(Loop()) as loop:
        monkeypatch.setattr(loop_module.time, "monotonic", lambda: now_s[0])
        ranks = HostRanks(loop, Orders(), Hung("mark"), 20.0, events.append)

        def select(timeout: float | None) -> list[object]:
            assert timeout is not None
            now_s[0] += timeout
            return []

        monkeypatch.setattr(loop._selector, "select", select)
        begin(ranks)
        loop.run_until(lambda: ranks.finished or now_s[0] > 2000)
        monkeypatch.undo()
    assert events == [Remained("", (str(HUNG),))]
    assert now_s[0] < 1100


def test_what_remains_is_one_sentence() -> None:
    many = tuple(str(pid) for pid in range(1, 13))
    assert Remained("h1", many).sentence == (
        "processes 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more on h1: SIGKILL has not ended them, and hororun leaves "
        "them; end them there"
    )
