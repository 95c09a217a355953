"""The input of a context: the ranks of each host, connected descriptors, the MPI of the process. Plain values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = [
    "KNOBS",
    "MPI_FUNCTIONS",
    "Autotune",
    "MpiCalls",
    "MpiUse",
    "Setup",
    "close_all",
    "close_setup",
    "native_autotune",
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
    "MPI_Error_string",
    "MPI_Finalized",
)
"""The functions that the core calls, in the order of ``enum horo_mpi_function``."""

KNOBS = ("segment", "piece", "sockets", "fusion", "doubling", "carried", "cycle", "overlap")
"""The values that autotuning may change, in the order of ``enum horo_knob``."""


@dataclass(frozen=True)
class Autotune:
    """A search for better values while the job runs; the fields are those of ``horo_autotune``."""

    start: Mapping[str, int] = field(default_factory=dict)
    """The values that the job begins with, by the names in ``KNOBS``; a missing one is the core's own default."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """The values that it would begin with if the user had set nothing, likewise."""
    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_samples: int = 40
    log_fd: int = -1
    """Of rank 0, where samples are written as CSV; it belongs to the context once that exists."""
    shuffle: int = 0
    """The seed, for tests, of random values, others after every batch."""


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
    direct_bytes: int = 1 << 13
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
    autotune: Autotune | None = None


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


def native_autotune(autotune: Autotune, ffi: Any) -> Any:
    """Makes a ``horo_autotune`` with ``ffi``."""
    unset = (1 << 64) - 1
    native = ffi.new("horo_autotune *")
    native.start = [autotune.start.get(knob, unset) for knob in KNOBS]
    native.defaults = [autotune.defaults.get(knob, unset) for knob in KNOBS]
    for name in ("warmup_samples", "steps_per_sample", "max_samples", "log_fd", "shuffle"):
        setattr(native, name, getattr(autotune, name))
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
        elif item.name == "autotune":
            value = ffi.NULL if value is None else native_autotune(value, ffi)
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
    log = -1 if setup.autotune is None else setup.autotune.log_fd
    numbers = [setup.arena_fd, *setup.wake_fds, *setup.life_fds, *setup.control_fds, *setup.data_fds, log]
    return [number for number in numbers if number >= 0]


def close_setup(setup: Setup) -> None:
    """Closes the descriptors of a setup that no context has taken over."""
    close_all(setup_descriptors(setup))


def close_all(numbers: Iterable[int]) -> None:
    """Closes descriptors; those closed already are ignored."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)
