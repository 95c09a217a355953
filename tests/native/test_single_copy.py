"""Moves on one host that read the other ranks' memory: which way is in force, and from where to where it is used."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks, recorded_stderr, run_ranks
from test_alltoall import Plan, check
from test_reducescatter import scatter

from horo.errors import PeerLostError

INFO = 2
"""Of ``log_level``."""
READS = "large moves read the memory of the other ranks"


def gather(rank: Rank, count: int, turn: int = 0, name: str = "g") -> None:
    gathered, _ = rank.allgather(np.full(count, rank.rank + 10 * turn, np.int32), name)
    assert np.array_equal(gathered, np.repeat(np.arange(rank.size, dtype=np.int32) + 10 * turn, count))


@pytest.mark.parametrize(
    ("operation", "least"), [("broadcast", 3000), ("allgather", 6000), ("alltoall", 3000), ("reducescatter", 3000)]
)
@pytest.mark.parametrize("missing", [0, 3])
def test_reading_begins_where_it_pays(operation: str, least: int, missing: int) -> None:
    """``least``: bytes on a rank, of which each of the three has a third in what all have."""
    count = least - missing

    def body(rank: Rank) -> None:
        if operation == "broadcast":
            assert rank.broadcast(np.full(count, rank.rank, np.uint8), 1)[-1] == 1
        elif operation == "allgather":
            gathered, _ = rank.allgather(np.full(count // 3, rank.rank, np.uint8))
            assert np.array_equal(gathered, np.repeat(np.arange(3, dtype=np.uint8), count // 3))
        elif operation == "alltoall":
            check(rank, [Plan([[count // 3] * 3] * 3, dtype=np.uint8)])
        else:
            (mine,) = scatter(rank, [np.full((count // 3, 3), rank.rank, np.uint8)])
            assert np.all(mine == 3)

    with recorded_stderr() as said:
        run_ranks(body, [3], direct_bytes=1000, log_level=INFO)
        assert said().count(READS) == (0 if missing else 1)


def test_none_is_read_where_that_is_turned_off_and_between_hosts() -> None:
    with recorded_stderr() as said:
        for hosts, direct_bytes in (([2], 0), ([1, 1], 1), ([2, 1], 1)):
            run_ranks(lambda rank: gather(rank, 1 << 17), hosts, direct_bytes=direct_bytes, log_level=INFO)
        assert "large moves" not in said()


def test_a_team_on_one_of_several_hosts_reads() -> None:
    """Its members are not the first ranks of their host."""
    host_of_rank = [0, 1, 0, 1, 1]

    def body(rank: Rank) -> None:
        members = [3, 4]
        team = rank.add_team(members)
        for turn in range(4 if rank.rank in members else 0):
            handle = rank.submit(
                "broadcast", "b", [array := np.full(5000, rank.rank)], root_rank=3 + turn % 2, team=team
            )
            rank.finish(handle)
            assert np.all(array == 3 + turn % 2)

    with recorded_stderr() as said:
        run_ranks(body, host_of_rank=host_of_rank, direct_bytes=1, log_level=INFO)
        assert said().count(f"process set 1 (ranks 3, 4): {READS}") == 1


@pytest.mark.parametrize("count", [2, 33, 64, 500, 600])
@on_ranks([3], segment_bytes=4096, direct_bytes=1)
def test_groups_of_more_tensors_than_one_read_or_one_slot_takes(rank: Rank, count: int) -> None:
    """512 addresses fit a slot."""
    for turn in range(3):
        arrays = [np.full(1 + i % 7 * 100, rank.rank * 1000 + i + turn, np.int32) for i in range(count)]
        handle = rank.submit("broadcast", "group", arrays, root_rank=turn % rank.size)
        rank.finish(handle)
        for i, array in enumerate(arrays):
            assert np.all(array == turn % rank.size * 1000 + i + turn)


@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_that_wait_for_the_addresses_of_one_that_is_gone_are_told(victim: int) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == victim:
            group.kill(victim)
            return
        with pytest.raises(PeerLostError, match=rf"rank {victim} \(host0\) is gone"):
            gather(rank, 5000, 1)

    with Group([3], direct_bytes=1) as group:
        group.run(lambda rank: gather(rank, 5000))
        group.run(body)
