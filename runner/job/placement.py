"""Chooses the host of each rank: hosts are filled in order or share the ranks evenly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from horo.runner.agent.machine import core_count, visible_gpus
from horo.runner.config import EXIT_SETUP, Job, JobError
from horo.runner.hosts import HostSpec
from horo.runner.network import is_local
from horo.runner.processes import ask
from horo.runner.start.remote_launcher import RemoteLauncher
from horo.runner.start.srun import SrunLauncher, knows_overlap
from horo.runner.start.ssh import SshLauncher

__all__ = [
    "Placement",
    "PlacementError",
    "candidates",
    "count_ranks",
    "explain_idle_hosts",
    "place",
    "remote_launcher_of",
    "slots_of",
]


class PlacementError(ValueError):
    """The ranks do not fit; the message names both numbers."""


@dataclass(frozen=True)
class Placement:
    """The place of one rank.

    Attributes:
        rank: 0 to ``size - 1``.
        size: ranks in the job.
        local_rank: 0 to ``local_size - 1`` on its host.
        local_size: ranks on its host.
        cross_rank: index of its host among the hosts that have this local rank.
        cross_size: how many hosts have this local rank.
        host: index of its host in the list given to :func:`place`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: int


def place(
    slots: Sequence[int],
    size: int,
    *,
    evenly: bool = False,
    oversubscribe: bool = False,
    most: Sequence[int | None] = (),
    source: str = "",
) -> tuple[Placement, ...]:
    """Places ``size`` ranks on hosts that have ``slots`` each.

    Hosts are filled in order; ``evenly``: all get as many, as far as their slots allow, the first ones one more. With
    ``oversubscribe``, ranks beyond the last slot are dealt to the hosts in turn, up to ``most`` for each (None: any
    number). Hosts that get no rank are left out of every count. ``source`` names the origin of the slots, for the
    message.

    Raises:
        PlacementError: there are more ranks than slots, or no rank, or no host.
    """
    if size < 1:
        raise PlacementError(f"-np {size}: at least one rank is needed")
    if not slots or min(slots) < 1:
        raise PlacementError("every host needs at least one slot")
    if size > sum(slots) and not oversubscribe:
        there = f"there {'is 1 slot' if sum(slots) == 1 else f'are {sum(slots)} slots'}"
        raise PlacementError(
            f"-np {size} asks for {size} rank{'s' if size > 1 else ''} but {there}{source and f' {source}'}: "
            "name more slots with -H or --hostfile, or allow it with --oversubscribe"
        )
    counts = _share_evenly(slots, size) if evenly else _fill(slots, size)
    rooms = [size if limit is None else limit - count for count, limit in zip_longest(counts, most)]
    counts = [count + more for count, more in zip(counts, _share_evenly(rooms, size - sum(counts)), strict=True)]
    if size > sum(counts):
        raise PlacementError(f"-np {size} asks for {size} ranks but max_slots allows {sum(counts)}: name more hosts")
    placed: list[Placement] = []
    for host, count in enumerate(counts):
        for local_rank in range(count):
            columns = [other for other, others in enumerate(counts) if others > local_rank]
            placed.append(
                Placement(len(placed), size, local_rank, count, columns.index(host), len(columns), host),
            )
    return tuple(placed)


def _fill(slots: Sequence[int], size: int) -> list[int]:
    counts = []
    left = size
    for available in slots:
        counts.append(min(available, left))
        left -= counts[-1]
    return counts


def _share_evenly(slots: Sequence[int], size: int) -> list[int]:
    counts = [0] * len(slots)
    left = size
    while left and (free := [host for host, available in enumerate(slots) if counts[host] < available]):
        share, first = divmod(left, len(free))
        for host in free if share else free[:first]:
            more = min(share or 1, slots[host] - counts[host])
            counts[host] += more
            left -= more
    return counts


def remote_launcher_of(job: Job, environment: Mapping[str, str]) -> RemoteLauncher:
    """The launcher that starts agents on other hosts.

    Raises:
        JobError: there is no srun, and it is needed.
    """
    if job.launcher != "slurm":
        return SshLauncher(job.ssh, job.python, job.start_timeout_s, job.host_timeout_s)
    launcher = SrunLauncher(job.python)
    if job.hosts and all(is_local(host) for host in job.hosts):
        return launcher
    try:
        version = ask([launcher.program, "--version"], environment, job.start_timeout_s)
    except OSError as error:  # TimeoutError is one
        raise JobError(
            f"--launcher slurm: srun cannot be started: {error.strerror or error}; is Slurm's folder in PATH?",
            EXIT_SETUP,
        ) from error
    return replace(launcher, overlap=knows_overlap(version))


def slots_of(host: HostSpec, size: int, cores: int, gpus: int) -> int:
    """The number of ranks that a host takes: its slots; if none were given, its GPUs, or its cores if it has no GPU.

    Args:
        host: as it was named.
        size: the number of ranks; 0: not given.
        cores: of the host.
        gpus: of the host.

    Raises:
        JobError: neither slots nor a size is given, and there is no GPU; cores do not count.
    """
    if host.slots is not None:
        return host.slots
    if not size and not gpus:
        has_none = "" if is_local(host) else f"; {host.name} has no GPU, for which there would be one each"
        raise JobError(f"how many ranks? say -np N{has_none} (try 'hororun --help')")
    return gpus or max(1, cores)


def count_ranks(hosts: Sequence[HostSpec], environment: Mapping[str, str]) -> int:
    """The number of ranks where nobody has said it: one for each slot, or for each GPU of a host without slots.

    Returns:
        The number; 0: hosts have to be asked.

    Raises:
        JobError: this host has no GPU.
    """
    gpus = len(visible_gpus(environment))
    if any(host.slots is None and not is_local(host) for host in hosts):
        return 0
    return sum(slots_of(host, 0, core_count(), gpus) for host in hosts)


def candidates(job: Job, environment: Mapping[str, str]) -> list[HostSpec]:
    """The hosts that may get a rank, in order; of remote ones, slots may still be unknown.

    All of them, where the number of ranks is not known, or may change.

    Raises:
        JobError: the slots are known and too few.
    """
    gpus = len(visible_gpus(environment))
    source = f"in the {job.hosts_from}" if job.hosts_from else ""
    if [host.slots for host in job.hosts] == [None]:
        source = f"on {job.hosts[0].name}, one for each {'GPU' if gpus else 'core'}"
    hosts = [
        replace(host, slots=slots_of(host, job.size, core_count(), gpus))
        if host.slots is None and is_local(host)
        else host
        for host in job.hosts
    ]
    if job.elastic is not None:
        return hosts
    if all(host.slots is not None for host in hosts):
        try:
            placements = place(
                [host.slots or 0 for host in hosts],
                job.size,
                evenly=job.shares_evenly,
                oversubscribe=job.oversubscribe,
                most=[host.max_slots for host in hosts],
                source=source,
            )
        except PlacementError as error:
            raise JobError(str(error)) from None
        return hosts[: placements[-1].host + 1]
    if not job.size:
        return hosts
    if job.shares_evenly:
        return hosts[: job.size]
    needed: list[HostSpec] = []
    for host in hosts:
        needed.append(host)
        if sum(each.slots or 1 for each in needed) >= job.size and not job.oversubscribe:
            break
    return needed


def explain_idle_hosts(job: Job, used: Iterable[str]) -> str:
    """A sentence about hosts that get no rank, where the user has given no number of slots; empty: all get one.

    Args:
        job: the job.
        used: names of the hosts that get one.
    """
    names = set(used)
    idle = [host.name for host in job.hosts if host.name not in names]
    if not idle or all(host.slots is not None for host in job.hosts):
        return ""
    why = (
        "there are more hosts than ranks"
        if job.shares_evenly
        else "the hosts named before have slots for all; say how many ranks each may have, like -H h1:2,h2:2"
    )
    return f"no rank runs on {', '.join(idle)}: {why}"
