"""A wait for any of several requests: it ends by each of them, and sleeps until then."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ranks import Rank, run_ranks, wait_for

from horo.core import context

SUM = context.REDUCE_OPS["sum"]
LAYOUTS = [[2], [3], [1, 1], [2, 1]]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_it_ends_when_any_of_them_is_done(hosts: list[int], first: int) -> None:
    """The other ranks submit one, and the rest only when the wait for it has ended."""
    has_ended = threading.Event()

    def body(rank: Rank) -> None:
        order = [first, *(number for number in range(3) if number != first)]
        if rank.rank == 0:
            handles = [rank.submit("allreduce", f"x{number}", [np.ones(9)], reduce_op=SUM) for number in range(3)]
            rank.context.wait_any(handles)
            assert [rank.context.in_progress(handle) for handle in handles] == [number != first for number in range(3)]
            has_ended.set()
            rank.finish(*handles)
            return
        rank.allreduce(np.ones(9), f"x{order[0]}")
        assert has_ended.wait(60)
        for number in order[1:]:
            rank.allreduce(np.ones(9), f"x{number}")

    run_ranks(body, hosts)


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_it_does_not_poll(hosts: list[int]) -> None:
    waits = threading.Event()
    sleeps: list[int] = []

    def body(rank: Rank) -> None:
        if rank.rank > 0:
            assert waits.wait(60)
            until = time.monotonic() + 0.5
            wait_for(lambda: time.monotonic() > until)
            rank.allreduce(np.ones(9), "a")
            rank.allreduce(np.ones(9), "b")
            return
        handles = [rank.submit("allreduce", name, [np.ones(9)], reduce_op=SUM) for name in "ab"]
        before = rank.context.counters()["sleeps"]
        waits.set()
        rank.context.wait_any(handles)
        sleeps.append(rank.context.counters()["sleeps"] - before)
        rank.finish(*handles)

    run_ranks(body, hosts)
    assert sleeps[0] < 50  # it was 250 with a look every 2 ms
