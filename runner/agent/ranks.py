"""The ranks of one host: started, read, signalled and reaped. Used by hororun itself and by its agent elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from horo.horovod.environment import is_switched_on, with_horovod
from horo.runner.agent.command import EXIT_NOT_EXECUTABLE, StartError, explain_failure
from horo.runner.agent.machine import (
    Binding,
    BindingError,
    bind,
    bind_gpus,
    read_topology,
    spelled,
    spelled_gpus,
    threads,
    visible_gpus,
)
from horo.runner.agent.rank_counts import RankCounts
from horo.runner.agent.rank_process import spawn_rank
from horo.runner.agent.rank_reports import NoteReader
from horo.runner.config import EXIT_SETUP
from horo.runner.loop import Loop, Timer
from horo.runner.processes import Guard, Tree, describe_process, read_what_is_there, send_signal
from horo.timeline.recording import rows_of

__all__ = ["Event", "Exited", "HostRanks", "Leaving", "NotStarted", "Noted", "Remained", "Started", "Wrote", "reap"]

_READ_BYTES = 65536
_NOTES = 3
_POLL_INTERVAL_S = 0.05
_KILLED_S = 5.0
"""The time from SIGKILL to the end of a process with much memory; one that is there for longer hangs in the kernel."""
_NAMED_MAX = 10
_NOT_BOUND = Binding()


@dataclass(frozen=True)
class Started:
    """A rank runs; ``bound``: what it is bound to, in words; empty: nothing."""

    rank: int
    pid: int
    bound: str = ""


@dataclass(frozen=True)
class Wrote:
    """A rank wrote ``data`` to its stream 1 (stdout) or 2 (stderr)."""

    rank: int
    stream: int
    data: bytes


@dataclass(frozen=True)
class Noted:
    """A rank wrote ``data`` to its pipe for notes, see ``notes``."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Exited:
    """A rank ended, after all of its output: with ``code``, or killed by ``signal`` (0: it was not).

    ``asked``: the agent had asked it to end before. ``overdue``: it was still there when the grace time was over.
    """

    rank: int
    code: int
    signal: int
    asked: bool
    overdue: bool = False


@dataclass(frozen=True)
class NotStarted:
    """A worker of an elastic job could not be started, for a reason; ``code``: that of a shell."""

    rank: int
    reason: str
    code: int


@dataclass(frozen=True)
class Remained:
    """SIGKILL has not ended processes of the job on ``host``, which are given up; ``processes``: each in words."""

    host: str
    processes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For the user."""
        one, more = len(self.processes) == 1, len(self.processes) - _NAMED_MAX
        named = ", ".join(self.processes[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        what, them = ("process", "it") if one else ("processes", "them")
        return (
            f"{what} {named} on {self.host}: SIGKILL has not ended {them}, and hororun leaves {them}; end {them} there"
        )


@dataclass(frozen=True)
class Leaving:
    """``host`` is about to end: its agent has got SIGTERM, and takes its workers with it after the grace time."""

    host: str


Event = Started | Wrote | Noted | Exited | NotStarted | Remained | Leaving


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    streams: dict[int, int]  # descriptor -> 1, 2 or _NOTES


class HostRanks:
    """Runs the ranks of one host in a loop and passes each event to ``emit``.

    Calls in order: ``start``, perhaps ``interrupt``, ``terminate`` or ``kill``, until ``finished``: no rank runs, and
    no process that they have left behind, but those that SIGKILL does not end.

    Args:
        loop: calls back.
        guard: ends all if this process dies.
        tree: finds the processes.
        grace_s: from SIGTERM to SIGKILL.
        emit: gets the events.
        each_has: the name of the variable that has the number of each rank; numbers are used once. Then others may
            start after some have ended, until ``release``. The end of a rank that has failed is reported once the
            processes are killed that it has left behind. Empty: all ranks start at once.
    """

    def __init__(
        self,
        loop: Loop,
        guard: Guard,
        tree: Tree,
        grace_s: float,
        emit: Callable[[Event], None],
        *,
        each_has: str = "",
    ) -> None:
        self._loop = loop
        self._guard = guard
        self._tree = tree
        self._grace_s = grace_s
        self._emit = emit
        self._counts = RankCounts(loop, lambda rank, note: emit(Noted(rank, note)))
        self._ranks: dict[int, _Rank] = {}  # by pid, those that run
        self._streams: dict[int, tuple[int, int]] = {}  # descriptor -> rank, stream
        self._open: list[_Rank] = []  # keeps the pipes of ended ranks: processes that they left behind may still write
        self._paused = False
        self._asked = False
        self._overdue: set[int] = set()  # pids
        self._kill_at_s = float("inf")
        self._told: set[int] = set()  # processes that ranks left behind and that have had their SIGTERM
        self._next_look: Timer | None = None
        self._host = ""
        self._notes: dict[int, NoteReader] = {}
        self._timelines: subprocess.Popen[bytes] | None = None
        self.finished = False
        self._each_has = each_has
        self._ending: dict[int, Exited] = {}
        """By pid, ranks that have failed and have left processes behind, which are being ended."""

    def start(
        self,
        argv: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        cwd: str,
        host: str,
        *,
        with_notes: bool = True,
        binding: Binding = _NOT_BOUND,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts one process per rank.

        Args:
            argv: the command of each.
            environments: of each rank.
            cwd: where they start.
            host: its name, for messages.
            with_notes: each gets a pipe for notes.
            binding: the cores and GPUs that they are bound to.
            pass_fds: descriptors that each inherits, under the same numbers.

        Raises:
            StartError: one could not be started, for the named reason; those before it run.
        """
        self._host = host
        self._guard.tell(self._tree, self._grace_s)
        try:
            bound = _share_cpus(binding.cpus, list(environments))
            gpus = _share_gpus(environments) if binding.gpus else {}
        except BindingError as error:
            raise StartError(f"host {host}: {error}", EXIT_SETUP) from None
        shares = {} if binding.threads_set else threads(bound)
        for rank, own in environments.items():
            cpus = bound.get(rank, frozenset())
            environment = {**own, "OMP_NUM_THREADS": str(shares[rank])} if rank in shares else own
            environment = {**environment, "CUDA_VISIBLE_DEVICES": gpus[rank]} if rank in gpus else environment
            if is_switched_on(environment):
                environment = with_horovod(environment)
            try:
                started = spawn_rank(argv, environment, cwd, cpus, with_notes=with_notes, pass_fds=pass_fds)
            except OSError as error:
                raise explain_failure(error, argv[0], cwd, host) from error
            except ValueError as error:  # a NUL byte
                raise StartError(f"the command cannot be started on {host}: {error}", EXIT_NOT_EXECUTABLE) from error
            process = started.process
            self._tree.sessions.add(process.pid)
            self._guard.tell(self._tree, self._grace_s)
            self._watch(rank, process, started.notes)
            self._counts.started(process.pid, rank, started.page)
            units = [spelled(cpus) if cpus else "", spelled_gpus(gpus[rank]) if rank in gpus else ""]
            self._emit(Started(rank, process.pid, " and ".join(filter(None, units))))

    def on_child(self, pid: int, status: int) -> None:
        """A child of this process was reaped; it may be a rank."""
        if self._timelines is not None and pid == self._timelines.pid:
            self._timelines.returncode = os.waitstatus_to_exitcode(status)
            self.finished = True
            return
        rank = self._ranks.pop(pid, None)
        if rank is None:
            return
        for fd, stream in list(rank.streams.items()):
            read_what_is_there(fd, partial(self._read, fd, even_paused=True))
            if stream == _NOTES and fd in self._streams:  # a process of the ended rank may hold the other end
                self._close(fd)
        self._counts.ended(pid)
        rank.process.returncode = os.waitstatus_to_exitcode(status)
        code = rank.process.returncode
        self._tree.sessions.discard(pid)  # the number is free for others now
        self._guard.tell(self._tree, self._grace_s)
        exited = Exited(rank.rank, max(code, 0), max(-code, 0), self._asked, pid in self._overdue)
        if self._each_has and code != 0 and not self._asked:
            self._ending[pid] = exited
            self._end_left_by(pid, self._loop.now_s + _KILLED_S)
        else:
            self._emit(exited)
        self._end_remaining_processes()

    def _end_left_by(self, pid: int, until_s: float) -> None:
        """Kills what a rank has left behind, and reports its end when nothing is left of it."""
        exited = self._ending.get(pid)
        if exited is None:
            return
        found = self._tree.find_left_by(pid, f"{self._each_has}={exited.rank}")
        refused = send_signal(found, signal.SIGKILL)
        if found and found != refused and self._loop.now_s < until_s:
            self._loop.call_later(_POLL_INTERVAL_S, lambda: self._end_left_by(pid, until_s))
            return
        if found:
            self._emit(Remained(self._host, tuple(map(describe_process, sorted(found)))))
        del self._ending[pid]
        self._emit(exited)

    def release(self) -> None:
        """No rank will start any more."""
        self._each_has = ""
        self._end_remaining_processes()

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """SIGKILL, or another signal, to one rank and its process group."""
        for pid in [pid for pid, record in self._ranks.items() if record.rank == rank]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def terminate(self) -> None:
        """SIGTERM to every rank and its process group; SIGKILL after the grace time. Again: nothing new."""
        if self._asked:
            return
        self._asked = True
        self._terminate_rest()

    def interrupt(self) -> None:
        """SIGINT to every rank and its process group; after the grace time SIGTERM, after it again SIGKILL."""
        if self._asked:
            return
        self._asked = True
        self._signal_groups(signal.SIGINT)
        self._loop.call_later(self._grace_s, self._terminate_rest)
        self._end_remaining_processes()

    def pass_on(self, number: int) -> None:
        """A signal that users trap, to every rank and its process group."""
        self._signal_groups(number)

    def pass_on_to_processes(self, number: int) -> None:
        """The same to what ``start`` has started, and not to its process group."""
        send_signal(list(self._ranks), number)

    def _terminate_rest(self) -> None:
        if self.finished:
            return
        self._signal_groups(signal.SIGTERM)
        self._kill_at_s = self._loop.now_s + self._grace_s
        self._loop.call_later(self._grace_s, self._kill_overdue)
        self._end_remaining_processes()

    def _kill_overdue(self) -> None:
        if self._timelines is None:
            self._overdue.update(self._ranks)
            self.kill()

    def kill(self) -> None:
        """SIGKILL to all that is left."""
        if self.finished:
            return
        if self._timelines is not None:
            self._timelines.terminate()
            return
        self._asked = True
        self._kill_at_s = min(self._kill_at_s, self._loop.now_s)
        self._signal_groups(signal.SIGKILL)
        self._end_remaining_processes()

    def watch(self, every_s: float) -> bool:
        """Reports the counts of all ranks so often, as notes of theirs, from now on; 0: no more."""
        self._counts.watch(0.0 if self.finished else every_s)
        return True

    def show_stacks(self) -> None:
        """Has the ranks that can do so show their stacks on stderr."""
        self._counts.show_stacks()

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading: ranks that write on have to wait once their pipe is full."""
        self._paused = paused
        for fd in self._streams:
            self._listen(fd)

    def close(self) -> None:
        """Closes the descriptors that are open."""
        for fd in list(self._streams):
            self._close(fd)
        self._counts.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], notes: int | None) -> None:
        streams = {} if notes is None else {notes: _NOTES}
        for stream, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe is not None:
                streams[pipe.fileno()] = stream
        record = _Rank(rank, process, streams)
        self._ranks[process.pid] = record
        self._open.append(record)
        for fd, stream in streams.items():
            self._streams[fd] = (rank, stream)
            self._listen(fd)

    def _listen(self, fd: int) -> None:
        self._loop.watch(fd, read=None if self._paused else lambda: self._read_once(fd))

    def _read_once(self, fd: int) -> None:
        self._read(fd)

    def _read(self, fd: int, even_paused: bool = False) -> int:
        if fd not in self._streams or (self._paused and not even_paused):
            return 0
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._close(fd)
            return 0
        rank, stream = self._streams[fd]
        if stream == _NOTES:
            self._notes.setdefault(rank, NoteReader()).feed(data)
        self._emit(Noted(rank, data) if stream == _NOTES else Wrote(rank, stream, data))
        return len(data)

    def _close(self, fd: int) -> None:
        self._loop.watch(fd)
        _, stream = self._streams.pop(fd)
        if stream == _NOTES:
            os.close(fd)
        for record in self._open:
            if record.streams.pop(fd, None) is not None and stream != _NOTES:
                for pipe in (record.process.stdout, record.process.stderr):
                    if pipe is not None and not pipe.closed and pipe.fileno() == fd:
                        pipe.close()
        self._open = [record for record in self._open if record.streams or record.process.pid in self._ranks]

    def _signal_groups(self, number: int) -> None:
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def _end_remaining_processes(self) -> None:
        """Once no rank runs, ends the processes that ranks have left behind, and repeats that until all are gone.

        When ranks are to be killed, these processes are killed with them.
        """
        now_s = self._loop.now_s
        if self.finished or self._timelines is not None or (self._ranks and now_s < self._kill_at_s):
            return
        if self._each_has and not self._asked:
            return
        found = self._tree.find()
        if not found and not self._ranks:
            self._finish()
            return
        if self._kill_at_s == float("inf"):
            self._kill_at_s = now_s + self._grace_s
        if now_s < self._kill_at_s:
            send_signal(found - self._told, signal.SIGTERM)
            self._told |= found
        else:
            refused = send_signal(found, signal.SIGKILL)
            if (found and found == refused) or now_s >= self._kill_at_s + _KILLED_S:
                self._give_up(found)
                return
        if self._next_look is not None:
            self._next_look.cancel()
        self._next_look = self._loop.call_later(_POLL_INTERVAL_S, self._end_remaining_processes)

    def _give_up(self, found: Collection[int]) -> None:
        """Leaves processes that cannot be ended: the kernel holds them, or they are another user's."""
        ranks = {pid: each.rank for pid, each in self._ranks.items()}
        named = [f"{describe_process(pid)} of rank {rank}" for pid, rank in ranks.items()]
        named += [describe_process(pid) for pid in sorted(set(found) - ranks.keys())]
        self._ranks.clear()
        for rank in ranks.values():
            self._emit(Exited(rank, 0, signal.SIGKILL, self._asked))
        self._emit(Remained(self._host, tuple(named)))
        self._finish()

    def _finish(self) -> None:
        """The end, once another process has made the timelines that ranks have left: that may take longer than a round
        of the loop. It starts in ``/``, as an agent: the user's folder may have modules of names that it imports."""
        self.close()
        for exited in self._ending.values():
            self._emit(exited)
        self._ending.clear()
        noted = {path for reader in self._notes.values() for path in reader.note.timelines}
        left = sorted(path for path in noted if Path(rows_of(path)).exists())
        if not left or self._timelines is not None:
            self.finished = True
            return
        command = [sys.executable, "-m", "horo.timeline", *left]
        try:
            self._timelines = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/")
        except OSError:
            self.finished = True


def _share_cpus(how: str, ranks: Sequence[int]) -> dict[int, frozenset[int]]:
    return {} if how == "none" else bind(how, ranks, os.sched_getaffinity(0), read_topology())


def _share_gpus(environments: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    """``CUDA_VISIBLE_DEVICES`` of each rank. Before, all have the same of it."""
    return bind_gpus(list(environments), visible_gpus(next(iter(environments.values()), {})))


def reap(owners: Sequence[Callable[[int, int], None]]) -> None:
    """Reaps every child that has ended and passes its pid and wait status to all ``owners``."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for owner in owners:
            owner(pid, status)
