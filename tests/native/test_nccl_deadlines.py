"""What NCCL is to do with the other ranks alone, to connect and to end, has a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_group import Gpu, Nccl
from ranks import wait_for

IDLE, BROKEN, NONE = 2, 5, 0  # of enum hr_nccl_state
SHORT_MS, LONG_MS = 20, 60_000


@pytest.fixture
def connect(native: Any, gpu: Gpu, nccl: Nccl) -> Any:
    """Makes a rank of two, with a deadline in milliseconds, and destroys it at the end."""
    lib, ffi = native.lib, native.ffi
    identity = ffi.new("char[]", lib.SHIM_NCCL_ID_BYTES)
    made: list[Any] = []

    def one(rank: int, within_ms: int) -> Any:
        made.append(
            lib.shim_nccl_connect(str(gpu.path).encode(), str(nccl.path).encode(), 2, rank, identity, within_ms)
        )
        assert made[-1]
        return made[-1]

    yield one
    for each in made:
        lib.shim_nccl_destroy(each)


def failure_of(native: Any, comm: Any) -> str:
    return bytes(native.ffi.string(native.lib.shim_nccl_failure(comm))).decode()


def test_ranks_that_do_not_connect_in_time_are_told_of(native: Any, connect: Callable[[int, int], Any]) -> None:
    alone = connect(0, SHORT_MS)
    wait_for(lambda: native.lib.shim_nccl_poll(alone) == BROKEN)
    assert failure_of(native, alone) == "the ranks have not connected within 0.02 s"


def test_ranks_that_do_not_end_their_communicator_in_time_are_told_of(
    native: Any, connect: Callable[[int, int], Any]
) -> None:
    both = [connect(rank, LONG_MS) for rank in range(2)]
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    native.lib.shim_nccl_end(both[0], SHORT_MS)
    wait_for(lambda: native.lib.shim_nccl_poll(both[0]) == BROKEN)
    assert failure_of(native, both[0]) == "the ranks have not ended their communicator within 0.02 s"


def test_ranks_that_end_together_are_not_late(native: Any, connect: Callable[[int, int], Any]) -> None:
    both = [connect(rank, LONG_MS) for rank in range(2)]
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    for comm in both:
        native.lib.shim_nccl_end(comm, LONG_MS)
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == NONE)  # type: ignore[misc]


@pytest.mark.parametrize("is_expected", [False, True])
def test_what_runs_has_a_deadline_when_it_is_to_end(
    native: Any, gpu: Gpu, nccl: Nccl, connect: Callable[[int, int], Any], is_expected: bool
) -> None:
    """A kernel of a rank never ends, so no rank ends its communicator; while the team is there, it may be late."""
    both = [connect(rank, LONG_MS) for rank in range(2)]
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    nccl.fail("hang", 0)
    for comm in both:
        assert native.lib.shim_nccl_launch(comm, gpu.put(np.zeros(1, np.uint8))) == 0
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    if is_expected:
        for comm in both:
            native.lib.shim_nccl_expect_end(comm, SHORT_MS)
        for comm in both:
            wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == BROKEN)  # type: ignore[misc]
            assert failure_of(native, comm) == "what runs on the GPU has not ended within 0.02 s"
    for comm in both:
        assert native.lib.shim_nccl_poll(comm) == (BROKEN if is_expected else IDLE)
        assert native.lib.shim_nccl_is_in_flight(comm)
