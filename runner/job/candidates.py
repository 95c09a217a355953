"""Before anything is started: which hosts may get a rank, and how the agents on them are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from horo.runner.agent.machine import core_count, default_slots, gpu_count
from horo.runner.config import EXIT_SETUP, Job, JobError
from horo.runner.hosts import Host
from horo.runner.job.placement import PlacementError, place
from horo.runner.network import is_local
from horo.runner.processes import ask
from horo.runner.start.remote_launcher import LaunchMethod
from horo.runner.start.srun import SrunLaunchMethod, knows_overlap
from horo.runner.start.ssh import SshLaunchMethod

__all__ = ["candidates", "launch_method_of"]


def launch_method_of(job: Job, environment: Mapping[str, str]) -> LaunchMethod:
    """How agents are started on other hosts.

    Raises:
        JobError: there is no srun, and it is needed.
    """
    if job.launcher != "slurm":
        return SshLaunchMethod(job.ssh, job.python, job.start_timeout_s, job.host_timeout_s)
    method = SrunLaunchMethod(job.python)
    if all(is_local(host) for host in job.hosts):
        return method
    try:
        version = ask([method.program, "--version"], environment, job.start_timeout_s)
    except OSError as error:  # TimeoutError is one
        raise JobError(
            f"--launcher slurm: srun cannot be started: {error.strerror or error}; is Slurm's folder in PATH?",
            EXIT_SETUP,
        ) from error
    return replace(method, overlap=knows_overlap(version))


def candidates(job: Job, environment: Mapping[str, str]) -> list[Host]:
    """The hosts that may get a rank, in order; of remote ones, slots may still be unknown.

    Raises:
        JobError: the slots are known and too few.
    """
    here = default_slots(core_count(), gpu_count(environment))
    hosts = [replace(host, slots=here) if host.slots is None and is_local(host) else host for host in job.hosts]
    if all(host.slots is not None for host in hosts):
        try:
            slots = place(
                [host.slots or 0 for host in hosts],
                job.size,
                evenly=job.shares_evenly,
                oversubscribe=job.oversubscribe,
                source=job.hosts_from,
            )
        except PlacementError as error:
            raise JobError(str(error)) from None
        return hosts[: slots[-1].host + 1]
    if job.shares_evenly:
        return hosts[: job.size]
    needed: list[Host] = []
    for host in hosts:
        needed.append(host)
        if sum(each.slots or 1 for each in needed) >= job.size and not job.oversubscribe:
            break
    return needed
