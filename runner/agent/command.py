"""The command of the ranks: a program, a Python script or a module, its environment, and why a host cannot start it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = [
    "EXIT_NOT_EXECUTABLE",
    "EXIT_NOT_FOUND",
    "StartError",
    "explain_failure",
    "is_for_python",
    "with_python",
    "without",
]

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


class StartError(Exception):
    """The command cannot be started; ``code`` is the exit code of a shell for it (126 or 127)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def is_for_python(command: Sequence[str]) -> bool:
    """Whether the command names a Python script, ``train.py``, or a module, ``-m package.train``."""
    return command[0] == "-m" or command[0].endswith(".py")


def with_python(command: Sequence[str], cwd: str, path: str, host: str) -> list[str]:
    """The command with the Python of this process before a script or a module; any other is left as it is.

    A script runs under this Python whatever its #! line says: that one often finds a Python without horo. A name that
    is no file in the directory but a program in PATH is that program.

    Args:
        command: as the user gave it.
        cwd: where ranks start.
        path: their PATH.
        host: for messages.

    Raises:
        StartError: there is no such script.
    """
    name = command[0]
    if not is_for_python(command):
        return list(command)
    if name != "-m" and not Path(cwd, name).is_file():
        if "/" not in name and shutil.which(name, path=path) is not None:
            return list(command)
        if Path(cwd, name).is_dir():
            raise StartError(f"{name!r} on {host} is a folder: name a script or a program", EXIT_NOT_EXECUTABLE)
        where = "" if name.startswith("/") else f" in {cwd}"
        raise StartError(f"there is no script {name!r} on {host}{where}", EXIT_NOT_FOUND)
    return [sys.executable, *command]


def explain_failure(error: OSError, program: str, cwd: str, host: str) -> StartError:
    """The reason why ``program`` did not start, with the exit code that a shell would give."""
    path = Path(cwd, program)
    if path.is_dir():
        return StartError(f"{program!r} on {host} is a folder: name a script or a program", EXIT_NOT_EXECUTABLE)
    reasons = {
        errno.EACCES: f"{program!r} on {host} is not executable: 'chmod +x {program}', or write its interpreter first",
        errno.ENOEXEC: f"{program!r} on {host} is neither a program nor a script with a #! line",
    }
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        other = f"{program!r} cannot be started on {host}: {error.strerror}"
        return StartError(reasons.get(error.errno or 0, other), EXIT_NOT_EXECUTABLE)
    if not Path(cwd).is_dir():
        message = f"there is no directory {cwd} on {host}; start hororun from one that exists there"
    elif "/" not in program:
        message = f"command not found on {host}: {program!r} is in no folder of PATH there"
        if path.is_file():
            executable = "" if os.access(path, os.X_OK) else f" after 'chmod +x {program}'"
            message += f"; for the file in {cwd}, write ./{program}{executable}"
    elif Path(cwd, program).exists():
        message = f"{program!r} on {host} names an interpreter that does not exist (its #! line)"
    else:
        message = f"no such file on {host}: {program!r}"
    return StartError(message, EXIT_NOT_FOUND)


def without(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """``environment`` less the variables that match a pattern."""
    return {
        name: value
        for name, value in environment.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
