"""Decides whether MPI carries the data between hosts, from the settings, the MPI's thread level and the hosts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from horo.bootstrap.host.grouping import Grouping
from horo.bootstrap.mpi.calls import mpi_calls
from horo.bootstrap.mpi.world import MpiWorld
from horo.config.table import Config
from horo.core.setup import MpiUse
from horo.errors import UsageError

__all__ = ["carries_data", "check_mpi", "mpi_use"]

_HOW = (
    "put mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI, or start MPI with "
    "MPI.Init_thread(MPI.THREAD_MULTIPLE)"
)


def check_mpi(config: Config, world: MpiWorld | None) -> None:
    """Raises UsageError if the settings require an MPI that this rank does not have, or may not use on threads."""
    if config.transport != "mpi":
        return
    told = config.told("transport")
    if world is None:
        raise UsageError(
            f"{told}, but the ranks of this job did not start through MPI; start it with mpirun or pass a communicator "
            "of mpi4py to init(comm=...), or do not set transport"
        )
    if not world.threads_multiple:
        raise UsageError(
            f"{told}, but {world.library} runs with {world.thread_level}, and horo calls MPI from a thread of its own: "
            f"{_HOW}"
        )


def carries_data(config: Config, world: MpiWorld | None, threads: Sequence[bool], grouping: Grouping) -> bool:
    """Whether MPI carries the data between hosts; the same on all ranks.

    Args:
        config: settings that are equal on all ranks and have passed ``check_mpi`` there.
        world: the communicator of this job; None if its ranks did not start through MPI.
        threads: by rank, whether MPI may be called from any thread.
        grouping: the hosts of the job.
    """
    if world is None or len(grouping.hosts) == 1 or config.transport == "tcp":
        return False
    if all(threads):
        return True
    if world.rank == 0:
        logging.getLogger("horo").warning(
            "data between hosts travels by TCP, not by %s, which runs with %s: %s; HORO_TRANSPORT=tcp silences this",
            world.library,
            world.thread_level,
            _HOW,
        )
    return False


def mpi_use(world: MpiWorld, rank: int, grouping: Grouping) -> MpiUse:
    """The MPI that carries the data between hosts, in the form of the core's input.

    Raises:
        ResourceError: the MPI lacks something that horo needs; names it.
    """
    own, index = grouping.host_of_rank[rank], grouping.local_index(rank)
    shares = index < grouping.owner_count
    return MpiUse(
        mpi_calls(world.comm),
        rank_of_host=[members[index] if shares and host != own else -1 for host, members in enumerate(grouping.hosts)],
    )
