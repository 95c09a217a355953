"""The output of ``--dry-run``: the place of each rank, and the commands that start agents on other hosts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from horo.config.hosts import ranges
from horo.runner.agent.command import StartError, is_for_python, with_python
from horo.runner.agent.machine import BindingError, bind, bind_gpus, read_topology, spelled, spelled_gpus, visible_gpus
from horo.runner.config import EXIT_SETUP, Job, JobError
from horo.runner.job.host_addresses import check_interfaces
from horo.runner.job.placement import candidates, place, remote_launcher_of
from horo.runner.network import is_local

__all__ = ["dry_run"]


def dry_run(job: Job, environment: Mapping[str, str]) -> str:
    """Lines for stdout.

    Raises:
        JobError: the job could not be started as it is asked for.
    """
    check_interfaces(job.interfaces)
    if job.elastic is not None and job.elastic.is_discovered:
        lines = [f"hosts as --host-discovery-script prints them: {job.elastic.script}"]
        return "\n".join([*lines, *_commands(job, {True, False}, environment)])
    hosts = candidates(job, environment)
    launcher = remote_launcher_of(job, environment)
    lines = [f"hosts from the {job.hosts_from}"] if job.hosts_from else []
    if all(host.slots is not None for host in hosts):
        counts = [host.slots or 0 for host in hosts]
        most = [host.max_slots for host in hosts]
        placements = place(counts, job.size, evenly=job.shares_evenly, oversubscribe=job.oversubscribe, most=most)
        by_host = {index: [each.rank for each in placements if each.host == index] for index in range(len(hosts))}
    else:
        by_host = {}
        lines.append("how the ranks are shared out depends on the hosts: some have to be asked for their slots")
    for index, host in enumerate(hosts):
        ranks = by_host.get(index, [])
        ranks_and_host = (
            f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} on {host.name}" if ranks else f"on {host.name}"
        )
        lines.append(
            f"{ranks_and_host}: {'started directly' if is_local(host) else shlex.join(launcher.command(host))}"
        )
    here = [by_host.get(index, []) for index, host in enumerate(hosts) if is_local(host)]
    lines += _bindings(job, here, len(hosts), environment)
    return "\n".join([*lines, *_commands(job, {is_local(host) for host in hosts}, environment)])


def _bindings(job: Job, here: Sequence[Sequence[int]], host_count: int, environment: Mapping[str, str]) -> list[str]:
    """The bindings of ranks; ``here``: the ranks of each host that is this one."""
    bound: list[tuple[int, str]] = []
    what: list[str] = []
    try:
        if job.bind_to != "none":
            what.append("cores" if job.bind_to == "core" else "NUMA nodes")
            for ranks in here:
                cpus = bind(job.bind_to, ranks, os.sched_getaffinity(0), read_topology())
                bound += [(rank, spelled(each)) for rank, each in cpus.items()]
        if job.bind_gpus:
            what.append("GPUs")
            gpus = visible_gpus({**environment, **job.exports}) if here else []
            for ranks in here:
                bound += [(rank, spelled_gpus(each)) for rank, each in bind_gpus(ranks, gpus).items()]
    except BindingError as error:
        raise JobError(str(error), EXIT_SETUP) from None
    lines = [f"rank {rank} is bound to {units}" for rank, units in bound]
    is_elsewhere = bool(what) and (len(here) < host_count or not any(here))
    return lines + [f"each rank elsewhere is bound to its share of the {units} there" for units in what if is_elsewhere]


def _commands(job: Job, local: set[bool], environment: Mapping[str, str]) -> list[str]:
    """The command of each rank; ``local``: whether there are hosts that are this one, and others."""
    elsewhere = shlex.join([job.python, *job.command] if is_for_python(job.command) else job.command)
    if True not in local:
        return [f"each rank: {elsewhere}"]
    try:
        path = environment.get("PATH", os.defpath)
        here = shlex.join(with_python(job.command, str(Path.cwd()), path, "this host"))
    except StartError as error:
        raise JobError(str(error), error.code) from None
    if local == {True} or here == elsewhere:
        return [f"each rank: {here}"]
    return [f"each rank here: {here}", f"each rank elsewhere: {elsewhere}"]
