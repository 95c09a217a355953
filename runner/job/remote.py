"""One remote host, seen from the launcher: one ssh or srun, the agent at its other end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from horo import __version__
from horo.runner.agent.messages import Kind, Message, MessageError, MessageReader, encode, encode_json
from horo.runner.agent.ranks import Event, Exited, Noted, Output, Started
from horo.runner.config import EXIT_INTERNAL, EXIT_SETUP, EXIT_UNREACHABLE, JobError
from horo.runner.hosts import Host
from horo.runner.loop import Loop, Timer
from horo.runner.processes import spawn
from horo.runner.start.remote_launcher import RemoteLauncher, lines_of

__all__ = ["RemoteHost", "explain_absence"]

_READ_BYTES = 1 << 18
_STDERR_TAIL_BYTES = 8192
_END_TIMEOUT_S = 2.0


class RemoteHost:
    """The connection to the agent on one host.

    ``host_info`` is what the agent has sent about its host, None before. ``error`` is why the host cannot take part,
    None while it can. ``finished``: the connection is over, and nothing more will come. After each change of these,
    ``changed`` is called; for each event of a rank, ``emit``.
    """

    def __init__(self, loop: Loop, host: Host, emit: Callable[[Event], None], changed: Callable[[], None]) -> None:
        self.host = host
        self.host_info: dict[str, Any] | None = None
        self.error: JobError | None = None
        self.finished = False
        self.job_sent = False
        self.answers: dict[Kind, dict[str, Any]] = {}  # to what ``ask`` has asked
        self.connected = False
        self._hung_up = False
        self._loop = loop
        self._emit = emit
        self._changed = changed
        self._frames = MessageReader(magic=True)
        self._outgoing = bytearray()
        self._stderr = b""
        self._code: int | None = None
        self._process: subprocess.Popen[bytes]
        self._launcher: RemoteLauncher
        self._ping: Timer | None = None
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
        self._ping_interval_s = host_timeout_s / 3
        self._loop.watch(self._stdout, read=self._read_frames)
        self._loop.watch(self._stderr_fd, read=self._read_stderr)
        self._open = {self._stdout, self._stderr_fd}
        self._send_ping()
        return command

    def send_job(self, job: dict[str, Any]) -> None:
        """Tells the agent what to run."""
        self.job_sent = True
        self._send(encode_json(Kind.JOB, job))

    def ask(self, kind: Kind, value: dict[str, Any]) -> None:
        """Asks the agent something that is no job; ``answers`` will have what it says."""
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

    def _signal(self, number: int) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading; the agent and its ranks wait when pipes are full."""
        if self._stdout in self._open:
            self._loop.watch(self._stdout, read=None if paused else self._read_frames)

    def on_child(self, pid: int, status: int) -> None:
        """A child of this process was reaped; it may be our ssh."""
        if self._code is not None or pid != self.pid:
            return
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self._code = code if code >= 0 else 128 - code
        # Another process may still hold the pipes (a master connection, a proxy): do not wait for it.
        for fd, read in ((self._stdout, self._read_frames), (self._stderr_fd, self._read_stderr)):
            while fd in self._open and read():
                pass
        self._finish()

    @property
    def why_lost(self) -> str:
        """Why the connection ended, in a few words."""
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
        if not self._outgoing:  # other frames serve as a ping too
            self._send(encode(Kind.PING))
        self._ping = self._loop.call_later(self._ping_interval_s, self._send_ping)

    def _read_frames(self) -> bool:
        data = self._read(self._stdout)
        try:
            for frame in self._frames.feed(data):
                self._handle(frame)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self._fail(JobError(f"host {self.host.name}: the agent sent nonsense: {error}", EXIT_INTERNAL))
        return bool(data)

    def _read_stderr(self) -> bool:
        data = self._read(self._stderr_fd)
        self._stderr = (self._stderr + data)[-_STDERR_TAIL_BYTES:]
        return bool(data)

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

    def _handle(self, frame: Message) -> None:
        if frame.kind == Kind.HOST_INFO:
            self._on_host_info(frame.json())
        elif frame.kind == Kind.STARTED:
            started = frame.json()
            self._emit(Started(frame.rank, int(started["pid"]), str(started["cpus"])))
        elif frame.kind in (Kind.STDOUT, Kind.STDERR):
            self._emit(Output(frame.rank, 1 if frame.kind == Kind.STDOUT else 2, frame.payload))
        elif frame.kind == Kind.NOTE:
            self._emit(Noted(frame.rank, frame.payload))
        elif frame.kind == Kind.EXITED:
            end = frame.json()
            flags = bool(end["asked"]), bool(end["overdue"])
            self._emit(Exited(frame.rank, int(end["code"]), int(end["signal"]), *flags))
        elif frame.kind in (Kind.LISTENING, Kind.REACHED):
            self.answers[frame.kind] = frame.json()
            self._changed()
        elif frame.kind == Kind.FAILED:
            failure = frame.json()
            self._fail(JobError(str(failure["message"]), int(failure["code"])))
        else:
            raise MessageError(f"{frame.kind.name} is not for launchers")

    def _on_host_info(self, host_info: dict[str, Any]) -> None:
        if host_info["version"] != __version__:
            self._fail(
                JobError(
                    f"host {self.host.name} has horo {host_info['version']} but this host has {__version__}: "
                    "install the same version on both",
                    EXIT_SETUP,
                )
            )
            return
        # What was said until now, by a login shell or by srun, is no cause of what happens later.
        while self._stderr_fd in self._open and self._read_stderr():
            pass
        self._stderr = b""
        self.host_info = host_info
        self._changed()

    def _fail(self, error: JobError) -> None:
        if self.error is None:
            self.error = error
            self._changed()

    def _finish(self) -> None:
        if self._ping is not None:
            self._ping.cancel()
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
    """Why each of the hosts cannot take part; those that have not answered in time are one sentence, the last."""
    errors = [each.error for each in remotes if each.error is not None]
    silent = [each.host.name for each in remotes if each.error is None and each.host_info is None]
    if silent:
        sentence = (
            f"no answer within {timeout_s:g} s from {', '.join(silent)}: "
            f"try {launcher.trial_command(silent[0])} by hand, or give it more time with --start-timeout"
        )
        errors.append(JobError(sentence, EXIT_UNREACHABLE))
    return errors
