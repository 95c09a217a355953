"""Hosts and launcher of a job, where the command line leaves them open."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from horo.runner.config import JobError
from horo.runner.hosts import HostSpec
from horo.runner.start.allocation import Allocation, AllocationError, find_allocation

__all__ = ["allocated", "choose_launcher"]

Find = Callable[[str], str | None]
"""A function from the name of a program to its path in PATH, None: it is not there."""


def allocated(environ: Mapping[str, str], *, named: bool) -> Allocation | None:
    """The allocation that this job has from a batch system; None: it has none.

    Args:
        environ: of this process.
        named: whether the user has named hosts, so that an allocation that cannot be understood does no harm.

    Raises:
        JobError: the allocation cannot be understood, and is needed.
    """
    try:
        return find_allocation(environ, _read)
    except AllocationError as error:
        if named:
            return None
        raise JobError(str(error)) from None


def choose_launcher(
    asked: str, hosts: Sequence[HostSpec], allocation: Allocation | None, find: Find = shutil.which
) -> str:
    """The launcher for ``--launcher asked``: never ``"auto"``.

    Within a Slurm job, ``auto`` is srun for hosts that belong to it; within an LSF job, jsrun where that exists and
    the hosts are those of the job; else ssh.

    Raises:
        JobError: the launcher that was asked for does not work here.
    """
    system = allocation.system if allocation is not None else ""
    given = {host.name for host in allocation.hosts} if allocation is not None else set()
    if asked == "auto":
        plain = all(host.user is None and host.port is None for host in hosts)
        inside = plain and all(host.name in given or host.name == "localhost" for host in hosts)
        if system == "Slurm" and inside and find("srun"):
            return "slurm"
        if allocation is not None and system == "LSF" and tuple(hosts) == allocation.hosts and find("jsrun"):
            return "jsrun"
        return "ssh"
    if asked == "slurm":
        _check_slurm(hosts, system)
    if asked == "jsrun":
        _check_jsrun(hosts, allocation, find)
    return asked


def _check_slurm(hosts: Sequence[HostSpec], system: str) -> None:
    if system != "Slurm":
        raise JobError(
            "--launcher slurm: this is no Slurm job (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set): get one with "
            "salloc or sbatch, or leave the option out"
        )
    for host in hosts:
        if host.user is not None or host.port is not None:
            raise JobError(f"--launcher slurm: host {host.name} is named with a user or a port, which only ssh knows")


def _check_jsrun(hosts: Sequence[HostSpec], allocation: Allocation | None, find: Find) -> None:
    if allocation is None or allocation.system != "LSF":
        raise JobError("--launcher jsrun: this is no LSF job (LSB_JOBID and its hosts are not set): get one with bsub")
    if tuple(hosts) != allocation.hosts:
        raise JobError("--launcher jsrun: jsrun takes the hosts of the LSF job: leave out -H and --hostfile")
    if find("jsrun") is None:
        raise JobError("--launcher jsrun: there is no jsrun in PATH; --launcher ssh and mpi do without")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
