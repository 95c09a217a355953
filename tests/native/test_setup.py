"""What a setup may leave out: arrays of descriptors that have nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from fabric import close_setup, make_setups

from horo.core.setup import Setup, close_all

OK = 0
_KEPT: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What descriptions of an MPI point to."""


def create(native: ModuleType, setup: Setup, **changes: Any) -> tuple[int, Any]:
    """The status of horo_create and the context; ``changes`` are fields of horo_setup."""
    ffi = native.ffi
    names = [ffi.new("char[]", name.encode()) for name in setup.host_name_of_rank]
    given = {
        "rank": setup.rank,
        "size": setup.size,
        "host_of_rank": ffi.new("int32_t[]", list(setup.host_of_rank)),
        "host_name_of_rank": ffi.new("char *[]", names),
        "arena_fd": setup.arena_fd,
        "segment_bytes": setup.segment_bytes,
        "wake_fds": ffi.new("int32_t[]", list(setup.wake_fds)),
        "life_fds": ffi.new("int32_t[]", list(setup.life_fds)),
        "control_fds": ffi.new("int32_t[]", list(setup.control_fds)),
        "data_fds": ffi.new("int32_t[]", list(setup.data_fds)),
        "peer_timeout_ms": setup.peer_timeout_ms,
        "log_level": setup.log_level,
    }
    context = ffi.new("horo_context **")
    error = ffi.new("char[]", 1024)
    status = native.lib.horo_create(ffi.new("horo_setup *", given | changes), context, error, len(error))
    return status, context[0]


def no_changes(_native: ModuleType) -> dict[str, Any]:
    return {}


def by_mpi(native: ModuleType) -> dict[str, Any]:
    """Data travels by an MPI that does nothing."""
    native.lib.shim_fake_reset()
    calls = native.ffi.new("horo_mpi *")
    native.lib.shim_fake_describe(calls, 2)
    peers = native.ffi.new("int32_t[]", [-1, 1])
    calls.rank_of_host = peers
    _KEPT[calls] = peers
    return {"mpi": calls}


@pytest.mark.parametrize(
    ("hosts", "rank", "absent", "use"),
    [
        pytest.param([1], 0, ["control_fds", "data_fds"], no_changes, id="one host has no links"),
        pytest.param([1, 1], 0, ["data_fds"], by_mpi, id="data by MPI"),
        pytest.param([1, 2], 2, ["control_fds", "data_fds"], no_changes, id="no leader and nobody's like"),
        pytest.param([2, 2], 1, ["control_fds"], no_changes, id="no leader"),
    ],
)
def test_an_array_of_descriptors_that_are_not_used_may_be_missing(
    native: ModuleType, hosts: list[int], rank: int, absent: list[str], use: Callable[[ModuleType], dict[str, Any]]
) -> None:
    setups = make_setups(hosts)
    status, context = create(native, setups[rank], **use(native), **dict.fromkeys(absent, native.ffi.NULL))
    native.lib.horo_destroy(context)
    close_all([fd for name in absent for fd in getattr(setups[rank], name)])
    for setup in setups:
        if setup is not setups[rank]:
            close_setup(setup)
    assert status == OK
