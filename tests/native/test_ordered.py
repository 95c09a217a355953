"""Calls without names: matched by their number in the team, run in their order, and compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from ranks import PATIENT, SUM, Rank, describe, on_ranks, over_every_layout

from horo.core import context
from horo.errors import HoroError, MismatchError, UnsupportedError, UsageError


def submit(rank: Rank, op: str, array: np.ndarray, output: np.ndarray | None = None, **options: Any) -> int:
    return rank.submit(op, None, [array], outputs=None if output is None else [output], **options)  # type: ignore[arg-type]


def run(rank: Rank, op: str, *arrays: np.ndarray, **options: Any) -> None:
    rank.run(op, None, arrays, **options)  # type: ignore[arg-type]


def allreduce(rank: Rank, array: np.ndarray, **options: Any) -> np.ndarray:
    run(rank, "allreduce", array, reduce_op=SUM, **options)
    return array


@pytest.mark.parametrize("cache_capacity", [0, 3, 1024])
@over_every_layout
@on_ranks("host_of_rank", "cache_capacity")
def test_many_at_once_of_all_kinds_among_named_ones(rank: Rank) -> None:
    """All ranks draw the same calls; each has its own way of waiting for them: some one after the other, or many."""
    drawn, own = random.Random(rank.size), random.Random(rank.rank)
    pending: list[tuple[int, np.ndarray, np.ndarray]] = []
    for step in range(300):
        op = drawn.choice(["allreduce", "allreduce", "broadcast", "reduce", "gather", "allgather", "named", "barrier"])
        count, root = drawn.choice([1, 2, 3, 700, 3000]), drawn.randrange(rank.size)
        every = np.stack([np.full(count, r + step, np.int32) for r in range(rank.size)])
        mine = every[rank.rank].copy()
        if op == "barrier":
            run(rank, "barrier")
        elif op in {"allreduce", "named"}:
            name = f"n{step % 9}-{step // 9 % 2}" if op == "named" else None
            if name is not None:
                finish(rank, pending)
            handle = rank.submit("allreduce", name, [mine], reduce_op=SUM)  # type: ignore[arg-type]
            pending.append((handle, mine, every.sum(axis=0)))
        elif op == "broadcast":
            pending.append((submit(rank, op, mine, root_rank=root), mine, every[root]))
        elif op == "allgather":
            got = np.zeros((rank.size, count), np.int32)
            tensors = [describe([mine[None]], [got])[0]._replace(output_bytes=got.nbytes)]
            buffer = context.RequestBuffer.of(context.OPS[op], None, tensors, into=True)
            handle = rank.context.submit(buffer)
            rank._kept[handle] = mine, got
            pending.append((handle, got, every))
        else:
            got = np.zeros_like(every if op == "gather" else mine)
            reduce_op = SUM if op == "reduce" else 0
            handle = submit(rank, op, mine, got, root_rank=root, reduce_op=reduce_op)
            wanted = every.sum(axis=0) if op == "reduce" else every
            pending.append((handle, got, wanted if rank.rank == root else np.zeros_like(got)))
        if step > 200 or own.random() < 0.15:
            finish(rank, pending)
    finish(rank, pending)


def finish(rank: Rank, pending: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
    for handle, got, wanted in pending:
        rank.finish(handle)
        assert np.array_equal(got, wanted)
    pending.clear()


@on_ranks([2], [1, 2])
def test_they_run_in_the_order_of_the_calls(rank: Rank) -> None:
    """Each uses what the one before has left, and nobody waits between."""
    array, other = np.full(1000, rank.rank, np.int64), np.full(7, 1.0)
    handles = []
    for _ in range(20):
        handles += [
            submit(rank, "broadcast", array, root_rank=1),
            submit(rank, "allreduce", other, reduce_op=context.REDUCE_OPS["max"]),
            submit(rank, "allreduce", array, reduce_op=SUM),
        ]
    rank.finish(*handles)
    assert (array == rank.size**20).all()


CALLS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("allreduce", (4,), {"reduce_op": SUM}, "allreduce(float32 [4], Sum)"),
    ("allreduce", (5,), {"reduce_op": SUM}, "allreduce(float32 [5], Sum)"),
    ("broadcast", (4,), {"root_rank": 1}, "broadcast(float32 [4], root 1)"),
    ("reduce", (4,), {"root_rank": 1, "reduce_op": SUM}, "reduce(float32 [4], Sum, root 1)"),
]


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("other", [1, 2, 3])
@on_ranks([2], [3], [1, 1], [1, 2])
def test_different_calls_of_one_number_fail_on_all_and_the_next_is_whole(rank: Rank, before: int, other: int) -> None:
    def call(number: int) -> None:
        op, shape, options, _ = CALLS[number]
        run(rank, op, np.ones(shape, np.float32), **options)

    for _ in range(before):
        for number in range(4):
            call(number)
    for step in range(3):
        with pytest.raises(MismatchError) as raised:
            call(other if rank.rank == 1 else 0)
        number = 4 * before + 2 * step + 1
        text, one, two = str(raised.value), CALLS[0][3], CALLS[other][3]
        assert text.startswith(f"call {number}: rank ") and f"calls {one}" in text and "rank 1 (host" in text, text
        assert f"calls {two}" in text
        call(0)


@on_ranks([2], [1, 1], [3])
def test_a_mismatch_among_many_that_are_pending_hits_its_number_alone(rank: Rank) -> None:
    for _ in range(4):
        arrays = [np.ones(3 if rank.rank == 0 and i == 5 else 2, np.float32) for i in range(10)]
        handles = [submit(rank, "allreduce", array, reduce_op=SUM) for array in arrays]
        for i, handle in enumerate(handles):
            if i == 5:
                with pytest.raises(MismatchError, match=r"float32 \[3\].*float32 \[2\]"):
                    rank.finish(handle)
            else:
                rank.finish(handle)
                assert (arrays[i] == rank.size).all()


@on_ranks([2], [1, 1])
def test_a_call_that_one_rank_has_refused_takes_its_number(rank: Rank) -> None:
    for _ in range(3):
        allreduce(rank, np.ones(2))
        if rank.rank == 0:
            with pytest.raises(UnsupportedError, match="allreduce 'ordered call': this op is not offered for float8"):
                broken = describe([np.ones(2)], [np.ones(2)])[0]._replace(dtype=context.DTYPES["float8_e5m2"])
                rank.context.submit(context.RequestBuffer.of(0, None, [broken], reduce_op=SUM))
            rank.context.refuse(0, None, UsageError("it is Sunday"))
        else:
            with pytest.raises(UnsupportedError, match=r"rank 0 \(host0\) has refused it: .*float8"):
                allreduce(rank, np.ones(2))
            with pytest.raises(UsageError, match=r"rank 0 \(host0\) has refused it: it is Sunday"):
                allreduce(rank, np.ones(2))
    rank.barrier()


@on_ranks([3], [1, 2])
def test_a_process_set_counts_its_own_calls(rank: Rank) -> None:
    """With a rank that has joined, calls fail, and go on afterwards."""
    team = rank.add_team([0, 2])
    for step in range(20):
        allreduce(rank, np.ones(2))
        if rank.rank != 1:
            assert (allreduce(rank, np.full(2, step), team=team) == 2 * step).all()
    for _ in range(3):
        allreduce(rank, np.ones(2))
        if rank.rank != 2:
            with pytest.raises(MismatchError, match="rank 2 has joined, and ordered calls need all ranks"):
                allreduce(rank, np.ones(2))
        rank.context.finish(rank.context.start_join(0))
        assert (allreduce(rank, np.ones(2)) == 3).all()


@on_ranks([2], [3], [1, 1], [2, 1, 2])
def test_those_from_before_a_join_are_done(rank: Rank) -> None:
    for _ in range(20):
        array = np.ones(3, np.int64)
        handles = [submit(rank, "allreduce", array, array, reduce_op=SUM), rank.context.start_join(0)]
        for handle in handles:
            rank.context.finish(handle)
        assert (array == rank.size).all()


@on_ranks([2], [3], **PATIENT)
def test_alone_they_are_counted_without_a_leader(rank: Rank) -> None:
    buffer = context.RequestBuffer()
    array = np.zeros(4, np.float32)
    buffer.set_name(None)
    buffer.fill(context.OPS["allreduce"], describe([array], [array]), reduce_op=SUM, sync=True)
    for step in range(2000):
        array[:] = step % 100
        rank.context.run(buffer)
        assert (array == rank.size * (step % 100)).all()
        if step % 500 == 0:
            run(rank, "broadcast", array, root_rank=1)
    counted = rank.context.counters()["counted"]
    assert counted > 0 and rank.is_common("counted", counted)


@on_ranks([1, 1], **PATIENT)
def test_between_hosts_small_ones_carry_their_data(rank: Rank) -> None:
    for step in range(300):
        assert (allreduce(rank, np.full(3, step)) == 2 * step).all()
    assert rank.context.counters()["link_bytes"] < 300 * 24


@on_ranks([2], cache_capacity=4)
def test_forms_that_come_once_take_no_id_from_those_that_come_again(rank: Rank) -> None:
    names = [f"n{i}" for i in range(6)]
    for step in range(50):
        allreduce(rank, np.ones(1000 + step))
        hits = rank.context.counters()["cache_hits"]
        for _ in range(3):
            allreduce(rank, np.ones(2))
        if step > 1:
            assert rank.context.counters()["cache_hits"] == hits + 3
        for name in names:
            rank.allreduce(np.ones(2), name)


@on_ranks([2])
def test_a_lost_rank_ends_those_that_are_pending(rank: Rank) -> None:
    if rank.rank == 1:
        rank.await_mark("has submitted")
        rank.group.kill(1)
        return
    handles = [submit(rank, "allreduce", np.ones(2), reduce_op=SUM) for _ in range(5)]
    rank.mark("has submitted")
    for handle in handles:
        with pytest.raises(HoroError, match="rank 1"):
            rank.finish(handle)
