"""``--check-hosts``: whether ranks could be started on each host, and could connect to each other; starts none."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from horo.runner.agent.machine import host_facts
from horo.runner.agent.protocol import Kind
from horo.runner.agent.ranks import reap
from horo.runner.config import EXIT_SETUP, EXIT_UNREACHABLE, Job, JobError
from horo.runner.hosts import HostSpec
from horo.runner.job.host_addresses import HostAddresses, find_addresses
from horo.runner.job.placement import remote_launcher_of
from horo.runner.job.remote import RemoteHost, explain_absence
from horo.runner.loop import Loop
from horo.runner.network import NetworkError, interface_addresses, is_local, listen, unreachable
from horo.runner.processes import occupy_standard_streams
from horo.runner.start.remote_launcher import RemoteLauncher
from horo.runner.stdout import show
from horo.runner.text import printable

__all__ = ["check_hosts"]

_CONNECT_S = 5.0
_HERE = "the host of hororun"


def check_hosts(job: Job, environment: Mapping[str, str]) -> int:
    """Checks all hosts of the job and prints a line for each.

    Returns:
        0 if ranks can be started on all of them; else the code that hororun would exit with for the first that fails.

    Raises:
        JobError: the program that reaches hosts cannot be started here, or stdout cannot be written.
    """
    launcher = remote_launcher_of(job, environment)
    occupy_standard_streams()
    with closing(Loop()) as loop:
        return _Check(job, launcher, loop).run()


class _Check:
    def __init__(self, job: Job, launcher: RemoteLauncher, loop: Loop) -> None:
        self._job = job
        self._launcher = launcher
        self._loop = loop
        self._signal = 0
        self._errors: dict[str, JobError] = {}
        self._remotes: dict[str, RemoteHost] = {}
        self._routes: dict[str, HostAddresses] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.on_signal(number, self._on_signal)
        loop.on_signal(signal.SIGCHLD, lambda _number: reap([each.on_child for each in self._remotes.values()]))

    def run(self) -> int:
        try:
            self._connect()
            with closing(_listen(self._job.ports)) as listener:
                self._try_connections(int(listener.getsockname()[1]))
        finally:
            for remote in self._remotes.values():
                remote.hang_up()
            self._loop.run_until(lambda: all(each.finished for each in self._remotes.values()))
        if self._signal:
            return 128 + self._signal
        show("\n".join(printable(f"{host.name}: {self._line(host)}") for host in self._job.hosts))
        return next((self._errors[host.name].code for host in self._job.hosts if host.name in self._errors), 0)

    def _on_signal(self, number: int) -> None:
        self._signal = number

    def _connect(self) -> None:
        """Starts an agent on every other host and reads its host info."""
        for host in self._job.hosts:
            if not is_local(host):
                self._remotes[host.name] = RemoteHost(self._loop, host, lambda _event: None, lambda: None)
        try:
            for remote in self._remotes.values():
                command = remote.connect(self._launcher, host_timeout_s=self._job.host_timeout_s)
                if self._job.output.verbose and sys.stderr is not None:
                    sys.stderr.write(printable(f"hororun: {remote.host.name}: {shlex.join(command)}") + "\n")
        except JobError:
            started = {name: each for name, each in self._remotes.items() if each.connected}
            self._remotes = started
            raise
        self._wait(lambda remote: remote.host_info is not None)
        for name, remote in self._remotes.items():
            error = next(iter(explain_absence([remote], self._launcher, self._job.start_timeout_s)), None)
            try:
                if error is None:
                    self._routes[name] = find_addresses(name, remote.host_info or {}, self._job.interfaces)
            except JobError as fault:
                error = fault
            if error is not None:
                self._errors[name] = error

    def _wait(self, answered: Callable[[RemoteHost], bool]) -> None:
        over: list[bool] = []
        timer = self._loop.call_later(self._job.start_timeout_s, lambda: over.append(True))
        self._loop.run_until(
            lambda: bool(over or self._signal) or all(answered(each) or each.error for each in self._remotes.values())
        )
        timer.cancel()

    def _ask(self, kind: Kind, answer: Kind, values: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Sends each of these hosts its values; returns the answers. A host that gives none has an error then."""
        for name, value in values.items():
            self._remotes[name].ask(kind, value)
        self._wait(lambda remote: remote.host.name not in values or answer in remote.answers)
        answers = {}
        for name in values:
            remote = self._remotes[name]
            if answer in remote.answers:
                answers[name] = remote.answers[answer]
            else:
                silent = JobError(f"no answer within {self._job.start_timeout_s:g} s", EXIT_UNREACHABLE)
                self._errors[name] = remote.error or silent
        return answers

    def _try_connections(self, port: int) -> None:
        """Lets every host connect to every other one, and to this one, where hororun's key-value server would be."""
        ports = [self._job.ports[0], self._job.ports[-1]] if self._job.ports else None
        question = {"cwd": str(Path.cwd()), "interfaces": list(self._job.interfaces), "ports": ports}
        well = [name for name in self._remotes if name not in self._errors]
        listening = self._ask(Kind.LISTEN, Kind.LISTENING, dict.fromkeys(well, question))
        for name, answer in list(listening.items()):
            if answer["error"]:
                self._errors[name] = JobError(str(answer["error"]), int(answer["code"]))
                del listening[name]
        endpoints = {
            name: [(address, int(answer["port"])) for address in answer["addresses"] or [self._routes[name].host]]
            for name, answer in listening.items()
        }
        peers = {
            name: {
                **{other: where for other, where in endpoints.items() if other != name},
                self._own_name: [(address, port) for address in self._routes[name].launcher],
            }
            for name in endpoints
        }
        questions = {name: {"peers": value, "timeout_s": _CONNECT_S} for name, value in peers.items()}
        for name, answer in self._ask(Kind.REACH, Kind.REACHED, questions).items():
            self._note(name, answer["failures"])
        own = next((host.name for host in self._job.hosts if is_local(host)), None)
        if own is not None:
            self._note(own, unreachable(endpoints, _CONNECT_S))
            self._check_interfaces(own)

    @property
    def _own_name(self) -> str:
        return next((host.name for host in self._job.hosts if is_local(host)), _HERE)

    def _check_interfaces(self, own: str) -> None:
        if self._job.interfaces:
            try:
                interface_addresses(self._job.interfaces)
            except NetworkError as error:
                self._errors.setdefault(own, JobError(str(error), EXIT_UNREACHABLE))

    def _note(self, name: str, failures: Mapping[str, str]) -> None:
        if failures:
            reasons = "; ".join(f"{peer} ({reason})" for peer, reason in failures.items())
            self._errors.setdefault(name, JobError(f"cannot connect to {reasons}", EXIT_UNREACHABLE))

    def _line(self, host: HostSpec) -> str:
        if host.name in self._errors:
            return str(self._errors[host.name])
        remote = self._remotes.get(host.name)
        facts = host_facts() if remote is None else remote.host_info or {}
        gpus = f", {facts['gpus']} GPU{'s' if facts['gpus'] != 1 else ''}" if facts["gpus"] else ""
        where = self._routes[host.name].host if remote is not None else "this host"
        cores = f"{facts['cores']} core{'s' if facts['cores'] != 1 else ''}"
        return f"ok: horo {facts['version']}, Python {facts['python']}, {cores}{gpus}, {where}"


def _listen(ports: range | None) -> socket.socket:
    try:
        return listen(ports)
    except NetworkError as error:
        raise JobError(str(error), EXIT_SETUP) from None
