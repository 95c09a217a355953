"""The command of the ranks: why a host cannot start it."""

from __future__ import annotations

import errno
from pathlib import Path

__all__ = ["EXIT_NOT_EXECUTABLE", "EXIT_NOT_FOUND", "StartError", "explain_failure"]

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


class StartError(Exception):
    """The command cannot be started; ``code`` is what a shell would exit with (126 or 127)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def explain_failure(error: OSError, program: str, path: str, cwd: str, host: str) -> StartError:
    """Why ``program`` did not start, in the words of a shell's two exit codes."""
    hint = f"; did you mean: python {program}" if program.endswith(".py") else ""
    reasons = {
        errno.EACCES: f"{program!r} on {host} is not executable{hint}",
        errno.ENOEXEC: f"{program!r} on {host} is neither a program nor a script with a #! line",
    }
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        other = f"{program!r} cannot be started on {host}: {error.strerror}"
        return StartError(reasons.get(error.errno or 0, other), EXIT_NOT_EXECUTABLE)
    if not Path(cwd).is_dir():
        message = f"there is no directory {cwd} on {host}; start hororun from one that exists there"
    elif "/" not in program:
        message = f"command not found on {host}: {program!r} is nowhere in PATH={path}{hint}"
    elif Path(cwd, program).exists():
        message = f"{program!r} on {host} names an interpreter that does not exist (its #! line)"
    else:
        message = f"no such file on {host}: {program!r}{hint}"
    return StartError(message, EXIT_NOT_FOUND)
