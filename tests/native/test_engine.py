"""The whole core with ranks as threads: collectives, agreement, large moves, and ranks that disagree or vanish."""

import itertools
import os
import resource
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
from ranks import NUMPY_OF_COMPLEX, SUM, Group, Rank, Written, on_ranks, recorded_stderr, rows_of, run_ranks, wait_for
from skips import whole
from test_gather import Plan, check

from horo.core import context as _core
from horo.errors import GroupError, MismatchError, PeerLostError, UnsupportedError, UsageError


@on_ranks([2], cycle_time_us=100_000)
def test_tensors_of_unlike_factors_that_are_ready_at_once_have_their_own(rank: Rank) -> None:
    factors = [(1.0, 1.0), (0.5, 1.0), (1.0, 10.0), (0.5, 10.0)]
    arrays = [np.full(3, 2.0) for _ in factors]
    handles = [
        rank.submit("allreduce", f"{before}, {after}", [array], reduce_op=1, prescale=before, postscale=after)
        for array, (before, after) in zip(arrays, factors, strict=True)
    ]
    rank.finish(*handles)
    for array, (before, after) in zip(arrays, factors, strict=True):
        assert np.array_equal(np.full(3, 2.0 * rank.size * before * after), array)


def test_an_allgather_loads_the_links_of_all_owners_alike() -> None:
    """Also when one rank of each host has everything."""

    def body(rank: Rank) -> int:
        rank.allgather(np.ones(100_000 if rank.rank in (0, 2) else 0, np.float64))
        return rank.context.counters()["link_bytes"]

    sent = run_ranks(body, [2, 2])
    assert sum(sent) == 2 * 800_000
    assert max(sent) - min(sent) <= 64 * 30  # whole lines; so many segments


@pytest.mark.skipif(psutil.virtual_memory().available < 6 << 30, reason="needs 6 GiB of free memory")
@pytest.mark.skipif(bool(os.environ.get("HORO_SANITIZE")), reason="too slow under a sanitizer")
@pytest.mark.parametrize("hosts", [pytest.param([2], marks=whole), [1, 1]], ids=str)
@on_ranks("hosts", within_s=240, segment_bytes=1 << 20)
def test_more_than_two_to_the_31_elements(rank: Rank) -> None:
    x = np.zeros((1 << 31) + 77, np.uint8)  # whose pages take no memory before the sums
    x[[0, 1 << 31, -2]], x[-1] = rank.rank + 1, 10 * (rank.rank + 1)
    rank.allreduce(x)
    assert x[0] == x[1 << 31] == x[-2] == 3
    assert x[-1] == 30


def test_many_long_names_at_once_flow_through_small_rings(native: ModuleType) -> None:
    names = [f"{'long' * 60}.{i}" for i in range(1500)]

    def body(rank: Rank) -> None:
        order = names if rank.rank else names[::-1]
        for _ in range(2):
            handles = [rank.submit("barrier", name, []) for name in order]
            rank.finish(*handles)

    with Group([2, 1], cache_capacity=64, segment_bytes=1 << 16) as group:
        group.run(body)
        memory = native.ffi.cast("void *", group.arena_address(0))
        written = native.lib.shim_arena_requests_written(memory, 2, 1 << 16, 1)
        assert group.contexts[1].counters()["requests"] == 2 * len(names)
    assert written > 2 * sum(map(len, names))  # each name in each turn, since so few are remembered
    assert sum(map(len, names)) > 5 * native.lib.shim_arena_request_ring_bytes()


@pytest.mark.parametrize(
    ("fusion_bytes", "cycle_time_us", "batches"),
    [(1 << 20, 200_000, range(1, 64)), (0, 0, range(64, 65)), (100, 100_000, range(32, 65))],
    ids=["all at once", "none", "two have room"],
)
@on_ranks("fusion_bytes", "cycle_time_us")
def test_small_tensors_are_fused_and_fusion_can_be_turned_off(rank: Rank, batches: range) -> None:
    rank.barrier()
    before = rank.context.counters()["batches"]
    arrays = [np.ones(10, np.float32) for _ in range(64)]
    rank.finish(*[rank.submit("allreduce", f"{i}", [array], reduce_op=1) for i, array in enumerate(arrays)])
    assert all((array == 2).all() for array in arrays)
    assert rank.context.counters()["batches"] - before in batches


@on_ranks([2, 1])
def test_cached_tensors_are_announced_by_id(rank: Rank) -> None:
    for _ in range(10):
        rank.allreduce(np.ones(3))
    assert rank.context.counters()["cache_hits"] == 9
    for _ in range(3):
        rank.allreduce(np.ones(3), "once", transient=True)
    assert rank.context.counters()["cache_hits"] == 9


@on_ranks([2], segment_bytes=1 << 16, spin_us=20_000_000, sleeps_under_contention=False)
def test_a_rank_spins_before_it_sleeps_also_in_the_middle_of_an_operation(rank: Rank) -> None:
    rank.barrier(sync=True)
    for call in range(3):
        rank.allreduce(np.ones(1 << 20, np.float32), f"long{call}", sync=True)
    assert rank.context.counters()["sleeps"] == 0


def call_of(*arrays: np.ndarray, op: str = "allreduce", **options: object) -> dict:
    return {"op": op, "arrays": arrays, **options}


THREE, FOUR = np.ones(3), np.ones(4)
FLOATS, INTS = np.ones(3, np.float32), np.ones(3, np.int32)
MISMATCHES = [
    (call_of(np.ones((64, 128))), call_of(np.ones((64, 127))), ["float64 [64, 128]", "float64 [64, 127]"]),
    (call_of(FLOATS), call_of(THREE), ["float32 [3]", "float64 [3]"]),
    (call_of(FLOATS, wires=["bfloat16"]), call_of(FLOATS), ["sent float32 [3] as bfloat16", "sent float32 [3]"]),
    (call_of(THREE, wires=["bfloat16"]), call_of(THREE, wires=["float16"]), ["[3] as bfloat16", "[3] as float16"]),
    (call_of(THREE, reduce_op=1), call_of(THREE, reduce_op=4), ["op Sum", "op Max"]),
    (call_of(THREE, reduce_op=1), call_of(THREE, reduce_op=2), ["op Sum", "op Adasum"]),
    (call_of(THREE, prescale=2.0), call_of(THREE, prescale=3.0), ["prescale factor 2", "prescale factor 3"]),
    (call_of(THREE, postscale=2.0), call_of(THREE, postscale=3.0), ["postscale factor 2", "postscale factor 3"]),
    (call_of(np.ones(3, np.int32), op="broadcast"), call_of(FLOATS, op="broadcast"), ["int32 [3]", "float32 [3]"]),
    (call_of(THREE), call_of(THREE, transient=True), ["a name that the caller gave", "an automatic name"]),
    (call_of(THREE, op="broadcast"), call_of(THREE, op="broadcast", root_rank=1), ["root rank 0", "root rank 1"]),
    (call_of(THREE), call_of(THREE, op="broadcast"), ["sent allreduce", "sent broadcast"]),
    (*(call_of(np.ones(shape), op="allgather") for shape in ((3, 4), (9, 5))), ["float64 [*, 4]", "float64 [*, 5]"]),
    (*(call_of(np.ones(shape), op="allgather") for shape in ((3,), (3, 4))), ["float64 [*]", "float64 [*, 4]"]),
    (call_of(THREE, FOUR), call_of(THREE), ["2 tensors", "1 tensor"]),
    (call_of(THREE, FOUR), call_of(THREE, THREE), ["tensor 1 of the group", "float64 [4]", "float64 [3]"]),
    (call_of(INTS, reduce_op=6), call_of(INTS, reduce_op=7), ["op BAND", "op BOR"]),
]


@pytest.mark.parametrize(("one", "other", "values"), MISMATCHES)
@pytest.mark.parametrize("cached", [False, True])
@on_ranks([3], [1, 2])
def test_a_mismatch_names_tensor_ranks_and_values_and_the_job_goes_on(
    rank: Rank, one: dict, other: dict, *, values: list[str], cached: bool
) -> None:
    def run(call: dict) -> None:
        arrays = [array.copy() for array in call["arrays"]]
        rank.finish(rank.submit(name="layer.weight", **{**call, "arrays": arrays}))

    if cached:  # everybody knows the tensor as rank 0 means it
        run(one)
    with pytest.raises(MismatchError) as caught:
        run(other if rank.rank == 2 else one)
    text = str(caught.value)
    for part in ["'layer.weight'", "rank 2 (host", *values]:
        assert part in text, text
    assert isinstance(caught.value, GroupError)
    assert (rank.allreduce(np.ones(4), "after") == 3).all()
    run(one)


REFUSED_OPS: list[tuple[str, Any, str, dict[str, float], str]] = [
    ("reducescatter", np.float64, "adasum", {}, "op Adasum is offered by allreduce only"),
    ("allreduce", np.bool_, "average", {}, "this op is not offered for bool"),
    ("allreduce", np.float32, "band", {}, "this op is not offered for float32; bits are those of"),
    ("allreduce", np.int32, "bxor", {"postscale": 2.0}, "bits cannot be scaled"),
    *(
        ("allreduce", dtype, op, {}, f"this op is not offered for {name}; complex numbers can be reduced with Sum, Av")
        for name, dtype in NUMPY_OF_COMPLEX.items()
        for op in ("min", "max", "adasum")
    ),
    ("reducescatter", np.complex64, "min", {}, "this op is not offered for complex64"),
]


@on_ranks([2])
def test_bad_calls_are_refused_where_they_are_made(rank: Rank) -> None:
    """Among them ops that have no meaning for a dtype, and a name that is in flight."""
    if rank.rank == 1:
        with pytest.raises(UsageError, match=r"broadcast 'b': root rank 7 does not exist; ranks are 0 to 1"):
            rank.broadcast(np.ones(3), 7)
        with pytest.raises(UsageError, match="a scalar has no first dimension"):
            rank.submit("allgather", "g", [np.array(3.0)])
        with pytest.raises(UsageError, match="reducescatter 's': a scalar has no first dimension to split along"):
            rank.submit("reducescatter", "s", [np.ones(())], outputs=[np.ones(())], reduce_op=1)
        for array, wire in ((INTS, "float16"), (np.ones(3, np.float16), "bfloat16"), (THREE, "float32")):
            with pytest.raises(UnsupportedError, match=f"allreduce 'w': {array.dtype} cannot travel as {wire}"):
                rank.submit("allreduce", "w", [array], wires=[wire])
        with pytest.raises(UnsupportedError, match="broadcast 'w': float64 cannot travel as bfloat16"):
            rank.submit("broadcast", "w", [THREE], wires=["bfloat16"])
        with pytest.raises(UsageError, match="the name has 0 bytes"):
            rank.submit("barrier", "", [])
        with pytest.raises(UsageError, match="the name has 2000 bytes"):
            rank.submit("barrier", "n" * 2000, [])
        with pytest.raises(UsageError, match="Handle 99 was not created or has been cleared"):
            rank.context.poll(99)
        for kind, dtype, op, factors, said in REFUSED_OPS:
            array, reduce_op = np.ones(4, dtype), _core.REDUCE_OPS[op]
            with pytest.raises(UnsupportedError, match=f"{kind} 'x': {said}"):
                rank.submit(kind, "x", [array], outputs=[array.copy()], reduce_op=reduce_op, **factors)
        first = rank.submit("allreduce", "twice", [np.ones(3)], reduce_op=1)
        with pytest.raises(UsageError, match="'twice': a tensor of this name is being processed already"):
            rank.submit("allreduce", "twice", [np.ones(3)], reduce_op=1)
        with pytest.raises(UsageError, match="still running"):
            rank.context.release(first)
    rank.barrier()
    rank.finish(first) if rank.rank == 1 else rank.allreduce(np.ones(3), "twice")


@pytest.mark.parametrize(("hosts", "victim"), [([1, 1], 1), ([1, 1, 1], 0), ([2, 2], 2), ([1, 2], 0)], ids=str)
def test_a_rank_that_dies_while_segments_travel_is_named_and_lets_go_of_memory(hosts: list[int], victim: int) -> None:
    """The first segment has come and thousands are due, so that two are under way when the links break."""
    count, size = 1 << 22, sum(hosts)
    data = [np.empty(count, np.float32) for rank in range(size)]
    total = size * (size + 1) / 2

    def reduce_and_die(rank: Rank) -> None:
        data[rank.rank][:] = rank.rank + 1
        try:
            handle = rank.submit("allreduce", "x", [data[rank.rank]], reduce_op=SUM)
            if rank.rank == victim:
                wait_for(lambda: data[victim][0] == total)
                group.kill(victim)
            rank.finish(handle)
        except GroupError:
            data[rank.rank][:] = -1  # its own again: nothing may still arrive here
            raise

    def expect_death(rank: Rank) -> None:
        with pytest.raises(GroupError) as caught:
            while True:  # where the victim is scheduled so late that all has come, the next operation meets its death
                reduce_and_die(rank)
        group.await_kill(victim)
        group.kill(rank.rank)  # a script that ends; so those hear of it that have no link to the victim
        if rank.rank != victim:
            assert isinstance(caught.value, PeerLostError)
            assert f"rank {victim} (host" in str(caught.value)

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(expect_death)
        assert all((array == -1).all() for array in data)


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
