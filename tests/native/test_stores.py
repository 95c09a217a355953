"""The choice between ordinary stores into slots and those past the cache: costs made up, and a rank that is late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import Group, Rank, context_of, describe, wait_for

from horo.core import context

SUM = context.REDUCE_OPS["sum"]
LATE_S = 0.004
DEADLINE_S = 40
BYTES = 1 << 20
ORDINARY, STREAM = 0, 1
NEAR = (75_000, 100_000)
"""Nanoseconds for 1 MiB with each store where cores share a cache, as measured: past the cache is dearer by a third."""
FAR = (620_000, 70_000)
"""Where they share none."""


class Choices:
    """The operations of a rank, with costs that a test makes up."""

    def __init__(self, native: Any) -> None:
        self._lib = native.lib
        self._self = native.ffi.gc(self._lib.shim_stores_create(), self._lib.shim_stores_destroy)

    def run(self, count: int, cost: Callable[[int, int], float]) -> list[int]:
        """The stores of so many operations; ``cost``: of one, by its number and its store."""
        stores = []
        for number in range(count):
            stores.append(self._lib.shim_stores_try(self._self, BYTES))
            self._lib.shim_stores_learn(self._self, int(cost(number, stores[-1])))
        return stores


@pytest.mark.parametrize(("costs", "better"), [(NEAR, ORDINARY), (FAR, STREAM)])
def test_the_cheaper_store_is_used_from_the_first_operations_on(
    native: Any, costs: tuple[int, int], better: int
) -> None:
    """But for two that pay for page faults, four with each store, and one in 251 with the other."""
    stores = Choices(native).run(2000, lambda number, store: costs[store] * (20 if number < 2 else 1))
    assert stores[:10] == [ORDINARY, ORDINARY, *[STREAM, STREAM, ORDINARY, ORDINARY] * 2]
    assert stores[10:].count(1 - better) == len(range(251, 2000, 251))


@pytest.mark.parametrize(("before", "after", "better"), [(NEAR, FAR, STREAM), (FAR, NEAR, ORDINARY)])
def test_a_machine_that_changes_is_followed(
    native: Any, before: tuple[int, int], after: tuple[int, int], better: int
) -> None:
    """At once where the store in use becomes dear; where the other one becomes cheaper, when it is tried."""
    choices = Choices(native)
    choices.run(300, lambda _, store: before[store])
    stores = choices.run(1000, lambda _, store: after[store])
    used = stores.index(better)
    assert used < (20 if better == STREAM else 251)
    assert stores[used:].count(1 - better) <= 4


def test_a_reducescatter_does_not_take_the_wait_for_a_late_rank_for_the_cost_of_stores(native: Any) -> None:
    """Other programs may take their slices while a segment is filled, but not each time."""
    rows, size = 1 << 16, 2
    before = [0]

    def body(rank: Rank) -> float:
        values = np.ones(size * rows, np.float32)
        result = np.zeros(rows, np.float32)
        buffer = context.RequestBuffer.of(
            context.OPS["reducescatter"], "x", describe([values], [result]), reduce_op=SUM, sync=True
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
