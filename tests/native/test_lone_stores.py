"""What is learnt of stores from operations whose first segment is filled before the others are there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from ranks import Group, Rank, context_of, describe, wait_for

from horo import _core

SUM = _core.REDUCE_OPS["sum"]
LATE_S = 0.004
DEADLINE_S = 40


def test_a_reducescatter_does_not_take_the_wait_for_a_late_rank_for_the_cost_of_stores(native: Any) -> None:
    """Other programs may take their slices while a segment is filled, but not each time."""
    rows, size = 1 << 16, 2
    before = [0]

    def body(rank: Rank) -> float:
        values = np.ones(size * rows, np.float32)
        result = np.zeros(rows, np.float32)
        buffer = _core.RequestBuffer.of(
            _core.OPS["reducescatter"], "x", describe([values], [result]), reduce_op=SUM, sync=True
        )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for _ in range(24):
                if rank.rank == 0:
                    before[0] = group.contexts[0].counters()["requests"]
                rank.barrier(transient=True)
                if rank.rank == 1:  # rank 0 has submitted it, behind the barrier
                    wait_for(lambda: group.contexts[0].counters()["requests"] >= before[0] + 2)
                    end = time.perf_counter() + LATE_S
                    while time.perf_counter() < end:
                        pass
                rank.context.run(buffer)
                assert (result == size).all()
            cost = native.lib.shim_stores_scatter_cost(context_of(native, rank)) * 1e-12 * values.nbytes
            goes_on = rank.rank == 0 and not 0 < cost < LATE_S / 2 and time.monotonic() < deadline
            if rank.allreduce(np.array([goes_on], np.int32), "goes on")[0] == 0:
                return cost

    with Group((size,), segment_bytes=1 << 20, direct_bytes=0, spin_us=10_000, sleeps_under_contention=False) as group:
        cost, _ = group.run(body)
    assert 0 < cost < LATE_S / 2
