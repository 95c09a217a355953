"""The ssh command for a remote host, and the explanation of its failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horo.runner.config import EXIT_UNREACHABLE, JobError, Ssh
from horo.runner.hosts import HostSpec
from horo.runner.start.remote_launcher import agent_command, explain_agent, lines_of

__all__ = ["SshLauncher"]

_SSH_FAILED = 255
_CONNECT_TIMEOUT_MAX_S = 10
_KEY_REFUSED = "Host key verification failed."


@dataclass(frozen=True)
class SshLauncher:
    """A ``RemoteLauncher``: one ssh per host.

    Attributes:
        ssh: the options of the user.
        python: the Python on remote hosts.
        start_timeout_s: seconds for all hosts to answer.
        host_timeout_s: silence after which a host is lost.
    """

    ssh: Ssh
    python: str
    start_timeout_s: float
    host_timeout_s: float
    name: str = "ssh"
    ends_on_sigterm: bool = False
    unset: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """See ``RemoteLauncher``."""
        return self.ssh.program

    def command(self, host: HostSpec) -> list[str]:
        """See ``RemoteLauncher``. Host keys are checked as the user's ssh is configured to."""
        alive_s = max(1, round(self.host_timeout_s / 3))
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, min(_CONNECT_TIMEOUT_MAX_S, round(self.start_timeout_s)))),
            "ServerAliveInterval": str(alive_s),
            "ServerAliveCountMax": "3",
            "ControlMaster": "no",  # use a master connection that is there, but leave none behind
        }
        command = [self.ssh.program, "-T"]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        port = host.port or self.ssh.port
        if port is not None:
            command += ["-p", str(port)]
        if self.ssh.identity_file is not None:
            command += ["-i", self.ssh.identity_file]
        target = f"{host.user}@{host.name}" if host.user is not None else host.name
        return [*command, *self.ssh.arguments, target, agent_command(self.python)]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """See ``RemoteLauncher``."""
        return dict(environ)

    def extra_variables(self, _environ: Mapping[str, str]) -> dict[str, str]:
        """See ``RemoteLauncher``."""
        return {}

    def trial_command(self, _host: str) -> str:
        """See ``RemoteLauncher``."""
        return "ssh"

    def cause(self, lines: Sequence[str]) -> str:
        """See ``RemoteLauncher``: the last line that is no warning."""
        said = [line for line in lines if not re.match(r"(Warning: |\*\* )", line)]
        return said[-1] if said else ""

    def explain_failure(self, host: str, code: int, stderr: bytes) -> JobError:
        """See ``RemoteLauncher``."""
        lines = lines_of(stderr)
        last = self.cause(lines).removeprefix("ssh: ") or f"no message, exit code {code}"
        if code == _SSH_FAILED:
            remedy = _about_host_key(host, lines) if last == _KEY_REFUSED else ""
            return JobError(f"cannot reach host {host}: ssh: {last}{remedy}", EXIT_UNREACHABLE)
        return explain_agent(host, self.python, code, last)


def _about_host_key(host: str, lines: Sequence[str]) -> str:
    """The way out: ssh ends in the same words where it knows no key of the host and where it knows another one."""
    offending = [found for found in (re.fullmatch(r"Offending .*key.* in (.+):(\d+)", line) for line in lines) if found]
    if offending:
        return (
            f" The host has another key than line {offending[0][2]} of {offending[0][1]} says: remove that line if the "
            "host was set up anew; else another machine answers in its place"
        )
    return f" Its key is not known here: connect once by hand, ssh {host}"
