"""Makes the log lines about a job that has started: one for the job, one for each rank. Pure functions."""

from __future__ import annotations

from horo.bootstrap.host.grouping import Grouping
from horo.bootstrap.launchers.variables import Launch, Place
from horo.bootstrap.tuned_values import overlap_pays
from horo.core.setup import Setup
from horo.version import __version__

__all__ = ["describe_gradients", "describe_job", "describe_rank"]

_HOSTS_MAX = 8


def describe_job(setup: Setup, launch: Launch, core: str, simd: str, gradients: str = "") -> str:
    """Version, size, hosts, launcher and transport of the data.

    Args:
        setup: the setup of any rank.
        launch: the launch of the job.
        core: version of the native core.
        simd: instruction set of the core.
        gradients: a phrase about them, by ``describe_gradients``.
    """
    launcher = {"none": "nobody", "mpi": "MPI", "slurm": "Slurm"}.get(launch.kind, launch.kind)
    ranks = "1 rank"
    if setup.size > 1:
        hosts = Grouping(tuple(setup.host_of_rank)).hosts
        named = [f"{setup.host_name_of_rank[members[0]]}: {len(members)}" for members in hosts[:_HOSTS_MAX]]
        named += [f"{len(hosts) - _HOSTS_MAX} more"] if len(hosts) > _HOSTS_MAX else []
        ranks = f"{_count(setup.size, 'rank')} on {_count(len(hosts), 'host')} ({', '.join(named)})"
    return f"horo {__version__} (core {core}, {simd}): {ranks}, started by {launcher}; {_data(setup)}{gradients}"


def _data(setup: Setup) -> str:
    if setup.size == 1:
        return "no data travels"
    counts = [len(members) for members in Grouping(tuple(setup.host_of_rank)).hosts]
    here = ["in shared memory on a host" if len(counts) > 1 else "in shared memory"] if max(counts) > 1 else []
    streams = f", {setup.sockets_per_peer} connections for each pair" if setup.sockets_per_peer > 1 else ""
    by = "MPI" if setup.mpi is not None else f"TCP{streams}"
    there = [f"by {by} between hosts"] if len(counts) > 1 else []
    return f"data {', '.join(here + there)}"


def describe_gradients(setup: Setup, overlap: str, threads: int, cores: int) -> str:
    """The words for when gradients travel; empty if they do not.

    Args:
        setup: the setup of any rank.
        overlap: the value of ``HORO_OVERLAP``.
        threads: those with which each rank computes.
        cores: cores of the host.
    """
    if setup.size == 1:
        return ""
    hosts = Grouping(tuple(setup.host_of_rank)).hosts
    if overlap_pays(overlap, len(hosts), setup.size * threads, cores):
        return ", gradients during backward"
    return f", gradients{' in host memory' if overlap == 'auto' else ''} after backward"


def describe_rank(setup: Setup, place: Place, process: int, cores: int, seconds: float) -> str:
    """The place of a rank, its cores and its segments.

    Args:
        setup, place: setup and place of the rank.
        process: id of its process.
        cores: number of cores on its host, for all ranks there.
        seconds: duration of its start.
    """
    host = setup.host_name_of_rank[setup.rank]
    return (
        f"rank {setup.rank} of {setup.size} on {host}, process {process}: local rank {place.local_rank} of "
        f"{place.local_size}, cross rank {place.cross_rank} of {place.cross_size}, "
        f"{_count(cores, 'core')} of this host, segments of {setup.segment_bytes >> 10} KiB, "
        f"joined in {seconds * 1000:.0f} ms"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
