"""What is learnt of stores from operations whose first segment is filled before the others are there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from ranks import Group, Rank, context_of, describe, wait_for

from horo import _core

SUM = _core.REDUCE_OPS["sum"]
LATE_S = 0.004


def test_a_reducescatter_does_not_take_the_wait_for_a_late_rank_for_the_cost_of_stores(native: Any) -> None:
    rows, size = 1 << 16, 2

    def body(rank: Rank) -> float:
        values = np.ones(size * rows, np.float32)
        result = np.zeros(rows, np.float32)
        buffer = _core.RequestBuffer.of(
            _core.OPS["reducescatter"], "x", describe([values], [result]), reduce_op=SUM, sync=True
        )
        for step in range(24):
            rank.barrier(transient=True)
            if rank.rank == 1:
                wait_for(lambda wanted=step: group.contexts[0].counters()["requests"] >= 2 * wanted + 2)
                end = time.perf_counter() + LATE_S
                while time.perf_counter() < end:
                    pass
            rank.context.run(buffer)
            assert (result == size).all()
        return native.lib.shim_stores_scatter_cost(context_of(native, rank)) * 1e-12 * values.nbytes

    with Group((size,), segment_bytes=1 << 20, direct_bytes=0, spin_us=10_000, sleeps_under_contention=False) as group:
        cost, _ = group.run(body)
    assert 0 < cost < LATE_S / 2
