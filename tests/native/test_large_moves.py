"""Many segments of data on one host, of which the large ones are stored past the cache on the way and at the end."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Rank, run_ranks
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
def test_sums_of_many_segments(hosts: list[int]) -> None:
    def body(rank: Rank) -> None:
        total = np.sum([numbers(r) for r in range(rank.size)], axis=0)
        assert np.array_equal(rank.allreduce(numbers(rank.rank)), total)
        (mine,) = scatter(rank, [numbers(rank.rank)])
        assert np.array_equal(mine, total[rows_of(COUNT, rank.size, rank.rank)])

    run_ranks(body, hosts, segment_bytes=SLOT_BYTES)


@over_hosts
@ways
@pytest.mark.parametrize("count", [SLOT_BYTES // 4, COUNT], ids=["one", "many"])
def test_a_broadcast_of_many_segments(hosts: list[int], direct_bytes: int, count: int) -> None:
    def body(rank: Rank) -> None:
        for root in range(rank.size):
            assert np.array_equal(rank.broadcast(numbers(rank.rank, count), root), numbers(root, count))

    run_ranks(body, hosts, segment_bytes=SLOT_BYTES, direct_bytes=direct_bytes)


@over_hosts
@ways
def test_parts_of_any_lengths(hosts: list[int], direct_bytes: int) -> None:
    """In two rounds, which begin with other slots; some ranks have less than a segment, or nothing."""

    def body(rank: Rank) -> None:
        for step in range(2):
            lengths = [[COUNT, 100, 0][(r + step) % 3] for r in range(rank.size)]
            wanted = np.concatenate([numbers(r, length) for r, length in enumerate(lengths)])
            gathered, _ = rank.allgather(numbers(rank.rank, lengths[rank.rank]))
            assert np.array_equal(gathered, wanted)
            rows = [
                [[1_200_000, 1, 70_000, 0][(s + 2 * d + step) % 4] for d in range(rank.size)] for s in range(rank.size)
            ]
            check_alltoall(rank, [Plan(rows, 3)])

    run_ranks(body, hosts, segment_bytes=SLOT_BYTES, direct_bytes=direct_bytes)
