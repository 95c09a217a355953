"""Processes that a rank starts inherit its launcher's variables: they are refused, or they would be that rank again.

The rule: from its first ``init()`` on, a rank of several names itself in its environment, with its place in the job. A
process that finds there another process with the place that its own variables describe is not that rank. Who was given
a place of its own (by a hororun, torchrun, mpirun or srun that a rank has started) has other variables, and who was
started without a launcher's variables has no place: both are let in. A rank that replaces its program by ``exec`` is
still the same process. A fork server that was started before ``init()`` does not know of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from horo._bootstrap.launch import Launch
from horo._config import (
    LaunchVariables,
    MpiVariables,
    SlurmVariables,
    TorchrunVariables,
    name_for_children,
    read_variables,
    variables_of,
)
from horo.errors import UsageError

__all__ = ["name_rank", "refuse_inherited"]

_MARK = re.compile(r"rank=(\d+) process=(\d+) started=(\d+) place=([0-9a-f]+) socket=(\d+)")
_JOBS_OF_MPI = ("PMIX_NAMESPACE", "PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID")
"""What differs between two jobs of MPI. Not all that a launcher sets: MPI itself adds variables when it begins, which
its children inherit."""


class _Rank(NamedTuple):
    """A rank as its environment names it."""

    rank: int
    process: int
    started: int
    """When, in the kernel's ticks since it was booted: process ids come again."""
    place: str
    """A digest of the variables that give a process its place."""
    socket: int
    """Inode of the connection to an MPI's launcher whose number ``PMI_FD`` says; 0: none is open."""


def refuse_inherited(environ: Mapping[str, str]) -> None:
    """Refuses a process that was started by a rank and has inherited that rank's place.

    Raises:
        UsageError: it is one.
    """
    text = read_variables(LaunchVariables, environ).rank_process
    if text is None:
        return
    found = _MARK.fullmatch(text)
    if found is None:
        name = variables_of(LaunchVariables)["rank_process"].names[0]
        raise UsageError(f"{name}={text!r} is not what init() writes there; unset it")
    rank, process, started, place, connection = found.groups()
    named, own = _Rank(int(rank), int(process), int(started), place, int(connection)), _own(0, environ)
    if (named.process, named.started) == (own.process, own.started) or named.place != own.place:
        return
    if own.socket not in (0, named.socket):
        return  # MPICH's mpirun numbers descriptors alike in every job
    raise UsageError(
        f"init(): this process ({own.process}) was started by rank {named.rank} (process {named.process}), has "
        "inherited its environment and is not a rank itself; only the rank's own process can communicate. A worker "
        "of a DataLoader or of multiprocessing does not call init(): where it imports the script again, put what "
        "trains under if __name__ == '__main__'. To run another job from a rank, start it by hororun, which may be "
        "hororun -np 1"
    )


def name_rank(environ: Mapping[str, str], launch: Launch) -> None:
    """Names this process, a rank, in its environment; a job of one needs no place and may be begun by anybody."""
    if launch.size > 1 or launch.ranks is not None:
        own = _own(launch.rank, environ)
        name_for_children(
            f"rank={own.rank} process={own.process} started={own.started} place={own.place} socket={own.socket}"
        )


def _own(rank: int, environ: Mapping[str, str]) -> _Rank:
    return _Rank(rank, os.getpid(), _start_of_process(), _place(environ), _launcher_socket(environ))


def _place(environ: Mapping[str, str]) -> str:
    """Of the launcher that counts: a script may hide the variables of the others from a library, by removing them."""
    own = [name for field in ("rank", "store", "job_id") for name in variables_of(LaunchVariables)[field].names]
    torchrun = [variable.names[0] for variable in variables_of(TorchrunVariables).values()]
    others = [
        variable.names[0] for group in (MpiVariables, SlurmVariables) for variable in variables_of(group).values()
    ]
    if any(environ.get(name) for name in own):
        names = own
    elif environ.get("RANK"):
        names = torchrun
    else:
        names = [*others, *_JOBS_OF_MPI]
    said = sorted((name, environ[name]) for name in set(names) if environ.get(name))
    return hashlib.blake2b(repr(said).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _start_of_process() -> int:
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _launcher_socket(environ: Mapping[str, str]) -> int:
    try:
        status = os.fstat(int(environ.get("PMI_FD", "")))
    except (OSError, ValueError, OverflowError):
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0
