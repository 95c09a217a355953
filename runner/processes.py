"""The only module that starts, finds and ends processes.

Three mechanisms end all processes of a job on a host, in whatever order they die:

* Every process of a job carries ``HORO_HOST_MARK`` in its environment, every rank leads its own session, and the
  process that starts them is their *subreaper*: processes that a rank leaves behind become its children.
* A :class:`Guard`, forked before the first rank, ends all of that when its parent is gone, even by SIGKILL.
* The kernel sends SIGKILL to every rank whose parent died (``PR_SET_PDEATHSIG``), should the guard be gone too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import stat
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

__all__ = [
    "ENDING_WITHOUT_RANKS",
    "MARK_NAME",
    "PASSED_ON",
    "PASSED_ON_BY_AGENTS",
    "Guard",
    "Tree",
    "ask",
    "become_subreaper",
    "children_of_this_process",
    "describe_process",
    "end_all",
    "occupy_standard_streams",
    "raise_descriptor_limit",
    "read_what_is_there",
    "send_signal",
    "spawn",
    "unread_input",
]

MARK_NAME = "HORO_HOST_MARK"
PASSED_ON = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGABRT, signal.SIGQUIT),
    *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR),
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
"""Signals for the ranks: users trap them, and batch systems send them before a job's time is up.

These are all that end a process without a handler, except those that end a job and those of faults, as SIGTRAP."""
PASSED_ON_BY_AGENTS = (*PASSED_ON, signal.SIGINT, signal.SIGHUP)
"""An agent has no terminal: the last two come from a user who had the batch system send them to the job's steps."""
ENDING_WITHOUT_RANKS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end hororun, or its agent, while it has no rank to pass them on to."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_DESCRIPTORS = 1 << 16
_own_limits: tuple[int, int] | None = None
"""Of open files, before ``raise_descriptor_limit``."""
_POLL_INTERVAL_S = 0.02
_KILL_DEADLINE_S = 10.0
_DONE = b"done\n"


def become_subreaper() -> None:
    """Makes orphans among the descendants of this process its children."""
    ctypes.PyDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_what_is_there(fd: int, read: Callable[[], int]) -> None:
    """Reads the bytes that a pipe holds now; those that are written meanwhile stay.

    Args:
        fd: of the pipe.
        read: reads once and returns how many bytes; 0: there are none.
    """
    count = _waiting_bytes(fd)
    while count > 0 and (got := read()) > 0:
        count -= got


def unread_input() -> bool:
    """Whether stdin is a pipe or a file with something in it."""
    try:
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            return status.st_size > os.lseek(0, 0, os.SEEK_CUR)
        return stat.S_ISFIFO(status.st_mode) and _waiting_bytes(0) > 0
    except OSError:
        return False


def _waiting_bytes(fd: int) -> int:
    """The number of bytes that a pipe holds now."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])


def occupy_standard_streams() -> None:
    """Opens ``/dev/null`` in place of a standard stream that is closed, lest a pipe of ours gets its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def ask(argv: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """The output of a program, on stdout and stderr together, whatever its exit code.

    It starts with signals as ``spawn`` gives them.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it has not ended in time, and was killed.
    """
    try:
        done = subprocess.run(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            preexec_fn=_with_plain_signals,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{argv[0]} has not answered within {timeout_s:g} s") from None
    return done.stdout.decode("utf-8", "replace")


def children_of_this_process() -> set[int]:
    """Pids of the children it has now."""
    here = os.getpid()
    return {pid for pid, process in _list_processes().items() if process.parent == here}


def spawn(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: str | None = None,
    stdin: int = subprocess.DEVNULL,
    last_signal: int = signal.SIGKILL,
    pass_fds: Sequence[int] = (),
    cpus: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, with pipes for its output.

    No signal is blocked in it, and SIGCHLD is not ignored, whatever this process has inherited: else its own children
    would never seem to end. Other signals that are ignored here, as by ``nohup``, stay ignored.

    The kernel sends it ``last_signal`` when this process dies. The caller reaps it with ``os.waitpid``. ``cpus``: it is
    bound to these; none: it may run where this process may.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        argv,
        env=dict(environment),
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_before_exec(last_signal, cpus),  # noqa: PLW1509 - a few calls into the kernel, no lock
        bufsize=0,
        pass_fds=pass_fds,
    )
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            os.set_blocking(stream.fileno(), False)
    return process


def raise_descriptor_limit() -> None:
    """Lets this process open as many files as it may, up to a bound; processes of ``spawn`` get the limit of before.

    Does nothing where the system refuses that, as some containers do.
    """
    global _own_limits  # noqa: PLW0603 - a limit of the whole process
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _own_limits = (soft, hard)


def _before_exec(number: int, cpus: Collection[int]) -> Callable[[], None]:
    prctl = ctypes.PyDLL(None).prctl  # found before the fork; PyDLL keeps the GIL, so nothing can block in the child
    parent = os.getpid()

    def in_child() -> None:
        _with_plain_signals()
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(128 + signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)
        if _own_limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, _own_limits)

    return in_child


def _with_plain_signals() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@dataclass
class Tree:
    """The processes of a job on this host.

    Attributes:
        mark: value of ``HORO_HOST_MARK`` in the environment of its processes.
        sessions: pids of running ranks, each the leader of its session.
        ancestor: a process whose descendants all belong to the job; 0: none.
        spared: processes that do not, with their descendants (the guard, ssh).
    """

    mark: str
    sessions: set[int] = field(default_factory=set)
    ancestor: int = 0
    spared: set[int] = field(default_factory=set)

    def find(self) -> set[int]:
        """Processes of the job that exist now, zombies left out."""
        seen = _list_processes()
        children: dict[int, list[int]] = {}
        for pid, process in seen.items():
            children.setdefault(process.parent, []).append(pid)
        spared = self.spared | {os.getpid()}
        tail = f"{MARK_NAME}={self.mark}".encode()
        todo = [pid for pid, process in seen.items() if process.session in self.sessions or _has_mark(pid, tail)]
        todo += children.get(self.ancestor, []) if self.ancestor else []
        found: set[int] = set()
        while todo:
            pid = todo.pop()
            if pid not in found and pid not in spared:
                found.add(pid)
                todo += children.get(pid, [])
        return {pid for pid in found if seen[pid].alive}

    def find_left_by(self, session: int, variable: str) -> set[int]:
        """Processes of the job that a rank which has ended has left behind, zombies left out.

        Args:
            session: that the rank has led.
            variable: ``NAME=VALUE``, which only this rank has in its environment.
        """
        marks = f"{MARK_NAME}={self.mark}".encode(), variable.encode()
        spared = self.spared | {os.getpid()}
        return {
            pid
            for pid, process in _list_processes().items()
            if process.alive
            and pid not in spared
            and (process.session == session or all(_has_mark(pid, mark) for mark in marks))
        }


@dataclass(frozen=True)
class _Process:
    parent: int
    session: int
    alive: bool


def _list_processes() -> dict[int, _Process]:
    """Empty where ``/proc`` is that of another PID namespace: its numbers are those of strangers here."""
    seen: dict[int, _Process] = {}
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # noqa: PTH115 - a name, not a path
            return seen
    except OSError:
        return seen
    for name in os.listdir("/proc"):  # noqa: PTH208 - no Path object per process
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                seen[int(name)] = _Process(int(fields[1]), int(fields[3]), fields[0] not in (b"Z", b"X"))
    return seen


def _has_mark(pid: int, entry: bytes) -> bool:
    try:
        return entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def describe_process(pid: int) -> str:
    """``4711 (sleep, user 65534)``: its name, its user if that is another, ``state D`` while the kernel holds it."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        user = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return str(pid)
    name = head.partition(b"(")[2].decode("utf-8", "replace")
    other = f", user {user}" if user != os.geteuid() else ""
    return f"{pid} ({name}{other}{', state D' if rest.split()[:1] == [b'D'] else ''})"


def send_signal(pids: Collection[int], number: int) -> set[int]:
    """Signals processes; those that are gone are passed over.

    Returns:
        Those that this process may not signal: another user's.
    """
    refused = set()
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            refused.add(pid)
    return refused


def end_all(tree: Tree, grace_s: float) -> bool:
    """SIGTERM, up to ``grace_s`` seconds, then SIGKILL to all of the job on this host; blocks.

    Returns:
        Whether nothing is left.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    while (found := tree.find()) and time.monotonic() < deadline:
        send_signal(found - asked, signal.SIGTERM)
        asked |= found
        time.sleep(_POLL_INTERVAL_S)
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while (found := tree.find()) and time.monotonic() < deadline:
        send_signal(found, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)
    return not found


class Guard:
    """A process that outlives its parent and ends the job then.

    It is forked, not executed, so it must be made before the first thread. It holds nothing but the read end of a
    pipe. If that pipe ends without the line ``done``, the guard ends the job.
    """

    def __init__(self) -> None:
        read_fd, self._write_fd = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _guard(read_fd)
        os.close(read_fd)

    def tell(self, tree: Tree, grace_s: float) -> None:
        """Sets the processes to end and the grace time; replaces earlier values."""
        self._write(f"{grace_s} {tree.mark} {' '.join(map(str, tree.sessions))}\n".encode())

    def dismiss(self) -> None:
        """Tells the guard that nothing is left to end, and reaps it."""
        self._write(_DONE)
        os.close(self._write_fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # killed by someone: the parent-death signal is what remains
            os.write(self._write_fd, line)


def _guard(read_fd: int) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGTSTP, *PASSED_ON_BY_AGENTS):  # all that the whole job may get
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(read_fd)
        os.chdir("/")
        ctypes.PyDLL(None).prctl(_PR_SET_NAME, b"hororun-guard", 0, 0, 0)
        last = _DONE
        with open(read_fd, "rb") as orders:
            for line in orders:
                last = line
        if last != _DONE:
            grace_s, mark, *pids = last.decode("ascii").split()
            end_all(Tree(mark, set(map(int, pids))), float(grace_s))
    finally:
        os._exit(0)


def _close_all_but(kept_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        if fd != kept_fd:
            os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a descriptor, not a path
        if int(name) > 2 and int(name) != kept_fd:
            with contextlib.suppress(OSError):
                os.close(int(name))
