"""Decides which data of a job MPI carries, from the settings, the MPI's thread level and the hosts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from horo._bootstrap.host.grouping import Grouping
from horo._bootstrap.mpi.calls import mpi_calls
from horo._bootstrap.mpi.world import MpiWorld
from horo._config import Config
from horo._core_setup import MpiUse
from horo.errors import UsageError

__all__ = ["MpiPlan", "check_mpi", "mpi_use", "plan_mpi"]

_HOW = (
    "put mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI, or start MPI with "
    "MPI.Init_thread(MPI.THREAD_MULTIPLE)"
)


class MpiPlan(NamedTuple):
    """The data that MPI carries; the same on all ranks."""

    transport: bool = False
    """Data between hosts."""
    collectives: bool = False
    """Whole collectives, on one host as well."""


def check_mpi(config: Config, world: MpiWorld | None) -> None:
    """Raises UsageError if the settings require an MPI that this rank does not have, or may not use on threads."""
    for name, value in (("transport", config.transport), ("cpu_operations", config.cpu_operations)):
        if value == "mpi" and world is None:
            raise UsageError(
                f"{config.told(name)}, but the ranks of this job did not start through MPI; start it with mpirun or "
                f"pass a communicator of mpi4py to init(comm=...), or do not set {name}"
            )
        if value == "mpi" and world is not None and not world.threads_multiple:
            raise UsageError(
                f"{config.told(name)}, but {world.library} runs with {world.thread_level}, and horo calls MPI from a "
                f"thread of its own: {_HOW}"
            )


def plan_mpi(config: Config, world: MpiWorld | None, threads: Sequence[bool], grouping: Grouping) -> MpiPlan:
    """Decides which data MPI carries.

    Args:
        config: settings that are equal on all ranks and have passed ``check_mpi`` there.
        world: the communicator of this job; None if its ranks did not start through MPI.
        threads: by rank, whether MPI may be called from any thread.
        grouping: the hosts of the job.
    """
    if world is None:
        return MpiPlan()
    several = len(grouping.hosts) > 1
    transport = several and config.transport in {"auto", "mpi"} and all(threads)
    if several and config.transport == "auto" and not transport and world.rank == 0:
        logging.getLogger("horo").warning(
            "data between hosts travels by TCP, not by %s, which runs with %s: %s; HORO_TRANSPORT=tcp silences this",
            world.library,
            world.thread_level,
            _HOW,
        )
    return MpiPlan(transport, config.cpu_operations == "mpi")


def mpi_use(plan: MpiPlan, world: MpiWorld | None, rank: int, grouping: Grouping) -> MpiUse | None:
    """The plan in the form of the core's input; None if MPI carries nothing.

    Raises:
        ResourceError: the MPI lacks something that horo needs; names it.
    """
    if world is None or not any(plan):
        return None
    own, index = grouping.host_of_rank[rank], grouping.local_index(rank)
    shares = index < grouping.owner_count
    return MpiUse(
        mpi_calls(world.comm),
        transport=plan.transport,
        collectives=plan.collectives,
        rank_of_host=[members[index] if shares and host != own else -1 for host, members in enumerate(grouping.hosts)],
    )
