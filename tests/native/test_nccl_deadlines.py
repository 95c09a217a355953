"""What may wait for the GPU of another rank has no deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_group import Gpu, Nccl
from ranks import wait_for

NONE, IDLE, ENDING = 0, 2, 4  # of enum hr_nccl_state
SOON_MS = 500


@pytest.fixture
def connect(native: Any, gpu: Gpu, nccl: Nccl) -> Any:
    """Makes a rank of two, and destroys it at the end."""
    lib, ffi = native.lib, native.ffi
    identity = ffi.new("char[]", lib.SHIM_NCCL_ID_BYTES)
    made: list[Any] = []

    def one(rank: int) -> Any:
        made.append(lib.shim_nccl_connect(str(gpu.path).encode(), str(nccl.path).encode(), 2, rank, identity))
        assert made[-1]
        return made[-1]

    yield one
    for each in made:
        lib.shim_nccl_destroy(each)


@pytest.mark.parametrize("late_looks", [0, 1000])
def test_ranks_end_their_communicator_whenever_the_last_one_comes(
    native: Any, connect: Callable[[int], Any], late_looks: int
) -> None:
    both = [connect(rank) for rank in range(2)]
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    native.lib.shim_nccl_end(both[0])
    for _ in range(late_looks):
        assert native.lib.shim_nccl_poll(both[0]) == ENDING
    native.lib.shim_nccl_end(both[1])
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == NONE)  # type: ignore[misc]


def test_what_runs_may_take_as_long_as_it_likes(
    native: Any, gpu: Gpu, nccl: Nccl, connect: Callable[[int], Any]
) -> None:
    """A kernel of a rank never ends, so no rank ends its communicator."""
    both = [connect(rank) for rank in range(2)]
    for comm in both:
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    nccl.fail("hang", 0)
    for comm in both:
        assert native.lib.shim_nccl_launch(comm, gpu.put(np.zeros(1, np.uint8))) == 0
        wait_for(lambda comm=comm: native.lib.shim_nccl_poll(comm) == IDLE)  # type: ignore[misc]
    until = time.monotonic() + SOON_MS / 1000
    while time.monotonic() < until:
        for comm in both:
            assert native.lib.shim_nccl_poll(comm) == IDLE
            assert native.lib.shim_nccl_is_in_flight(comm)
