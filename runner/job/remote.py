"""One remote host, seen from the launcher: one ssh or srun, the agent at its other end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from horo.runner.agent import checks
from horo.runner.agent.machine import Binding
from horo.runner.agent.protocol import PING_S, Kind, Message, MessageError, MessageReader, encode, encode_json
from horo.runner.agent.ranks import Event, Leaving, Noted, Remained, Wrote
from horo.runner.config import EXIT_INTERNAL, EXIT_SETUP, EXIT_UNREACHABLE, Job, JobError
from horo.runner.hosts import HostSpec
from horo.runner.job.forwarded_variables import forwarded
from horo.runner.loop import Loop, Timer
from horo.runner.processes import describe_process, read_what_is_there, spawn
from horo.runner.start.remote_launcher import RemoteLauncher, lines_of
from horo.version import __version__

__all__ = ["RemoteHost", "explain_absence"]

_READ_BYTES = 1 << 18
_STDERR_TAIL_BYTES = 8192
_END_TIMEOUT_S = 2.0
_KILLED_S = 5.0
_OWN_SILENCE = 2 / 3
"""The part of the host timeout after which the agent of an elastic job ends its workers: before the job goes on
without them. Longer than an outage that is survived."""
_ANSWERS = {Kind.LISTEN: Kind.LISTENING, Kind.REACH: Kind.REACHED}
_CHECKS = {Kind.LISTENING: checks.listening, Kind.REACHED: checks.reached}


class RemoteHost:
    """The connection to the agent on one host.

    ``host_info``: the facts that the agent has sent about its host, None before. ``error``: the reason why the host
    cannot take part, None while it can. ``finished``: the connection is over, and nothing more will come. ``changed``
    is called after each change of these, ``emit`` for each event of a rank, ``signalled`` for each signal that came to
    the agent and is passed on.
    """

    def __init__(
        self,
        loop: Loop,
        host: HostSpec,
        emit: Callable[[Event], None],
        changed: Callable[[], None],
        signalled: Callable[[RemoteHost, int], None] = lambda _host, _number: None,
    ) -> None:
        self.host = host
        self.host_info: dict[str, Any] | None = None
        self.error: JobError | None = None
        self.finished = False
        self.job_sent = False
        self.answers: dict[Kind, dict[str, Any]] = {}  # to what ``ask`` has asked
        self.connected = False
        self._hung_up = False
        self._ranks: set[int] = set()  # all that were sent there
        self._to_start: set[int] = set()  # those of which nothing is known
        self._to_end: set[int] = set()  # those that have not ended
        self._asked: set[Kind] = set()  # which answers are due
        self._refused = False
        self._loop = loop
        self._emit = emit
        self._changed = changed
        self._signalled = signalled
        self._messages = MessageReader(magic=True)
        self._outgoing = bytearray()
        self._stderr = b""
        self._code: int | None = None
        self._process: subprocess.Popen[bytes]
        self._launcher: RemoteLauncher
        self._ping: Timer | None = None
        self._silence_s: float | None = None
        self._silence_timer: Timer | None = None
        self._paused = False
        self._was_silent = False
        self._ping_interval_s = 0.0
        self._open: set[int] = set()

    @property
    def pid(self) -> int:
        """Of the program that connects us."""
        return self._process.pid

    def connect(self, launcher: RemoteLauncher, *, host_timeout_s: float) -> list[str]:
        """Starts the agent there and returns the command that does.

        Raises:
            JobError: the command cannot be started here.
        """
        command = launcher.command(self.host)
        try:
            self._process = spawn(
                command,
                environment=launcher.environment(os.environ),
                stdin=subprocess.PIPE,
                last_signal=signal.SIGTERM if launcher.ends_on_sigterm else signal.SIGKILL,
            )
        except OSError as error:
            raise JobError(
                f"host {self.host.name} needs {launcher.name}, and {launcher.program!r} cannot be started here: "
                f"{error.strerror}",
                EXIT_SETUP,
            ) from error
        self._launcher = launcher
        self.connected = True
        self._ping_interval_s = min(PING_S, host_timeout_s / 3)
        self._loop.watch(self._stdout, read=self._read_messages)
        self._loop.watch(self._stderr_fd, read=self._read_stderr)
        self._open = {self._stdout, self._stderr_fd}
        self._send_ping()
        return command

    def send_job(
        self,
        job: Job,
        environment: Mapping[str, str],
        ranks: Mapping[int, Mapping[str, str]],
        *,
        mark: str,
        binding: Binding,
        marks_before: Sequence[str] = (),
    ) -> None:
        """Gives the agent the ranks to run.

        Args:
            job: that they belong to.
            environment: of hororun.
            ranks: the variables of each; none: the job is elastic, and they come one by one, by ``start_worker``.
            mark: of their processes.
            binding: the cores and GPUs that they are bound to.
            marks_before: those of agents before, whose processes end first.
        """
        self.job_sent = True
        self._await(*ranks)
        exported = {**forwarded(environment), **self._launcher.extra_variables(environment), **job.exports}
        message = {
            "host": self.host.name,
            "mark": mark,
            "marks_before": list(marks_before),
            "cwd": str(Path.cwd()),
            "command": list(job.command),
            "environment": exported,
            "unset": list(self._launcher.unset),
            "ranks": {str(rank): own for rank, own in ranks.items()},
            "grace_s": job.grace_s,
            "silence_s": job.host_timeout_s * (1 if ranks else _OWN_SILENCE),
            "master_port": job.master_port if 0 in ranks else 0,
            "binding": asdict(binding),
        }
        self._send(encode_json(Kind.JOB, message))
        if not ranks:
            self._silence_s = job.host_timeout_s
            self._restart_silence_timer()

    def start_worker(self, worker: int, slot: int, environment: Mapping[str, str]) -> None:
        """Has the agent start a worker of an elastic job.

        Args:
            worker: its number.
            slot: its place on that host, whose last worker has ended.
            environment: the variables that it has of its own.
        """
        self._await(worker)
        self._send(encode_json(Kind.START, {"slot": slot, "environment": dict(environment)}, worker))

    def _await(self, *ranks: int) -> None:
        for awaited in (self._ranks, self._to_start, self._to_end):
            awaited.update(ranks)

    def end_worker(self, worker: int, *, at_once: bool) -> None:
        """Has the agent end one worker, see ``HostWorkers``."""
        self._send(encode_json(Kind.END, {"at_once": at_once}, worker))

    def release(self) -> None:
        """No worker will start there any more: ends the agent once all have ended."""
        self.terminate()

    def ask(self, kind: Kind, value: dict[str, Any]) -> None:
        """Asks the agent a question that is no job; its answer comes into ``answers``."""
        self._asked.add(_ANSWERS[kind])
        self._send(encode_json(kind, value))

    def terminate(self) -> None:
        """Asks the agent to end its ranks; without a job, ends the connection."""
        if self.job_sent:
            self._send(encode(Kind.TERMINATE))
        else:
            self.hang_up()

    def interrupt(self) -> None:
        """As ``terminate``, with SIGINT first."""
        if self.job_sent:
            self._send(encode(Kind.INTERRUPT))
        else:
            self.hang_up()

    def pass_on(self, number: int) -> None:
        """Asks the agent to send its ranks a signal."""
        if self.job_sent:
            self._send(encode_json(Kind.SIGNAL, {"number": number}))

    def watch(self, every_s: float) -> bool:
        """Asks the agent to report what its ranks have counted so often, as notes of theirs; 0: no more.

        Returns:
            Whether it has ranks.
        """
        if self.job_sent and not self.finished:
            self._send(encode_json(Kind.WATCH, {"every_s": every_s}))
        return self.job_sent

    def show_stacks(self) -> None:
        """Asks the agent to have its ranks show their stacks."""
        if self.job_sent:
            self._send(encode(Kind.STACKS))

    def kill(self) -> None:
        """Asks the agent to kill its ranks at once."""
        if self.job_sent:
            self._send(encode(Kind.KILL))
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Ends the connection; an agent that still runs ends its ranks."""
        self._hung_up = True
        if self._launcher.ends_on_sigterm:
            self._signal(signal.SIGTERM)
            self._loop.call_later(_END_TIMEOUT_S, lambda: self._signal(signal.SIGKILL))
        else:
            self._signal(signal.SIGKILL)
        self._loop.call_later(_KILLED_S, self._give_up)

    def _signal(self, number: int) -> None:
        if self._code is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return
        except PermissionError:  # it has taken another user's identity
            self._loop.call_later(0, self._give_up)

    def _give_up(self) -> None:
        """Leaves the program that connects us, which cannot be ended; its end of our pipes ends its agent."""
        if self._code is None:
            self._emit(Remained("this host", (describe_process(self.pid),)))
            self._code = 128 + signal.SIGKILL
            self._finish()

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading; the agent and its ranks wait when pipes are full."""
        if self._stdout in self._open:
            self._loop.watch(self._stdout, read=None if paused else self._read_messages)
            self._paused = paused
            self._restart_silence_timer()

    def _restart_silence_timer(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        is_due = self._silence_s is not None and not self._paused and not self.finished
        self._silence_timer = self._loop.call_later(self._silence_s or 0.0, self._on_silence) if is_due else None

    def _on_silence(self) -> None:
        self._was_silent = True
        sentence = f"host {self.host.name} has sent nothing for {self._silence_s:g} s (--host-timeout)"
        self._fail(JobError(sentence, EXIT_UNREACHABLE))
        self.hang_up()

    def on_child(self, pid: int, status: int) -> None:
        """A child of this process was reaped; it may be our ssh."""
        if self._code is not None or pid != self.pid:
            return
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self._code = code if code >= 0 else 128 - code
        # Another process may still hold the pipes (a master connection, a proxy): do not wait for it.
        for fd, read in ((self._stdout, self._read_messages), (self._stderr_fd, self._read_stderr)):
            if fd in self._open:
                read_what_is_there(fd, read)
        self._finish()

    @property
    def may_run_s(self) -> float | None:
        """The time for which workers of an elastic job may be at work there after the end of the connection; None: its
        agent should have ended them before, and nobody knows whether it has."""
        if self._was_silent:
            return None
        has_ended = self._code == 0 and self.error is not None  # srun: 0 when a node fails, too
        return 0.0 if has_ended or self._silence_s is None else self._silence_s * _OWN_SILENCE

    @property
    def why_lost(self) -> str:
        """The reason for the end of the connection, in a few words."""
        if self.error is not None:
            return str(self.error)
        cause = self._launcher.cause(lines_of(self._stderr))
        return f"{self._launcher.name} ended with code {self._code}" + (f": {cause}" if cause else "")

    @property
    def _stdout(self) -> int:
        return -1 if self._process.stdout is None or self._process.stdout.closed else self._process.stdout.fileno()

    @property
    def _stderr_fd(self) -> int:
        return -1 if self._process.stderr is None or self._process.stderr.closed else self._process.stderr.fileno()

    def _send(self, data: bytes) -> None:
        self._outgoing += data
        self._write()

    def _write(self) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            while self._outgoing:
                del self._outgoing[: os.write(pipe.fileno(), self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # ssh is ending; SIGCHLD will report it
            self._outgoing.clear()
        self._loop.watch(pipe.fileno(), write=self._write if self._outgoing else None)

    def _send_ping(self) -> None:
        if not self._outgoing:  # other messages serve as a ping too
            self._send(encode(Kind.PING))
        self._ping = self._loop.call_later(self._ping_interval_s, self._send_ping)

    def _read_messages(self) -> int:
        data = self._read(self._stdout)
        self._restart_silence_timer()
        if self._refused:
            return len(data)
        try:
            for message in self._messages.feed(data):
                self._handle(message)
        except MessageError as error:
            self._refused = True
            self._fail(JobError(f"host {self.host.name}: the agent sent an invalid message: {error}", EXIT_INTERNAL))
            self.hang_up()  # where the next message begins is unknown; an agent that still runs ends its ranks
        return len(data)

    def _read_stderr(self) -> int:
        data = self._read(self._stderr_fd)
        self._stderr = (self._stderr + data)[-_STDERR_TAIL_BYTES:]
        return len(data)

    def _read(self, fd: int) -> bytes:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._loop.watch(fd)
            self._open.discard(fd)
        return data

    def _handle(self, message: Message) -> None:
        if message.kind == Kind.HOST_INFO and self.host_info is None:
            self._on_host_info(message)
        elif message.kind == Kind.STARTED:
            started = checks.started(message, self._to_start)
            self._to_start.discard(message.rank)
            self._emit(started)
        elif message.kind in (Kind.STDOUT, Kind.STDERR):  # also of what ranks that have ended have left behind
            stream = 1 if message.kind == Kind.STDOUT else 2
            self._emit(Wrote(checks.rank_of(message, self._ranks), stream, message.payload))
        elif message.kind == Kind.NOTE:
            self._emit(Noted(checks.rank_of(message, self._ranks), message.payload))
        elif message.kind == Kind.EXITED:
            exited = checks.exited(message, self._to_end)
            self._to_end.discard(message.rank)
            self._emit(exited)
        elif message.kind in (Kind.NOT_STARTED, Kind.LEAVING) and self._silence_s is not None:  # the job is elastic
            self._handle_elastic(message)
        elif message.kind == Kind.SIGNALLED:
            self._signalled(self, checks.signalled(message))
        elif message.kind == Kind.PING:
            return
        elif message.kind == Kind.REMAINED:
            self._emit(Remained(self.host.name, checks.remained(message)))
        elif message.kind in self._asked:
            self.answers[message.kind] = _CHECKS[message.kind](message)
            self._changed()
        elif message.kind == Kind.FAILED:
            self._fail(JobError(*checks.failure(message)))
        else:
            raise MessageError(f"a {message.kind.name} message is not expected")

    def _handle_elastic(self, message: Message) -> None:
        if message.kind == Kind.LEAVING:
            self._emit(Leaving(self.host.name))
            return
        not_started = checks.not_started(message, self._to_start)
        self._to_start.discard(message.rank)
        self._to_end.discard(message.rank)
        self._emit(not_started)

    def _on_host_info(self, message: Message) -> None:
        version = checks.version(message)
        if version != __version__:
            self._fail(
                JobError(
                    f"host {self.host.name} has horo {version} but this host has {__version__}: "
                    "install the same version on both",
                    EXIT_SETUP,
                )
            )
            return
        host_info = checks.host_info(message)
        # Output of a login shell or of srun until now is no cause of a later failure.
        if self._stderr_fd in self._open:
            read_what_is_there(self._stderr_fd, self._read_stderr)
        self._stderr = b""
        self.host_info = host_info
        self._changed()

    def _fail(self, error: JobError) -> None:
        if self.error is None:
            self.error = error
            self._changed()

    def _finish(self) -> None:
        for timer in (self._ping, self._silence_timer):
            if timer is not None:
                timer.cancel()
        if self.host_info is None and self.error is None:
            self.error = self._launcher.explain_failure(self.host.name, self._code or 0, self._stderr)
        if not self.job_sent and not self._hung_up and self.error is None:
            self.error = JobError(f"host {self.host.name} was lost: {self.why_lost}", EXIT_UNREACHABLE)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                self._loop.watch(pipe.fileno())
                with contextlib.suppress(OSError):
                    pipe.close()
        self._open.clear()
        self.finished = True
        self._changed()


def explain_absence(remotes: Sequence[RemoteHost], launcher: RemoteLauncher, timeout_s: float) -> list[JobError]:
    """The reasons why hosts cannot take part; those that have not answered in time share the last sentence."""
    errors = [each.error for each in remotes if each.error is not None]
    silent = [each.host.name for each in remotes if each.error is None and each.host_info is None]
    if silent:
        sentence = (
            f"no answer within {timeout_s:g} s from {', '.join(silent)}: "
            f"try {launcher.trial_command(silent[0])} by hand, or give it more time with --start-timeout"
        )
        errors.append(JobError(sentence, EXIT_UNREACHABLE))
    return errors
