"""Many segments of data on one host, of which the large ones are stored past the cache on the way and at the end."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Rank, on_ranks
from test_alltoall import Plan
from test_alltoall import check as check_alltoall
from test_reducescatter import rows_of, scatter

SLOT_BYTES = 1 << 18
COUNT = 3 * (1 << 20) + 3333  # of float32: the results of a host are more than 32 MiB
ways = pytest.mark.parametrize("direct_bytes", [0, 1], ids=["by slots", "direct"])
over_hosts = pytest.mark.parametrize("hosts", [[1], [2], [3], [2, 1]], ids=str)


def numbers(rank: int, count: int = COUNT) -> np.ndarray:
    """Small whole numbers, whose sums are exact."""
    return np.resize((np.arange(1001) * 7 + rank * 31) % 1001, count).astype(np.float32)


@over_hosts
@on_ranks("hosts", segment_bytes=SLOT_BYTES)
def test_sums_of_many_segments(rank: Rank) -> None:
    total = np.sum([numbers(r) for r in range(rank.size)], axis=0)
    assert np.array_equal(rank.allreduce(numbers(rank.rank)), total)
    (mine,) = scatter(rank, [numbers(rank.rank)])
    assert np.array_equal(mine, total[rows_of(COUNT, rank.size, rank.rank)])


@over_hosts
@ways
@pytest.mark.parametrize("count", [SLOT_BYTES // 4, COUNT], ids=["one", "many"])
@on_ranks("hosts", "direct_bytes", segment_bytes=SLOT_BYTES)
def test_a_broadcast_of_many_segments(rank: Rank, count: int) -> None:
    for root in range(rank.size):
        assert np.array_equal(rank.broadcast(numbers(rank.rank, count), root), numbers(root, count))


@over_hosts
@ways
@on_ranks("hosts", "direct_bytes", segment_bytes=SLOT_BYTES)
def test_parts_of_any_lengths(rank: Rank) -> None:
    """In two rounds, which begin with other slots; some ranks have less than a segment, or nothing."""
    for step in range(2):
        lengths = [[COUNT, 100, 0][(r + step) % 3] for r in range(rank.size)]
        wanted = np.concatenate([numbers(r, length) for r, length in enumerate(lengths)])
        gathered, _ = rank.allgather(numbers(rank.rank, lengths[rank.rank]))
        assert np.array_equal(gathered, wanted)
        rows = [[[1_200_000, 1, 70_000, 0][(s + 2 * d + step) % 4] for d in range(rank.size)] for s in range(rank.size)]
        check_alltoall(rank, [Plan(rows, 3)])
