"""A leader's background thread cedes its driving to a caller that makes call after call, and takes it back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ranks import Group, Rank

from horo import _core

SUM = _core.REDUCE_OPS["sum"]
CALLS, TURNS, LIMIT_S = 20, 15, 30


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 1, 1]])
def test_others_are_served_when_the_caller_stops_calling(hosts: list[int]) -> None:
    served = [threading.Event() for _ in range(TURNS)]

    def body(rank: Rank) -> None:
        ones = np.ones(4, np.float32)
        for turn in range(TURNS):
            for _ in range(CALLS):
                ones[:] = 1
                rank.run("allreduce", "stream", [ones], reduce_op=SUM)
                assert np.all(ones == rank.size)
            # Nobody is woken for this one, and rank 0, which leads the agreement, does not wait for it.
            handle = rank.submit("barrier", "between", [], sync=True)
            if rank.rank == 0:
                assert served[turn].wait(LIMIT_S)
            rank.finish(handle)
            served[turn].set()

    with Group(hosts) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2]])
def test_streams_of_both_kinds_alternate(hosts: list[int]) -> None:
    def body(rank: Rank) -> None:
        for turn in range(TURNS):
            for _ in range(turn % 5):
                rank.run("barrier", "stream", [])
            arrays = [np.full(3, index, np.int64) for index in range(turn % 4)]
            handles = [
                rank.submit("allreduce", f"async {index}", [array], reduce_op=SUM) for index, array in enumerate(arrays)
            ]
            rank.run("barrier", "stream", [])
            for handle in handles:
                rank.finish(handle)
            assert all(np.all(array == index * rank.size) for index, array in enumerate(arrays))

    with Group(hosts) as group:
        group.run(body)
