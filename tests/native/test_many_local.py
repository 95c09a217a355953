"""Hosts of more ranks than fit into small arrays."""

import resource
from collections.abc import Iterator

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks, rows_of, wait_for

from horo.errors import PeerLostError


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """As many as the system lets this process have: each rank has its own for every other."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 0 <= most < 20_000:
        pytest.skip(f"a process may have {most} open files here, which is too few for so many ranks in one")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.parametrize(("size", "polls"), [(60, False), (66, False), (66, True)])
def test_a_rank_that_waits_hears_of_a_death_while_rank_0_computes(size: int, polls: bool) -> None:
    """Only the leader holds life lines to all; it does not call horo, so its background thread must look."""

    def body(rank: Rank) -> None:
        handle = rank.submit("allreduce", "x", [np.ones(10)], reduce_op=1)
        group.kill(2)
        if polls:
            wait_for(lambda: rank.context.poll(handle))
        with pytest.raises(PeerLostError, match=r"rank 2 \(host0\)"):
            rank.finish(handle)

    with Group([size], segment_bytes=1 << 12) as group:
        group.run(body, ranks=[1])


@on_ranks([66], [66, 1], [1, 66], [40, 30], segment_bytes=1 << 12)
def test_many_ranks_of_one_host_reduce(rank: Rank) -> None:
    """They are more than a slot has lines."""
    for rows in (3, 141, 5000):
        array, total = np.arange(rows) * rank.rank, rank.size * (rank.size - 1) // 2
        part = rank.reducescatter(array, f"s{rows}")
        assert np.array_equal(part, np.arange(rows)[rows_of(rows, rank.size, rank.rank)] * total)
        assert np.array_equal(rank.allreduce(array, f"x{rows}"), np.arange(rows) * total)
