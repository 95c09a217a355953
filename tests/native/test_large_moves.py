"""Large moves on one host, of many segments, and those that read the other ranks' memory; and hosts of many ranks."""

import itertools
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from ranks import Group, Rank, Written, on_ranks, recorded_stderr, rows_of, run_ranks, wait_for
from test_gather import Plan, check

from horo.errors import PeerLostError

SLOT_BYTES = 1 << 18
COUNT = 3 * (1 << 20) + 3333  # of float32: the results of a host are more than 32 MiB
INFO = 2
"""Of ``log_level``."""
ways = pytest.mark.parametrize("direct_bytes", [0, 1], ids=["by slots", "direct"])


def whole_numbers(rank: int, count: int = COUNT) -> np.ndarray:
    """Small whole numbers, whose sums are exact."""
    return np.resize((np.arange(1001) * 7 + rank * 31) % 1001, count).astype(np.float32)


@ways
@on_ranks([1], [2], [3], [2, 1], "direct_bytes", segment_bytes=SLOT_BYTES)
def test_sums_and_parts_of_many_segments(rank: Rank) -> None:
    """In two rounds, which begin with other slots; of parts some ranks have less than a segment, or nothing."""
    total = np.sum([whole_numbers(r) for r in range(rank.size)], axis=0)
    for step in range(2):
        assert np.array_equal(rank.allreduce(whole_numbers(rank.rank)), total)
        mine = rank.reducescatter(whole_numbers(rank.rank))
        assert np.array_equal(mine, total[rows_of(COUNT, rank.size, rank.rank)])
        for root, count in itertools.product(range(rank.size), (SLOT_BYTES // 4, COUNT)):
            assert np.array_equal(rank.broadcast(whole_numbers(rank.rank, count), root), whole_numbers(root, count))
        lengths = [[COUNT, 100, 0][(r + step) % 3] for r in range(rank.size)]
        wanted = np.concatenate([whole_numbers(r, length) for r, length in enumerate(lengths)])
        gathered, _ = rank.allgather(whole_numbers(rank.rank, lengths[rank.rank]))
        assert np.array_equal(gathered, wanted)
        rows = [[[1_200_000, 1, 70_000, 0][(s + 2 * d + step) % 4] for d in range(rank.size)] for s in range(rank.size)]
        check(rank, [Plan(rows, 3)])


READS = "large moves read the memory of the other ranks"


def gather(rank: Rank, count: int, turn: int = 0) -> None:
    gathered, _ = rank.allgather(np.full(count, rank.rank + 10 * turn, np.int32))
    assert np.array_equal(gathered, np.repeat(np.arange(rank.size, dtype=np.int32) + 10 * turn, count))


@pytest.mark.parametrize(
    ("operation", "least"), [("broadcast", 3000), ("allgather", 6000), ("alltoall", 3000), ("reducescatter", 3000)]
)
@pytest.mark.parametrize("missing", [0, 3])
@on_ranks([3], direct_bytes=1000, log_level=INFO)
def test_reading_begins_where_it_pays(
    rank: Rank, operation: str, least: int, *, missing: int, written: Written
) -> None:
    """``least``: bytes on a rank, of which each of the three has a third in what all have."""
    count = least - missing
    if operation == "broadcast":
        assert rank.broadcast(np.full(count, rank.rank, np.uint8), 1)[-1] == 1
    elif operation == "allgather":
        gathered, _ = rank.allgather(np.full(count // 3, rank.rank, np.uint8))
        assert np.array_equal(gathered, np.repeat(np.arange(3, dtype=np.uint8), count // 3))
    elif operation == "alltoall":
        check(rank, [Plan([[count // 3] * 3] * 3, dtype=np.uint8)])
    else:
        assert np.all(rank.reducescatter(np.full((count // 3, 3), rank.rank, np.uint8)) == 3)
    rank.meet()
    assert written().count(READS) == (0 if missing else 1)


def test_none_is_read_where_that_is_turned_off_and_between_hosts() -> None:
    with recorded_stderr() as said:
        for hosts, direct_bytes in (([2], 0), ([1, 1], 1), ([2, 1], 1)):
            run_ranks(lambda rank: gather(rank, 1 << 17), hosts, direct_bytes=direct_bytes, log_level=INFO)
        assert "large moves" not in said()


@on_ranks(host_of_rank=[0, 1, 0, 1, 1], direct_bytes=1, log_level=INFO)
def test_a_team_on_one_of_several_hosts_reads(rank: Rank, written: Written) -> None:
    """Its members are not the first ranks of their host."""
    team = rank.add_team([3, 4])
    for root in (3, 4, 3, 4) if rank.rank in (3, 4) else ():
        assert np.all(rank.broadcast(np.full(5000, rank.rank), root, team=team) == root)
    rank.meet()
    assert written().count(f"process set 1 (ranks 3, 4): {READS}") == 1


@pytest.mark.parametrize("count", [2, 33, 64, 500, 600])
@on_ranks([3], segment_bytes=4096, direct_bytes=1)
def test_groups_of_more_tensors_than_one_read_or_one_slot_takes(rank: Rank, count: int) -> None:
    """512 addresses fit a slot."""
    for turn in range(3):
        arrays = [np.full(1 + i % 7 * 100, rank.rank * 1000 + i + turn, np.int32) for i in range(count)]
        rank.finish(rank.submit("broadcast", "group", arrays, root_rank=turn % rank.size))
        for i, array in enumerate(arrays):
            assert np.all(array == turn % rank.size * 1000 + i + turn)


@pytest.mark.parametrize("victim", [0, 2])
@on_ranks([3], direct_bytes=1)
def test_ranks_that_wait_for_the_addresses_of_one_that_is_gone_are_told(rank: Rank, victim: int) -> None:
    gather(rank, 5000)
    rank.meet()
    if rank.rank == victim:
        rank.group.kill(victim)
        return
    with pytest.raises(PeerLostError, match=rf"rank {victim} \(host0\) is gone"):
        gather(rank, 5000, 1)


@pytest.mark.parametrize(
    ("hosts", "segment_bytes"), [([2], 1 << 12), ([3], 1 << 12), ([9], 1 << 15), ([17], 1 << 15)], ids=str
)
@on_ranks("hosts", "segment_bytes", direct_bytes=1, spin_us=0)
def test_slots_without_room_for_what_is_read_at_once(rank: Rank) -> None:
    size = rank.size
    for turn in range(2):
        for rows in (10, 3000):
            got = rank.reducescatter(np.arange(rows) * (rank.rank + turn), str(rows))
            factor = size * (size - 1) // 2 + size * turn
            assert np.array_equal(got, np.arange(rows)[rows_of(rows, size, rank.rank)] * factor)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many as the system lets this process have: each rank has its own for every other."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 0 <= most < 20_000:
        pytest.skip(f"a process may have {most} open files here, which is too few for so many ranks in one")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.usefixtures("descriptors")
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


@pytest.mark.usefixtures("descriptors")
@on_ranks([66], [66, 1], [1, 66], [40, 30], segment_bytes=1 << 12)
def test_many_ranks_of_one_host_reduce(rank: Rank) -> None:
    """They are more than a slot has lines."""
    for rows in (3, 141, 5000):
        array, total = np.arange(rows) * rank.rank, rank.size * (rank.size - 1) // 2
        part = rank.reducescatter(array, f"s{rows}")
        assert np.array_equal(part, np.arange(rows)[rows_of(rows, rank.size, rank.rank)] * total)
        assert np.array_equal(rank.allreduce(array, f"x{rows}"), np.arange(rows) * total)
