"""The one ssh command per remote host, and what it means when it fails. Pure."""

from __future__ import annotations

import re
import shlex

from horo.runner.config import EXIT_INTERNAL, EXIT_SETUP, EXIT_UNREACHABLE, JobError, Ssh
from horo.runner.hosts import Host

__all__ = ["explain_silence", "ssh_command"]

_SSH_FAILED = 255
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_CONNECT_TIMEOUT_MAX_S = 10


def ssh_command(host: Host, ssh: Ssh, *, start_timeout_s: float, host_timeout_s: float) -> list[str]:
    """The command that runs the agent on ``host``. It holds no secret: those go over the agent's stdin.

    The agent starts in ``/``, so that no directory of the user's home can stand in for the installed horo. Host keys
    are checked as the user's ssh is configured to.
    """
    alive_s = max(1, round(host_timeout_s / 3))
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, min(_CONNECT_TIMEOUT_MAX_S, round(start_timeout_s)))),
        "ServerAliveInterval": str(alive_s),
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",  # use a master connection that is there, but leave none behind
    }
    command = [ssh.program, "-T"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    port = host.port or ssh.port
    if port is not None:
        command += ["-p", str(port)]
    if ssh.identity_file is not None:
        command += ["-i", ssh.identity_file]
    target = f"{host.user}@{host.name}" if host.user is not None else host.name
    return [*command, *ssh.arguments, target, f"cd / && exec {shlex.quote(ssh.python)} -m horo.runner.agent"]


def explain_silence(host: str, ssh: Ssh, code: int, stderr: bytes) -> JobError:
    """Why ssh ended with ``code`` before the agent said anything.

    Args:
        host: its name as the user gave it.
        ssh: how it was reached.
        code: exit code of the ssh program, 128 + n for a signal.
        stderr: what it and the remote side wrote.
    """
    lines = [line for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].strip().removeprefix("ssh: ") if lines else f"no message, exit code {code}"
    if code == _SSH_FAILED:
        return JobError(f"cannot reach host {host}: ssh says: {last}", EXIT_UNREACHABLE)
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        problem = "there is no" if code == _NOT_FOUND else "cannot execute"
        return JobError(
            f"host {host}: {problem} {ssh.python}: install Python and horo there, or name its Python with "
            f"--remote-python ({last})",
            EXIT_SETUP,
        )
    missing = re.search(r"No module named '?([\w.]+)", last)
    if missing is not None:
        return JobError(
            f"host {host}: {ssh.python} has no module {missing[1]}: install horo there, or name another Python with "
            "--remote-python",
            EXIT_SETUP,
        )
    return JobError(f"host {host}: the agent ended with code {code}: {last}", EXIT_INTERNAL)
