"""Small operations that are alone in their team: on one host ranks count themselves in, between hosts the announcements
carry the data; both mix with all else, and no bit differs.
"""

import itertools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from ranks import PATIENT, SUM, Group, Rank, describe, on_ranks, run_ranks, wait_for

from horo.core import context
from horo.errors import AbortedError, HoroError, MismatchError, PeerLostError, UsageError

TIMES = 300
"""More than the number of rounds that the word of a team can tell apart."""


def counted(rank: Rank) -> int:
    return rank.context.counters()["counted"]


def until_counted(rank: Rank, steps: Callable[[], None]) -> int:
    """Repeats the steps until one of them was counted, which takes that all ranks come within 10 ms."""
    deadline = time.monotonic() + 40
    while True:
        steps()
        goes_on = np.array([counted(rank) == 0 and time.monotonic() < deadline], np.int32)
        if rank.allreduce(goes_on, "goes on")[0] == 0:
            return counted(rank)


@on_ranks([2], spin_us=60_000_000, sleeps_under_contention=False)
def test_a_long_spin_counts_as_well_and_ends_with_the_time_of_its_wait(rank: Rank) -> None:
    """A minute, which a wait that heeded nothing else would take; ``HORO_SPIN_US`` may be a second."""
    assert until_counted(rank, lambda: allreduce(rank, 1, 3)) > 0
    if rank.rank == 0:
        handle = rank.submit("barrier", "late", [], sync=True)
        status = context.lib.horo_wait(rank.context._context, handle, 2, context.ffi.NULL, 0)
        rank.mark("has looked")
        assert status == context.lib.HORO_IN_PROGRESS
        rank.finish(handle)
    else:
        rank.await_mark("has looked", timeout_s=30)
        rank.barrier("late")


def allreduce(rank: Rank, step: int, count: int, name: str = "s", **options: Any) -> None:
    array = np.full(count, rank.rank + step % 5, np.float32)
    rank.run("allreduce", name, [array], reduce_op=SUM, **options)
    assert (array == sum(r + step % 5 for r in range(rank.size))).all()


def broadcast(rank: Rank, step: int, count: int) -> None:
    root = step % rank.size
    array = np.full(count, 100 * rank.rank + step, np.int64)
    rank.run("broadcast", f"b{root}", [array], root_rank=root)
    assert (array == 100 * root + step).all()


def reducescatter(rank: Rank, step: int, count: int) -> None:
    output = rank.reducescatter(np.full((rank.size, count), rank.rank + step, np.int32), "r", sync=True)
    assert (output == sum(r + step for r in range(rank.size))).all()


def allgather(rank: Rank, step: int, count: int) -> None:
    rows = (rank.rank + step) % 3 + count
    got, _ = rank.allgather(np.full((rows, 2), rank.rank, np.int16), sync=True)
    wanted = [r for r in range(rank.size) for _ in range((r + step) % 3 + count)]
    assert got[:, 0].tolist() == wanted


def alltoall(rank: Rank, step: int, count: int) -> None:
    splits = [(rank.rank + other + step) % 3 + count for other in range(rank.size)]
    values = np.repeat(np.arange(rank.size) * 10 + rank.rank, splits)
    tensor = describe([values], [values])[0]._replace(splits=splits, output=0, output_bytes=0)
    handle = rank.context.submit(context.RequestBuffer.of(context.OPS["alltoall"], "a", [tensor], sync=True))
    rank.context.wait(handle)
    data, _ = rank.context.take_result(handle, 0)
    rank.context.release(handle)
    wanted = [rank.rank * 10 + r for r in range(rank.size) for _ in range((r + rank.rank + step) % 3 + count)]
    assert np.frombuffer(data, values.dtype).tolist() == wanted


def into(op: str) -> Callable[[Rank, int, int], None]:
    """Into memory that the caller gives; in two of three steps ranks tell the same rows, and then one tells more."""

    def run(rank: Rank, step: int, count: int) -> None:
        rows = [count + (step % 3 == 2 and r == step % rank.size) for r in range(rank.size)]
        if op == "allgather":
            mine = np.full((rows[rank.rank], 2), 10 * rank.rank + step, np.int32)
            wanted = np.concatenate([np.full((rows[r], 2), 10 * r + step, np.int32) for r in range(rank.size)])
            splits: list[int] = []
        else:
            splits = [rows[rank.rank]] * rank.size
            mine = np.repeat(np.arange(rank.size, dtype=np.int32) * 10 + rank.rank + step, splits)
            wanted = np.repeat(np.arange(rank.size, dtype=np.int32) + rank.rank * 10 + step, rows)
        got = np.full_like(wanted, -1)
        tensor = describe([mine], [got])[0]._replace(splits=splits)
        rank.context.run(context.RequestBuffer.of(context.OPS[op], f"into {op}", [tensor], sync=True, into=True))
        assert np.array_equal(got, wanted)

    run.__name__ = f"{op} into"
    return run


def rooted(op: str) -> Callable[[Rank, int, int], None]:
    def run(rank: Rank, step: int, count: int) -> None:
        root = step % rank.size
        mine = np.full(count, rank.rank + step, np.int32)
        every = np.stack([np.full(count, r + step, np.int32) for r in range(rank.size)])
        shown = every.copy() if op == "scatter" else mine
        got = np.zeros_like(every if op == "gather" else mine)
        tensor = describe([mine], [mine])[0]._replace(input=shown.ctypes.data, output=got.ctypes.data)
        reduce_op = SUM if op == "reduce" else 0
        options = {"sync": True, "root_rank": root, "reduce_op": reduce_op}
        rank.context.run(context.RequestBuffer.of(context.OPS[op], f"{op}{root}", [tensor], **options))
        wanted = {"reduce": every.sum(axis=0), "gather": every, "scatter": mine}[op]
        assert (got == (wanted if rank.rank == root or op == "scatter" else 0)).all()

    run.__name__ = op
    return run


def barrier(rank: Rank, step: int, count: int) -> None:
    rank.run("barrier", "barrier", [])


OPERATIONS: list[Callable[[Rank, int, int], None]] = [
    allreduce, broadcast, reducescatter, allgather, alltoall, barrier, *map(rooted, ["reduce", "gather", "scatter"]),
    *map(into, ["allgather", "alltoall"]),
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize(("hosts", "count"), [*itertools.product([[2], [3]], [1, 1500, 40_000])])
@on_ranks("hosts", **PATIENT)
def test_each_operation_is_counted_and_right(rank: Rank, operation: Callable[..., None], count: int) -> None:
    times = TIMES if count < 40_000 else 20
    many = until_counted(rank, lambda: [operation(rank, step, count) for step in range(times)])
    assert many > 0 and rank.is_common("counted", many)


@pytest.mark.parametrize("op", ["allgather", "alltoall"])
@on_ranks([2], **PATIENT)
def test_an_output_that_only_fits_what_other_ranks_did_not_tell_is_left_alone(rank: Rank, op: str) -> None:
    rows = 3

    def step() -> None:
        into(op)(rank, 0, rows)
        more = rows + rank.rank
        splits = [more] * rank.size if op == "alltoall" else []
        mine = np.full((more * (rank.size if splits else 1), 2), rank.rank, np.int32)
        got = np.full((more * rank.size, 2), -1, np.int32)
        tensor = describe([mine], [got])[0]._replace(splits=splits)
        with pytest.raises(UsageError, match=f"the result has {8 * 7} bytes, but its output has {got.nbytes}"):
            rank.context.run(context.RequestBuffer.of(context.OPS[op], "odd", [tensor], sync=True, into=True))
        assert (got == -1).all()

    until_counted(rank, step)


@pytest.mark.parametrize(
    ("hosts", "spin_us", "cycle_time_us"),
    [((1, 1), 10_000, 0), ((2,), 0, 0), ((2,), 10_000, 100), ((1,), 10_000, 0)],
    ids=["hosts", "no spinning", "cycles", "one rank"],
)
@on_ranks("hosts", "spin_us", "cycle_time_us", sleeps_under_contention=False)
def test_where_nobody_counts_all_is_as_ever(rank: Rank) -> None:
    for step in range(20):
        allreduce(rank, step, 10)
    assert counted(rank) == 0


@on_ranks([2], **PATIENT)
def test_the_first_use_of_a_name_and_more_rows_than_there_is_room_for_are_told_to_the_leader(rank: Rank) -> None:
    for step in range(20):
        allreduce(rank, 0, 4, f"name {step}")
    arrays = [np.full(3, i, np.int32) for i in range(200)]
    for _ in range(5):
        tensors = describe(arrays, arrays)
        handle = rank.context.submit(context.RequestBuffer.of(context.OPS["allgather"], "g", tensors, sync=True))
        rank.context.wait(handle)
        for i, array in enumerate(arrays):
            data, _ = rank.context.take_result(handle, i)
            assert np.frombuffer(data, np.int32).tolist() == array.tolist() * rank.size
        rank.context.release(handle)
    assert counted(rank) == 0


@on_ranks([3], spin_us=200)
def test_a_rank_that_is_late_is_waited_for_asleep(rank: Rank) -> None:
    others = [context for r, context in enumerate(rank.group.contexts) if r != rank.rank]
    for step in range(10):
        if rank.rank == step % 3:
            before = [other.counters()["sleeps"] for other in others]
            rank.await_mark(step)
            for other, sleeps in zip(others, before, strict=True):
                wait_for(lambda other=other, sleeps=sleeps: other.counters()["sleeps"] > sleeps)  # type: ignore[misc]
        else:
            rank.mark(step)
        allreduce(rank, step, 10)


@on_ranks([2], **PATIENT)
def test_ranks_that_wait_for_different_operations_at_once_get_the_result_of_each(rank: Rank) -> None:
    for step in range(30):
        own = {"a": np.full(3, rank.rank + 1.0), "b": np.full(3, 10.0 * (rank.rank + 1))}
        handles = []
        for name in "ba" if rank.rank == 1 and step > 0 else "ab":  # both are known after the first step
            rank.meet()
            handles.append(rank.submit("allreduce", name, [own[name]], reduce_op=SUM, sync=True))
            context.lib.horo_wait(rank.context._context, handles[-1], 20, context.ffi.NULL, 0)
        rank.finish(*handles)
        assert (own["a"] == 3).all() and (own["b"] == 30).all()


@on_ranks([2], **PATIENT)
def test_places_in_the_log_are_told_apart_after_more_bytes_than_the_word_has_room_for(rank: Rank) -> None:
    for step in range(2600):
        rank.allreduce(np.ones(1, np.float32), f"{step} ".ljust(1000, "x"))
        if step % 100 == 0:
            for again in range(3):
                allreduce(rank, again, 4)
    many = until_counted(rank, lambda: allreduce(rank, 0, 4))
    assert many > 0 and rank.is_common("counted", many)


def test_teams_count_by_themselves() -> None:
    def body(rank: Rank) -> int:
        teams = [(rank.context.add_team(list(members)), members) for members in ((0, 1), (1, 2))]

        def steps() -> None:
            for step in range(20):
                allreduce(rank, step, 4, "all")
                for team, members in teams:
                    if rank.rank in members:
                        array = np.full(3, rank.rank, np.float32)
                        rank.run("allreduce", "some", [array], reduce_op=SUM, team=team)
                        assert (array == sum(members)).all()

        return until_counted(rank, steps)

    low, middle, high = run_ranks(body, (3,), **PATIENT)
    assert middle >= max(low, high) >= min(low, high) > 0


@pytest.mark.parametrize(
    ("how", "error"), [("leave", AbortedError), ("kill", PeerLostError), ("end", PeerLostError)], ids=str
)
@pytest.mark.parametrize("gone", [0, 1])
@on_ranks([3], **PATIENT)
def test_who_is_counted_in_is_told_of_a_rank_that_is_gone(
    rank: Rank, how: str, error: type[HoroError], gone: int
) -> None:
    for step in range(50):
        allreduce(rank, step, 4)
    rank.meet()  # one that still waits in the last step would get the error there
    if rank.rank != gone:
        with pytest.raises(error, match=f"rank {gone}"):
            allreduce(rank, 50, 4)
    elif how == "end":
        rank.context.end("it is over")
    else:
        (rank.group.leave if how == "leave" else rank.group.kill)(gone)


@on_ranks([2], cache_capacity=2, **PATIENT)
def test_a_name_in_use_keeps_its_id_while_others_come_and_go(rank: Rank) -> None:
    """There are two places for names. One name is used all the time, and each of the others once."""
    for name in ("used", "idle"):
        rank.allreduce(np.ones(1, np.float32), name)
    for step in range(400):
        rank.allreduce(np.ones(1, np.float32), f"newcomer {step}")
        before = rank.context.counters()["cache_hits"]
        rank.run("allreduce", "used", [np.ones(1, np.float32)], reduce_op=SUM)
        assert rank.context.counters()["cache_hits"] == before + 1


HOSTS = [[1, 1], [2, 2], [1, 1, 1], [3, 1, 2], [1, 3], [1, 1, 1, 1, 1]]
SEGMENT_BYTES = 1 << 16
LIMIT = 1 << 14
"""Bytes that one tensor may have to be carried, as tuning.carried of ``team.h``."""


def link_bytes(rank: Rank) -> int:
    """That this rank has handed to its links for data so far."""
    return rank.context.counters()["link_bytes"]


def warm_up(rank: Rank, name: str, array: np.ndarray, **options: Any) -> None:
    """Afterwards the tensor is known by its id, and nothing is under way anywhere."""
    for _ in range(2):
        rank.allreduce(array.copy(), name, **options)
        rank.barrier()


@pytest.mark.parametrize("count", [1, 3, 1000, LIMIT // 4])
@on_ranks(*HOSTS)
def test_a_lone_small_tensor_needs_no_link_for_data(rank: Rank, count: int) -> None:
    warm_up(rank, "x", np.ones(count, np.float32))
    before = link_bytes(rank)
    for step in range(20):
        array = np.arange(count, dtype=np.float32) + rank.rank + step
        rank.allreduce(array, "x")
        wanted = rank.size * (np.arange(count) + step) + rank.size * (rank.size - 1) / 2
        assert (array == wanted).all()
    assert link_bytes(rank) == before
    if rank.size == 2:  # each has a link
        warm_up(rank, "large", np.ones(LIMIT // 4 + 1, np.float32))
        before = link_bytes(rank)
        assert (rank.allreduce(np.ones(LIMIT // 4 + 1, np.float32), "large") == rank.size).all()
        assert link_bytes(rank) > before


@pytest.mark.parametrize("busy", [0, 1])
@on_ranks([1, 1], [2, 1], [1, 1, 1])
def test_data_that_only_some_carry_or_of_a_round_that_failed_is_dropped(rank: Rank, busy: int) -> None:
    """One rank has another operation under way when it comes to the small one, in every second step."""
    warm_up(rank, "x", np.ones(5, np.float32))
    for step in range(60):
        rank.meet()
        array = np.full(5, rank.rank + step, np.float32)
        other = np.full(3000, step, np.float32)
        calls = [("other", other), ("x", array)][:: 1 if rank.rank == busy else -1] if step % 2 else [("x", array)]
        rank.finish(*[rank.submit("allreduce", name, [value], reduce_op=SUM) for name, value in calls])
        assert (array == rank.size * step + rank.size * (rank.size - 1) / 2).all()
        assert (other == step * (rank.size if step % 2 else 1)).all()
    for step in range(30):
        with pytest.raises(MismatchError, match="'x'"):
            rank.allreduce(np.full(6 if rank.rank == busy else 5, 100 + step, np.float32), "x")
        assert (rank.allreduce(np.full(5, step, np.float32), "x") == rank.size * step).all()


@pytest.mark.parametrize(("hosts", "is_carried"), [([2], False), ([2, 1], True)], ids=str)
def test_a_tensor_alone_on_one_host_is_not_carried(native: ModuleType, hosts: list[int], is_carried: bool) -> None:
    """There the arena is quicker: what rank 1 writes to its leader is an announcement, which has no data."""
    data, steps = np.ones(1000, np.float32), 10

    def written(group: Group) -> int:
        memory = native.ffi.cast("void *", group.arena_address(0))
        return int(native.lib.shim_arena_requests_written(memory, 2, SEGMENT_BYTES, 1))

    def body(rank: Rank) -> None:
        for _ in range(steps):
            array = data.copy()
            rank.finish(rank.submit("allreduce", "x", [array], reduce_op=1))  # by what waits, it would be counted
            assert (array == rank.size).all()
            rank.barrier()

    with Group(hosts, segment_bytes=SEGMENT_BYTES) as group:
        group.run(lambda rank: warm_up(rank, "x", data))
        before = written(group)
        group.run(body)
        sent = written(group) - before
    assert steps * 4 <= sent
    assert (sent >= steps * data.nbytes) == is_carried, sent


COUNT = 300
SCALED = {"prescale": 0.3, "postscale": 0.7}


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [3, 1], [1, 2]], ids=str)
@pytest.mark.parametrize(
    ("op", "options"),
    [("average", {}), ("sum", SCALED), ("product", {}), ("product", SCALED)],
    ids=["average", "scaled sum", "product", "scaled product"],
)
@pytest.mark.parametrize("spread", [1, 1e-5], ids=str)
@pytest.mark.parametrize(
    "form", [("float16", None), ("float32", "bfloat16"), ("float32", None), ("complex64", None)], ids=str
)
@on_ranks("hosts", cache_capacity=8)
def test_the_bits_do_not_depend_on_the_path(
    rank: Rank, *, hosts: list[int], op: str, options: dict[str, float], spread: float, form: tuple[str, str | None]
) -> None:
    """On all ranks, in a batch and carried."""
    dtype, wire = form
    random = np.random.default_rng(7)
    turn = np.exp(1j * np.arange(COUNT)) if dtype.startswith("complex") else 1
    inputs = [(random.standard_normal(COUNT) * turn * spread).astype(dtype) for _ in range(sum(hosts))]
    wanted = {"wires": [wire], "reduce_op": context.REDUCE_OPS[op], **options}

    def reduce(*names: str) -> bytes:
        arrays = [inputs[rank.rank].copy() for _ in names]
        pairs = zip(names, arrays, strict=True)
        rank.finish(*[rank.submit("allreduce", name, [array], **wanted) for name, array in pairs])
        return arrays[-1].tobytes()

    other = rank.group.contexts[hosts[0]]  # the leader of the other host
    for name in ("x", "y"):
        reduce(name)
    rank.barrier()
    assert rank.is_common("bits", reduce("y", "x"))  # two at once are not carried
    rank.meet()
    before = other.counters()["messages_sent"]
    rank.meet()
    if rank.rank == hosts[0] - 1:  # so the other host's data is at the root before that of all its own ranks
        wait_for(lambda: other.counters()["messages_sent"] > before)
    assert rank.is_common("bits", reduce("x"))


@on_ranks([1, 1], [1, 1, 1])
def test_data_is_that_of_the_call_that_carries_it(rank: Rank) -> None:
    """Calls without names that look alike have one id. Others make the second one while the first comes to its end."""
    for step in range(1500):
        arrays = [np.array([2 * step + call + rank.rank]) for call in range(2)]
        handles = []
        for array in arrays:
            handles.append(rank.submit("allreduce", None, [array], reduce_op=SUM))  # type: ignore[arg-type]
            if rank.rank == 0:
                rank.context.wait(handles[-1])
            else:
                sum(range(step % 300))  # some time
        rank.finish(*handles)
        size = rank.size
        assert [array[0] for array in arrays] == [
            (2 * step + call) * size + size * (size - 1) // 2 for call in range(2)
        ], step
