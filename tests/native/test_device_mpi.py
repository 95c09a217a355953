"""Pinned memory that tensors on a GPU pass on their way by MPI: what an MPI does not give back is kept for ever."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, OnGpu
from ranks import Group, Rank, recorded_stderr, wait_for

from horo.core.setup import MpiCalls, MpiUse, Setup
from horo.errors import GroupError

MANY = np.ones(100_000, np.float32)
HELD_MAX = 256


class FakeMpi:
    """An MPI that carries what the ranks of a group send, until it stops."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.state: Any = native.lib.shim_fake_reset()
        self.state.carries = 1

    def calls(self, rank: int, size: int) -> MpiCalls:
        """Its communicator is the number of the rank that calls."""
        described = self.native.ffi.new("horo_mpi *")
        self.native.lib.shim_fake_describe(described, size)
        return MpiCalls(
            handle_bytes=described.handle_bytes,
            status_bytes=described.status_bytes,
            size=size,
            communicator=rank,
            byte=described.byte,
            functions=list(described.functions),
        )

    def held(self, rank: int) -> list[int]:
        """Where what it holds of a rank's lies."""
        places = self.native.ffi.new("char *[]", HELD_MAX)
        count = self.native.lib.shim_fake_held(rank, places, HELD_MAX)
        return [int(self.native.ffi.cast("uintptr_t", place)) for place in places[0:count]]

    def join(self, setups: list[Setup]) -> list[Setup]:
        """The same with this MPI: data between hosts goes to the ranks of equal local index."""
        hosts = list(setups[0].host_of_rank)
        members = [[rank for rank, host in enumerate(hosts) if host == other] for other in range(max(hosts) + 1)]
        joined = []
        for setup in setups:
            own = members[hosts[setup.rank]]
            index = own.index(setup.rank)
            peers = [m[index] if m is not own and index < len(m) else -1 for m in members]
            calls = self.calls(setup.rank, len(setups))
            joined.append(replace(setup, mpi=MpiUse(calls, rank_of_host=peers)))
        return joined


@pytest.fixture
def mpi(native: ModuleType) -> FakeMpi:
    return FakeMpi(native)


def is_cut_off(mpi: FakeMpi, gpu: Gpu, hosts: tuple[int, ...], make: Callable[[Rank], OnGpu]) -> list[int]:
    """Where in pinned memory MPI still reads and writes after ranks have lost one, and are gone.

    MPI stops before an allreduce, and the last rank ends when MPI holds something of each rank with a part between
    hosts.
    """
    last = sum(hosts) - 1
    owners = [rank for rank in range(last + 1) if rank % hosts[0] < min(hosts)]

    def body(rank: Rank) -> list[int]:
        own = make(rank)
        assert own.allreduce(MANY, "first").tolist() == [sum(hosts)] * len(MANY)
        rank.barrier()
        mpi.state.carries = 0
        rank.barrier("it has stopped")
        handle, _, _ = own.submit("allreduce", "x", MANY, reduce_op=SUM)
        if rank.rank == last:
            wait_for(lambda: all(map(mpi.held, owners)))
            own.context.end("ValueError: bad batch")
        with suppress(GroupError):  # a rank that has no part between hosts may be done
            own.context.wait(handle)
        own.context.release(handle)
        own.close()
        return own.context.counters()["mpi_stranded"]

    with recorded_stderr(), Group(hosts, rewire=mpi.join) as group:
        stranded = group.run(body)
        held = [[place for place in mpi.held(rank) if gpu.is_pinned(place)] for rank in owners]
    assert all(held) and all(stranded[rank] > 0 for rank in owners)
    gpu.pinned_left = len(owners)
    return [place for places in held for place in places]


def test_staged_values_that_mpi_holds_stay_where_they_are(mpi: FakeMpi, gpu: Gpu) -> None:
    held = is_cut_off(mpi, gpu, (1, 1), lambda rank: OnGpu(rank, gpu))
    assert all(map(gpu.is_pinned, held))
    for place in held:
        ctypes.memset(place, 0xEE, 1)  # as MPI may; a sanitizer would see it
