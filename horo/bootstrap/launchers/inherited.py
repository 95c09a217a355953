"""Refuses processes that inherit a launcher's variables from a rank: they would join the job as that rank again.

From its first ``init()`` on, a rank of several records its process and its places in a variable of its environment. A
place is a digest of the variables of one launcher. The rules for a process with such a record:

* The record names another process, and the places are those of this process's own variables: it is refused.
* A place differs, since a hororun, torchrun, mpirun or srun below a rank, or the user, has set it: the process takes
  that place and drops the inherited variables of the other launchers.
* The process has no launcher's variables, so no place: it is accepted.
* A rank that replaces its program by ``exec`` is still the same process.

A fork server that was started before ``init()`` has no record.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

from horo.bootstrap.launchers.slurm_step import is_lone_step
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.mpi.world import read_launcher_variable
from horo.config.table import (
    LaunchVariables,
    MpiVariables,
    SlurmVariables,
    TorchrunVariables,
    name_for_children,
    names_of,
    read_variables,
    variables_of,
)
from horo.errors import UsageError

__all__ = ["name_rank", "refuse_inherited"]

_PLACE = "[0-9a-f]+|-"
_MARK = re.compile(
    rf"rank=(\d+) process=(\d+) started=(\d+) hororun=({_PLACE}) torch=({_PLACE}) others=({_PLACE}) socket=(\d+)"
)
_JOBS_OF_MPI = ("PMIX_NAMESPACE", "PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID")
"""Variables that differ between two jobs of MPI. Other variables do not count: MPI itself adds some at its start, which
child processes inherit."""


class _Places(NamedTuple):
    """A digest, for each launcher, of the variables that set the place of a process; in order of precedence.

    ``-``: that launcher has set no place among several.
    """

    hororun: str
    torch: str
    others: str
    """Digest for MPI and Slurm."""


class _Rank(NamedTuple):
    """A rank as recorded in its environment."""

    rank: int
    process: int
    started: int
    """Start time in the kernel's ticks since boot, since process ids are reused."""
    places: _Places
    socket: int
    """Inode of the socket to an MPI's launcher, whose descriptor is in ``PMI_FD``; 0 without one."""


def refuse_inherited(environ: Mapping[str, str]) -> frozenset[str]:
    """Refuses a process that was started by a rank and has inherited that rank's place.

    Returns:
        Variables of that rank which are to be dropped, since another launcher has given this process a place.

    Raises:
        UsageError: it has no other place.
    """
    text = read_variables(LaunchVariables, environ).rank_process
    if text is None:
        return frozenset()
    found = _MARK.fullmatch(text)
    if found is None:
        name = variables_of(LaunchVariables)["rank_process"].names[0]
        raise UsageError(f"{name}={text!r} is not what init() writes there; unset it")
    rank, process, started, *places, connection = found.groups()
    named, own = _Rank(int(rank), int(process), int(started), _Places(*places), int(connection)), _own(0, environ)
    if (named.process, named.started) == (own.process, own.started):
        return frozenset()
    # hororun sets torch's variables too: they give no place to a program that was started without hororun's own
    is_of_hororun = named.places.hororun != "-" and own.places.torch == named.places.torch
    if not any(place != "-" for place in (own.places._replace(torch="-") if is_of_hororun else own.places)):
        return names_of(TorchrunVariables) if is_of_hororun else frozenset()
    if own.places.hororun not in ("-", named.places.hororun):
        return frozenset()
    if own.places.torch not in ("-", named.places.torch) and not _repeats_place(environ):
        return names_of(LaunchVariables)
    # MPICH's mpirun uses the same descriptor numbers in every job.
    is_elsewhere = own.places.others != named.places.others or own.socket not in (0, named.socket)
    if own.places.others != "-" and is_elsewhere:
        return names_of(LaunchVariables, TorchrunVariables)
    raise UsageError(
        f"init(): this process ({own.process}) was started by rank {named.rank} (process {named.process}), has "
        "inherited its environment and is not a rank itself; only the rank's own process can communicate. A worker "
        "of a DataLoader or of multiprocessing does not call init(): where it imports the script again, put what "
        "trains under if __name__ == '__main__'. To run another job from a rank, start it by hororun, which may be "
        "hororun -np 1"
    )


def name_rank(environ: Mapping[str, str], launch: Launch) -> None:
    """Records this rank in its environment, except in a job of one: any process may start one of those."""
    if launch.size > 1 or launch.ranks is not None:
        own = _own(launch.rank, environ)
        places = " ".join(f"{launcher}={place}" for launcher, place in own.places._asdict().items())
        name_for_children(f"rank={own.rank} process={own.process} started={own.started} {places} socket={own.socket}")


def _own(rank: int, environ: Mapping[str, str]) -> _Rank:
    return _Rank(rank, os.getpid(), _start_of_process(), _places(environ), _launcher_socket(environ))


def _places(environ: Mapping[str, str]) -> _Places:
    own, torch = variables_of(LaunchVariables), variables_of(TorchrunVariables)
    by_own = [name for field in ("rank", "store", "job_id") for name in own[field].names]
    # Not the local rank: training scripts set it themselves.
    by_torch = [torch[field].names[0] for field in ("rank", "world_size", "master_addr", "master_port")]
    by_torch += [torch[field].names[0] for field in ("run_id", "restart_count")]
    by_others = [*names_of(MpiVariables, SlurmVariables), *_JOBS_OF_MPI]
    return _Places(
        _digest(environ, by_own),
        _digest(environ, by_torch) if environ.get("RANK") and environ.get("WORLD_SIZE") else "-",
        _digest(environ, by_others) if _is_of_several(environ) else "-",
    )


def _is_of_several(environ: Mapping[str, str]) -> bool:
    """Whether an MPI or Slurm started this process as one of several."""
    by_mpi = read_launcher_variable(environ)
    if by_mpi is not None and by_mpi.size is not None:
        return True
    step = read_variables(SlurmVariables, environ)
    return (by_mpi is not None or None not in (step.step_id, step.procid)) and not is_lone_step(environ)


def _repeats_place(environ: Mapping[str, str]) -> bool:
    """Whether this is a worker of a script under hororun that has set torch's variables itself."""
    own, torch = read_variables(LaunchVariables, environ), read_variables(TorchrunVariables, environ)
    alike = (own.rank, own.size) == (torch.rank, torch.world_size)
    return alike and torch.run_id is None and parent_process() is not None


def _digest(environ: Mapping[str, str], names: list[str]) -> str:
    said = sorted((name, environ[name]) for name in set(names) if environ.get(name))
    text = repr(said).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=8).hexdigest() if said else "-"


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
