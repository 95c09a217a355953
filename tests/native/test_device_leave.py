"""Ranks that leave while a GPU is late."""

from __future__ import annotations

import numpy as np
from device_group import SUM, Gpu, OnGpu
from ranks import Group, Rank, recorded_stderr, wait_for
from test_device_flow import has_begun, total, values


def test_ranks_that_leave_together_wait_for_the_gpu_that_holds_one_of_them_up(gpu: Gpu) -> None:
    """Also the other one, whose values are there. For longer than what others do not do may keep it from leaving."""
    gpu.let_copies(0)

    def body(rank: Rank) -> tuple[Rank, np.ndarray, OnGpu | None]:
        array = values(rank.rank)
        if rank.rank == 1:
            rank.submit("allreduce", "x", [array], reduce_op=SUM)
            return rank, array, None
        own = OnGpu(rank, gpu)
        own.submit("allreduce", "x", array, reduce_op=SUM)
        return rank, array, own

    def let_go() -> None:
        wait_for(lambda: "waiting for its own GPU in the middle of an operation" in written())
        gpu.let_copies(-1)

    with recorded_stderr() as written:
        group = Group((2,), stall_warning_ms=6000)
        (rank, _, own), (_, array, _) = group.run(body)
        gpu.let_copies(2)
        wait_for(lambda: has_begun(rank))
        group.destroy_while(let_go)
    assert own is not None
    own.close()
    np.testing.assert_array_equal(array, total(2))
