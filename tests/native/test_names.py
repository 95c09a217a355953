"""More names than the response cache holds, than a rank can show to others, than a ring takes at once."""

from __future__ import annotations

import native_build
import numpy as np
import pytest
from ranks import Rank, recorded_stderr, run_ranks, wait_for


@pytest.mark.parametrize("hosts", [[2], [2, 1]], ids=str)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("count", [70, 300])
def test_more_names_than_the_cache_holds_leave_the_hits_of_those_it_holds(
    hosts: list[int], at_once: bool, count: int
) -> None:
    capacity, steps = 64, 8 if native_build.FLAVOUR else 12

    def body(rank: Rank) -> int:
        before = 0
        for step in range(2 * steps):
            if step == steps:
                before = rank.context.counters()["cache_hits"]
            for chunk in [range(count)] if at_once else [[i] for i in range(count)]:
                arrays = [np.full(3, float(i * step)) for i in chunk]
                handles = [
                    rank.submit("allreduce", f"n{i}", [a], reduce_op=1) for i, a in zip(chunk, arrays, strict=True)
                ]
                for i, array, handle in zip(chunk, arrays, handles, strict=True):
                    rank.finish(handle)
                    assert (array == rank.size * i * step).all()
        return rank.context.counters()["cache_hits"] - before

    lost_to_newcomers = (count - capacity) / 32
    for hits in run_ranks(body, hosts, cache_capacity=capacity):
        assert hits > steps * (capacity - 2 * lost_to_newcomers - 2)


def test_a_rank_that_is_late_is_named_also_after_more_names_than_it_can_show() -> None:
    """The leader is late itself and parked, so rank 1 must tell by what the others show."""

    def body(rank: Rank) -> None:
        handles = [rank.submit("barrier", f"n{i}", []) for i in range(6000)]
        for handle in handles:
            rank.finish(handle)
        if rank.rank == 0:
            wait_for(lambda: "rank 0 (host0) has not submitted 'late'" in written())
        rank.barrier("late")

    with recorded_stderr() as written:
        run_ranks(body, [3], stall_warning_ms=2000)
