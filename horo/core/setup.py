"""The input of a context: the ranks of each host, connected descriptors, the MPI of the process. Plain values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = [
    "KNOBS",
    "MPI_FUNCTIONS",
    "MpiCalls",
    "MpiUse",
    "Setup",
    "close_all",
    "close_setup",
    "native_mpi",
    "native_setup",
    "native_team",
    "setup_descriptors",
]

MPI_FUNCTIONS = (
    "MPI_Issend",
    "MPI_Irecv",
    "MPI_Test",
    "MPI_Cancel",
    "MPI_Request_free",
    "MPI_Finalized",
)
"""The functions that the core calls, in the order of ``enum horo_mpi_function``."""

KNOBS = ("segment", "piece", "sockets", "fusion", "doubling", "carried", "cycle", "overlap")
"""The values that autotuning may change, in the order of ``enum horo_knob``."""


@dataclass(frozen=True)
class MpiCalls:
    """The MPI that is loaded in this process; the fields are those of ``horo_mpi`` in ``native/include/horo.h``."""

    handle_bytes: int
    status_bytes: int
    size: int
    """Of the communicator."""
    communicator: int
    """Made for horo alone; it must live until the context is destroyed."""
    byte: int
    """The handle of ``MPI_BYTE``."""
    functions: Sequence[int]
    """Addresses, in the order of ``MPI_FUNCTIONS``."""


@dataclass(frozen=True)
class MpiUse:
    """The use of MPI by a rank: it moves the data between hosts."""

    calls: MpiCalls
    rank_of_host: Sequence[int] = ()
    """By host: the rank of the communicator to exchange data with; -1 for none."""
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
    direct_bytes: int = 3 << 13
    fusion_bytes: int = 128 << 20
    cache_capacity: int = 4096
    spin_us: int = 1000
    cycle_time_us: int = 0
    stall_warning_ms: int = 60_000
    stall_shutdown_ms: int = 0
    peer_timeout_ms: int = 30_000
    log_level: int = 3
    leaves_crowded_cores: bool = False
    sleeps_under_contention: bool = True
    sockets_per_peer: int = 1
    arena_memory: int = 0
    arena_memory_bytes: int = 0
    mpi: MpiUse | None = None
    tuned: Mapping[str, int] | None = None
    """The values that the job begins with and that may change, by the names in ``KNOBS``; a missing one is the core's
    own. None: none changes."""


def native_mpi(use: MpiUse, keep: list[Any], ffi: Any) -> Any:
    """Makes a ``horo_mpi`` with ``ffi``; the memory that it points to is appended to ``keep``."""
    native = ffi.new("horo_mpi *")
    calls = use.calls
    native.handle_bytes, native.status_bytes = calls.handle_bytes, calls.status_bytes
    native.size, native.message_bytes = calls.size, use.message_bytes
    native.communicator, native.byte = calls.communicator, calls.byte
    native.functions = list(calls.functions)
    for name in ("rank_of_host", "send_tags", "recv_tags"):
        values = getattr(use, name)
        if values:
            keep.append(ffi.new("int32_t[]", list(values)))
            setattr(native, name, keep[-1])
    return native


def native_setup(setup: Setup, keep: list[Any], ffi: Any) -> Any:
    """Makes a ``horo_setup`` with ``ffi``; the memory that it points to is appended to ``keep``."""
    names = [ffi.new("char[]", name.encode()) for name in setup.host_name_of_rank]
    native = ffi.new("horo_setup *")
    for item in fields(setup):
        value = getattr(setup, item.name)
        if item.name == "host_name_of_rank":
            value = ffi.new("char *[]", names)
        elif item.name in {"host_of_rank", "wake_fds", "life_fds", "control_fds", "data_fds"}:
            value = ffi.new("int32_t[]", list(value)) if value else ffi.NULL
        elif item.name == "arena_memory":
            value = ffi.cast("void *", value)
        elif item.name == "mpi":
            value = ffi.NULL if value is None else native_mpi(value, keep, ffi)
        elif item.name == "tuned":
            unset = (1 << 64) - 1
            value = ffi.NULL if value is None else ffi.new("uint64_t[]", [value.get(knob, unset) for knob in KNOBS])
        keep.append(value)
        setattr(native, item.name, value)
    keep.append(names)
    return native


def native_team(
    ranks: Sequence[int], control_fds: Sequence[int] | None, data_fds: Sequence[int] | None, ffi: Any
) -> tuple[Any, list[Any]]:
    """A ``horo_team_setup``, and the memory that it points to."""
    keep = [ffi.new("int32_t[]", list(part)) for part in (ranks, control_fds or (), data_fds or ())]
    native = ffi.new("horo_team_setup *")
    native.ranks, native.size = keep[0], len(ranks)
    native.control_fds = ffi.NULL if control_fds is None else keep[1]
    native.data_fds = ffi.NULL if data_fds is None else keep[2]
    return native, keep


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
