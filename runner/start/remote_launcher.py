"""Remote launchers start the agent on another host. Each is data and pure functions; ``remote`` runs its command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Protocol

from horo.runner.config import EXIT_INTERNAL, EXIT_SETUP, JobError
from horo.runner.hosts import HostSpec
from horo.runner.text import printable

__all__ = ["RemoteLauncher", "agent_command", "explain_agent", "lines_of"]

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


class RemoteLauncher(Protocol):
    """One command per host whose stdin and stdout become those of the agent there."""

    @property
    def name(self) -> str:
        """For messages: ``ssh``, ``srun``."""

    @property
    def program(self) -> str:
        """The program that is executed here."""

    @property
    def ends_on_sigterm(self) -> bool:
        """Whether SIGTERM to the command here also ends the agent there; else the command is killed, which closes the
        pipes of the agent."""

    @property
    def unset(self) -> tuple[str, ...]:
        """Patterns of variables that ranks must not take over from the agent."""

    def command(self, host: HostSpec) -> list[str]:
        """The command. It holds no secret: those go over the agent's stdin."""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of the command."""

    def extra_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables of this environment for the ranks there, besides those that all remote ranks get."""

    def trial_command(self, host: str) -> str:
        """The command with which a user can test it by hand."""

    def cause(self, lines: Sequence[str]) -> str:
        """The line of the command's stderr with the reason for its end; empty: there is none."""

    def explain_failure(self, host: str, code: int, stderr: bytes) -> JobError:
        """The reason why the command ended with ``code`` (128 + n for a signal) before the agent sent its host info."""


def lines_of(stderr: bytes) -> list[str]:
    """The lines in it, printable, without those that are blank."""
    return [printable(line.strip()) for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]


def agent_command(python: str) -> str:
    """The agent's command, for a shell. It starts in ``/``, so that no folder of the user's home stands in for horo."""
    return f"cd / && exec {shlex.quote(python)} -m horo.runner.agent"


def explain_agent(host: str, python: str, code: int, last: str) -> JobError:
    """The reason why the agent, or the shell that was to start it, ended with ``code``; ``last``: its last line."""
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        problem = "there is no" if code == _NOT_FOUND else "cannot execute"
        return JobError(
            f"host {host}: {problem} {python}: install Python and horo there, or name its Python with "
            f"--remote-python ({last})",
            EXIT_SETUP,
        )
    missing = re.search(r"No module named '?([\w.]+)", last)
    if missing is not None:
        return JobError(
            f"host {host}: {python} has no module {missing[1]}: install horo there, or name another Python with "
            "--remote-python",
            EXIT_SETUP,
        )
    return JobError(f"host {host}: the agent ended with code {code}: {last}", EXIT_INTERNAL)
