"""The input of a context: the ranks of each host, connected descriptors, the MPI of the process. Plain values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "MPI_FUNCTIONS",
    "MPI_HANDLES",
    "MpiCalls",
    "MpiUse",
    "Setup",
    "close_all",
    "close_setup",
    "setup_descriptors",
]

MPI_FUNCTIONS = (
    "MPI_Issend",
    "MPI_Irecv",
    "MPI_Test",
    "MPI_Cancel",
    "MPI_Request_free",
    "MPI_Iallreduce",
    "MPI_Ibcast",
    "MPI_Iallgatherv",
    "MPI_Ireduce_scatter",
    "MPI_Ialltoallv",
    "MPI_Type_contiguous",
    "MPI_Type_commit",
    "MPI_Type_free",
    "MPI_Op_create",
    "MPI_Op_free",
    "MPI_Error_string",
    "MPI_Finalized",
)
"""The functions that the core calls, in the order of ``enum horo_mpi_function``."""

MPI_HANDLES = (
    "BYTE",
    "UINT8_T",
    "INT8_T",
    "UINT16_T",
    "INT16_T",
    "UINT32_T",
    "INT32_T",
    "UINT64_T",
    "INT64_T",
    "FLOAT",
    "DOUBLE",
    "SUM",
    "PROD",
    "MIN",
    "MAX",
    "LOR",
    "LAND",
)
"""Handles that the core needs by their names in mpi4py, in the order of ``enum horo_mpi_handle``."""


@dataclass(frozen=True)
class MpiCalls:
    """The MPI that is loaded in this process; the fields are those of ``horo_mpi`` in ``native/include/horo.h``."""

    handle_bytes: int
    status_bytes: int
    rank: int
    """Number of this process in the communicator."""
    size: int
    communicator: int
    """Made for horo alone; it must live until the context is destroyed."""
    in_place: int
    functions: Sequence[int]
    """Addresses, in the order of ``MPI_FUNCTIONS``."""
    handles: Sequence[int]
    """In the order of ``MPI_HANDLES``."""


@dataclass(frozen=True)
class MpiUse:
    """The use of MPI by a rank: to move data between hosts, to run whole collectives, or both."""

    calls: MpiCalls
    transport: bool = False
    collectives: bool = False
    rank_of_host: Sequence[int] = ()
    """By host, for the transport: the rank of the communicator to exchange data with; -1 for none."""
    send_tags: Sequence[int] = ()
    """By host; empty: all 0. Different tags let several ranks share one rank of the communicator, as in tests."""
    recv_tags: Sequence[int] = ()
    message_bytes: int = 1 << 30
    """Most bytes in one call of MPI, since its counts are 32-bit; equal on all ranks."""


@dataclass(frozen=True)
class Setup:
    """The input of a context; the fields are those of ``horo_setup`` in ``native/include/horo.h``.

    A *host* is a set of ranks that share one arena, numbered by its lowest rank. Descriptors belong to the
    context once it exists; -1 means none.
    """

    rank: int
    size: int
    host_of_rank: Sequence[int]
    host_name_of_rank: Sequence[str]
    arena_fd: int
    segment_bytes: int
    wake_fds: Sequence[int]
    life_fds: Sequence[int]
    control_fds: Sequence[int]
    data_fds: Sequence[int]
    """Socket ``i`` to a host is at ``host * sockets_per_peer + i``; empty: no links, operations that move data fail."""
    fusion_bytes: int = 128 << 20
    cache_capacity: int = 4096
    spin_us: int = 1000
    cycle_time_us: int = 0
    stall_warning_ms: int = 60_000
    stall_shutdown_ms: int = 0
    peer_timeout_ms: int = 30_000
    log_level: int = 3
    leaves_crowded_cores: bool = False
    sockets_per_peer: int = 1
    arena_memory: int = 0
    arena_memory_bytes: int = 0
    mpi: MpiUse | None = None


def setup_descriptors(setup: Setup) -> list[int]:
    """All open descriptors of ``setup``."""
    numbers = [setup.arena_fd, *setup.wake_fds, *setup.life_fds, *setup.control_fds, *setup.data_fds]
    return [number for number in numbers if number >= 0]


def close_setup(setup: Setup) -> None:
    """Closes the descriptors of a setup that no context has taken over."""
    close_all(setup_descriptors(setup))


def close_all(numbers: Iterable[int]) -> None:
    """Closes descriptors; those closed already are ignored."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)
