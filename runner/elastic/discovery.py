"""The discovery of hosts: a script of the user that runs again and again, beside the event loop of hororun."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from horo.runner.agent.ranks import Remained
from horo.runner.hosts import HostsError, HostSpec, parse_hosts
from horo.runner.processes import describe_process, read_what_is_there, spawn
from horo.runner.text import printable

if TYPE_CHECKING:
    import subprocess

    from horo.runner.loop import Loop, Timer

__all__ = ["Discovery", "parse_answer"]

_EVERY_S = 1.0
_TIMEOUT_S = 10.0
_KILLED_S = 5.0
_OUTPUT_BYTES = 1 << 20
_WORDS_BYTES = 300
"""So much of what the script writes on stderr is in a message."""


def parse_answer(text: str, slots_per_host: int | None) -> tuple[dict[str, HostSpec], list[str]]:
    """The hosts of an answer, in order, and the names of those that have several lines: their slots are added up.

    Args:
        text: lines ``host`` or ``host:slots``; a ``#`` begins a comment.
        slots_per_host: slots of a host whose line has none; None: as many as it reports.

    Raises:
        HostsError: a line is no host.
    """
    hosts: dict[str, HostSpec] = {}
    repeated: list[str] = []
    for line in text.splitlines():
        words = line.partition("#")[0].strip()
        for found in parse_hosts(words) if words else ():
            host = replace(found, slots=found.slots or slots_per_host)
            before = hosts.get(host.name)
            if before is not None:
                repeated.append(host.name)
                host = replace(host, slots=(before.slots or 1) + (host.slots or 1))
            hosts[host.name] = host
    return hosts, list(dict.fromkeys(repeated))


def _size(host: HostSpec | None) -> float:
    if host is None:
        return 0
    return float("inf") if host.slots is None else host.slots


class Discovery:
    """Runs the script: at once, and each second after it has ended.

    Args:
        loop: calls back.
        script: a command for the shell.
        environment: of the script.
        slots_per_host: see ``parse_answer``.
        found: gets all hosts when they have changed. A host that is missing in one answer only has not gone.
        failed: gets a sentence if the first run has failed: then there is no other one.
        say: gets warnings. When a later run fails, the last answer stays.
    """

    def __init__(
        self,
        loop: Loop,
        script: str,
        environment: Mapping[str, str],
        *,
        slots_per_host: int | None,
        found: Callable[[list[HostSpec]], None],
        failed: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._loop, self._script, self._environment = loop, script, environment
        self._slots_per_host = slots_per_host
        self._found, self._failed, self._say = found, failed, say
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: Timer | None = None
        self._output = {1: b"", 2: b""}
        self._is_late = self._is_over = False
        self._is_failing = False
        self._hosts: dict[str, HostSpec] | None = None
        self._answer: dict[str, HostSpec] = {}
        self._repeated: list[str] = []

    def run(self) -> None:
        """Starts the script."""
        self._output, self._is_late = {1: b"", 2: b""}, False
        try:
            self._process = spawn(["/bin/sh", "-c", self._script], environment=self._environment)
        except OSError as error:
            self._fail(f"cannot be started: {error.strerror or error}")
            self._again()
            return
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            if stream is not None:
                fd = stream.fileno()
                self._loop.watch(fd, read=functools.partial(self._read, fd, number))
        self._timer = self._loop.call_later(_TIMEOUT_S, self._on_late)

    def stop(self) -> None:
        """Ends the script, and starts it no more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._kill(self._process.pid)
            self._loop.call_later(_KILLED_S, self._give_up)

    def _give_up(self) -> None:
        """Leaves a script that cannot be ended."""
        if self._process is not None:
            self._say(Remained("this host", (describe_process(self._process.pid),)).sentence)
            self._process = None

    @property
    def pid(self) -> int | None:
        """The process of the script, while it runs."""
        return None if self._process is None else self._process.pid

    def on_child(self, pid: int, status: int) -> None:
        """A child of this process has ended."""
        process = self._process
        if process is None or process.pid != pid:
            return
        self._process, process.returncode = None, os.waitstatus_to_exitcode(status)
        if self._timer is not None:
            self._timer.cancel()
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            if stream is not None:
                fd = stream.fileno()
                read_what_is_there(fd, functools.partial(self._read, fd, number))
                self._loop.watch(fd)
                stream.close()
        self._kill(pid)  # what it has left behind: it would be one more each second
        if self._is_over:
            return
        self._on_end(process.returncode)
        self._again()

    def _again(self) -> None:
        if not self._is_over:
            self._timer = self._loop.call_later(_EVERY_S, self.run)

    def _read(self, fd: int, number: int) -> int:
        """Reads what there is; returns how many bytes."""
        try:
            data = os.read(fd, 1 << 16)
        except OSError:
            return 0
        if not data:
            self._loop.watch(fd)
        self._output[number] = (self._output[number] + data)[: _OUTPUT_BYTES + 1]
        return len(data)

    def _on_late(self) -> None:
        if self._process is not None:
            self._is_late = True
            self._kill(self._process.pid)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _on_end(self, code: int) -> None:
        words = self._output[2].decode("utf-8", "replace").strip()[-_WORDS_BYTES:]
        if self._is_late:
            self._fail(f"has not ended within {_TIMEOUT_S:g} s")
        elif code:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            self._fail(": ".join([how, *map(printable, words.splitlines()[-1:])]))
        elif len(self._output[1]) > _OUTPUT_BYTES:
            self._fail(f"writes more than {_OUTPUT_BYTES >> 20} MiB")
        else:
            try:
                answer, repeated = parse_answer(self._output[1].decode("utf-8", "replace"), self._slots_per_host)
            except HostsError as error:
                self._fail(f"writes a line that is no host: {str(error).removeprefix('-H ')}")
                return
            self._is_failing = False
            if repeated and repeated != self._repeated:
                self._warn(f"names {', '.join(repeated)} several times: the slots are added up")
            self._repeated = repeated
            self._take(answer)

    def _take(self, answer: dict[str, HostSpec]) -> None:
        """An answer: what has come counts at once; what has gone, if the answer before was without it, too."""
        before, last = self._hosts or {}, self._answer
        hosts = dict(answer)
        for name, host in before.items():
            kept = min(host, last[name], key=_size) if name in last else None
            if kept is not None and _size(kept) > _size(answer.get(name)):
                hosts[name] = kept
        self._answer = answer
        if self._hosts != hosts:
            self._hosts = hosts
            self._found(list(hosts.values()))

    def _fail(self, how: str) -> None:
        if self._hosts is None:
            self._is_over = True
            self._failed(f"--host-discovery-script {printable(self._script)} {how}")
        elif not self._is_failing:
            self._warn(f"{how}: the hosts stay as they were")
        self._is_failing = True

    def _warn(self, what: str) -> None:
        self._say(f"warning: --host-discovery-script {printable(self._script)} {what}")
