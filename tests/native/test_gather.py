"""Collectives that move data: allgather and alltoall; reduce, gather and scatter, of which only the root has it all.

Rows travel with the announcement of an allgather, so that nothing but the rows moves afterwards.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import native_build
import numpy as np
import pytest
from ranks import NUMPY_OF_DTYPE, SUM, Group, Rank, describe, on_ranks, over_every_layout, rows_of, wait_for

from horo.core import context
from horo.core.context import Tensor
from horo.errors import MismatchError, PeerLostError, UsageError

DTYPES = (np.int32, np.uint8, np.float64)


def counters(rank: Rank) -> dict[str, int]:
    return rank.context.counters()


def row_count(rank: int, step: int, index: int) -> int:
    """Another one in each call, on each rank, for each tensor; none now and then, and in a step on most ranks."""
    return 0 if step == 3 and rank != 1 else random.Random(f"{rank} {step} {index}").choice([0, 1, 2, 7, 127, 128, 700])


def part(rank: int, step: int, index: int) -> np.ndarray:
    return np.full((row_count(rank, step, index), 1 + index % 3), rank + 3 * step + index, DTYPES[index % 3])


def whole(size: int, step: int, index: int) -> np.ndarray:
    return np.concatenate([part(r, step, index) for r in range(size)])


def room(rank: Rank, step: int, index: int, *, more: int = 0) -> np.ndarray:
    """For the whole result, and so many rows more."""
    result = whole(rank.size, step, index)
    return np.full((max(0, len(result) + more), *result.shape[1:]), 99, result.dtype)


def check_group(rank: Rank, step: int, tensors: int, *, caller_gives: bool = False) -> None:
    """One request of so many tensors."""
    inputs = [part(rank.rank, step, i) for i in range(tensors)]
    outputs = [room(rank, step, i) for i in range(tensors)] if caller_gives else inputs
    handle = rank.submit("allgather", f"group of {tensors}", inputs, outputs=outputs, into=caller_gives)
    rank.context.wait(handle)
    for i in range(tensors):
        data, first_dims = rank.context.take_result(handle, i)
        assert first_dims == [row_count(r, step, i) for r in range(rank.size)]
        if caller_gives:
            assert data is None and rank.context.take_result(handle, i) == (None, first_dims)
        result = outputs[i].tobytes() if caller_gives else bytes(data)
        assert result == whole(rank.size, step, i).tobytes()
    rank.context.release(handle)


@pytest.mark.parametrize("rows", [0, 1, 1000])
@on_ranks([1, 1])
def test_only_the_rows_themselves_travel_on_links_for_data(rank: Rank, rows: int) -> None:
    for _ in range(3):  # in full, then by id
        before = counters(rank)
        rank.barrier()
        rank.allgather(np.full((rows, 3), rank.rank, np.int32))
        rank.barrier()
        after = counters(rank)
        assert after["link_bytes"] - before["link_bytes"] == 12 * rows


@on_ranks([1, 1])
def test_an_allgather_takes_one_message_up_and_one_down(rank: Rank) -> None:
    """As a barrier does."""

    def sent_by(call: Callable[[], object]) -> int:
        before = counters(rank)["messages_sent"]
        for _ in range(10):
            call()
        return counters(rank)["messages_sent"] - before

    calls = rank.barrier, lambda: rank.allgather(np.zeros((rank.rank, 2)), "g")
    for call in calls:
        sent_by(call)
    rank.barrier("apart")
    assert [sent_by(call) for call in calls] == [10, 10]


@pytest.mark.parametrize(("hosts", "direct_bytes"), [([3], 1), ([1, 1], 0)], ids=str)
@on_ranks("hosts", "direct_bytes")
def test_a_group_may_have_thousands_of_tensors(rank: Rank) -> None:
    """Their extents take more bytes than a ring to the leader and one to the ranks have."""
    count = 40_000
    parts = {(rows, i): np.full(rows, i, np.uint8) for rows in range(3) for i in range(100)}
    for step in range(2):
        arrays = [parts[(i + rank.rank + step) % 3, i % 100] for i in range(count)]
        handle = rank.submit("allgather", "g", arrays)
        rank.context.wait(handle)
        for i in (0, 1, 777, count - 1):
            data, first_dims = rank.context.take_result(handle, i)
            assert first_dims == [(i + r + step) % 3 for r in range(rank.size)]
            assert bytes(data) == bytes([i % 100]) * sum(first_dims)
        rank.context.release(handle)


def gather(rank: Rank, shapes: Sequence[tuple[int, ...]], dtype: str) -> list[int]:
    """On memory that nobody may touch; the first extents of the last tensor."""
    tensors = [context.Tensor(64, 64, shape, context.DTYPES[dtype]) for shape in shapes]
    handle = rank.context.submit(context.RequestBuffer.of(context.OPS["allgather"], "huge", tensors))
    try:
        rank.context.wait(handle)
        return list(rank.context.take_result(handle, len(shapes) - 1)[1])
    finally:
        rank.context.release(handle)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1 << 62,), "uint8"), ((1 << 59, 1), "float64"), ((1 << 62, 0), "int32")], ids=str
)
@on_ranks([2], [1, 1], [2, 1])
def test_more_rows_than_a_result_can_have_are_refused_by_all(rank: Rank, shape: tuple[int, ...], dtype: str) -> None:
    for _ in range(2):
        with pytest.raises(
            UsageError, match=rf"'huge': the rows of all {rank.size} ranks .* of tensor 1 of the group larger"
        ):
            gather(rank, [(0, *shape[1:]), shape], dtype)
        check_group(rank, 1, 3)
    rows = [5] * (rank.size - 1)  # as many as it can have
    rows.append(2**63 - 1 - sum(rows))
    assert gather(rank, [(rows[rank.rank], 0)], "float32") == rows
    tensor = context.Tensor(64, 64, (1 << 62, 0), context.DTYPES["float32"])
    splits = tuple((1 << 62) * (other == 0) for other in range(rank.size))
    request = context.RequestBuffer.of(context.OPS["alltoall"], "huge", [tensor._replace(splits=splits)])
    with pytest.raises(UsageError, match=rf"'huge': the rows of all {rank.size} ranks .* larger"):
        rank.finish(rank.context.submit(request))
    rank.barrier()


@over_every_layout
@pytest.mark.parametrize(("cache_capacity", "direct_bytes"), [*itertools.product([0, 1, 64], [0, 1])])
@on_ranks("host_of_rank", "cache_capacity", "direct_bytes")
def test_first_extents_may_differ_each_time_under_one_name(rank: Rank, cache_capacity: int) -> None:
    """Two names: with room for one of them, the other one is announced in full each time."""
    for step in range(6):
        for tensors in (1, 4):
            check_group(rank, step, tensors)
            check_group(rank, step, tensors, caller_gives=True)
    assert (counters(rank)["cache_hits"] > 0) == (cache_capacity > 0)


@pytest.mark.parametrize("rows", [3, 100_000])
@pytest.mark.parametrize("direct_bytes", [0, 1], ids=["by slots", "direct"])
@on_ranks([1], [3], [1, 1], [2, 2], [1, 1, 1], "direct_bytes")
def test_the_input_may_be_its_own_place_in_the_result(rank: Rank, rows: int) -> None:
    for step in range(2):
        output = np.full((rank.size * rows, 2), -1, np.int64)
        mine = output[rank.rank * rows : (rank.rank + 1) * rows]
        mine[:] = rank.rank + step
        request = context.RequestBuffer.of(
            context.OPS["allgather"], "g", describe([mine], [output]), sync=True, into=True
        )
        rank.context.run(request)
        assert (output[:, 1] == np.repeat(np.arange(rank.size), rows) + step).all()


@pytest.mark.parametrize("more", [-5000, -1, 1, 5000])
@on_ranks([2], [1, 1], [2, 1, 2])
def test_an_output_of_another_length_fails_on_its_rank_alone(rank: Rank, more: int) -> None:
    odd = rank.rank == 1
    for step in range(1, 4):
        inputs = [part(rank.rank, step, i) for i in range(3)]
        if more < 0 and len(whole(rank.size, step, 1)) == 0:
            continue
        outputs = [room(rank, step, 0), room(rank, step, 1, more=more if odd else 0), room(rank, step, 2)]
        handle = rank.submit("allgather", "g", inputs, outputs=outputs, into=True)
        if odd:
            wanted, there = whole(rank.size, step, 1).nbytes, outputs[1].nbytes
            said = f"allgather 'g': the result of tensor 1 of the group has {wanted} bytes, but its output has {there}$"
            wait_for(lambda handle=handle: rank.context.poll(handle))  # type: ignore[misc]  # what was refused is done
            with pytest.raises(UsageError, match=said):
                rank.context.wait(handle)
            with pytest.raises(UsageError):
                rank.context.take_result(handle, 0)
            assert (outputs[1] == 99).all()
        else:
            rank.context.wait(handle)
            for i, output in enumerate(outputs):
                assert np.array_equal(output, whole(rank.size, step, i))
        rank.context.release(handle)
        with pytest.raises(UsageError, match=f"Handle {handle} was not created or has been cleared"):
            rank.context.poll(handle)
        check_group(rank, step, 2)


@pytest.mark.parametrize("hosts", [[1, 1], [1, 2]], ids=str)
def test_memory_that_was_given_is_left_alone_after_a_death(hosts: list[int]) -> None:
    outputs = [np.full(sum(hosts) << 20, 7, np.uint8) for _ in range(sum(hosts))]

    def gather_once(rank: Rank, step: int) -> None:
        before = counters(rank)["link_bytes"]
        mine = np.full(1 << 20, step % 256, np.uint8)
        handle = rank.submit("allgather", "g", [mine], outputs=[outputs[rank.rank]], into=True)
        if rank.rank == 0 and step == 3:
            wait_for(lambda: counters(rank)["link_bytes"] > before + 100_000 or rank.context.poll(handle))
            rank.group.kill(0)
        rank.finish(handle)

    def body(rank: Rank) -> None:
        with pytest.raises(PeerLostError):
            for step in range(1_000_000):
                gather_once(rank, step)

    with Group(hosts, segment_bytes=1 << 12) as group:
        group.run(body)
        copies = [output.copy() for output in outputs]
    assert all(np.array_equal(*pair) for pair in zip(copies, outputs, strict=True))


@dataclass(frozen=True)
class Plan:
    """How many rows of how many columns each has for each, and what is in them."""

    rows: list[list[int]]
    columns: int = 1
    dtype: type = np.int32

    def block(self, origin: int, destination: int) -> np.ndarray:
        """Other values in each, and in each row."""
        rows = self.rows[origin][destination]
        values = np.arange(rows * self.columns) % 97 + 7 * origin + 3 * destination
        return values.reshape(rows, self.columns).astype(self.dtype)

    def given(self, rank: int) -> np.ndarray:
        return np.concatenate([self.block(rank, other) for other in range(len(self.rows))])

    def wanted(self, rank: int) -> np.ndarray:
        return np.concatenate([self.block(other, rank) for other in range(len(self.rows))])


def check(rank: Rank, plans: Sequence[Plan], name: str = "a") -> None:
    inputs = [plan.given(rank.rank) for plan in plans]
    tensors = [
        tensor._replace(splits=tuple(plan.rows[rank.rank]))
        for tensor, plan in zip(describe(inputs, inputs), plans, strict=True)
    ]
    handle = rank.context.submit(context.RequestBuffer.of(context.OPS["alltoall"], name, tensors))
    rank.context.wait(handle)
    for i, plan in enumerate(plans):
        data, received = rank.context.take_result(handle, i)
        assert received == [rows[rank.rank] for rows in plan.rows]
        wanted = plan.wanted(rank.rank)
        assert np.array_equal(np.frombuffer(data, plan.dtype).reshape(wanted.shape), wanted)
    rank.finish(handle)


def random_plan(size: int, seed: int, dtype: type = np.int32) -> Plan:
    """Any numbers of rows, many of them none."""
    draw = random.Random(seed)
    choices = draw.choice([[0, 1, 2], [0, 0, 0, 5000], [3], [0, 1, 700, 129], [1, 64, 65]])
    return Plan([[draw.choice(choices) for _ in range(size)] for _ in range(size)], draw.choice([1, 2, 5]), dtype)


@pytest.mark.parametrize(
    "host_of_rank",
    [[*range(hosts), 0, hosts - 1] for hosts in (*range(2, 14), 16, 17, 23)],
    ids=lambda host_of_rank: f"{len(host_of_rank) - 2} hosts",
)
@on_ranks("host_of_rank", spin_us=0)
def test_every_host_reaches_every_other(rank: Rank) -> None:
    """Also those without a link, over others."""
    check(rank, [Plan([[1 + (s + 2 * d) % 5 for d in range(rank.size)] for s in range(rank.size)], 11)])
    check(rank, [random_plan(rank.size, step, dtype) for step, dtype in enumerate((np.uint8, np.float64, bool))])


@pytest.mark.parametrize(("hosts", "direct_bytes"), [([70], 1), ([33, 32], 0)], ids=str)
@on_ranks("hosts", "direct_bytes", segment_bytes=1 << 12, spin_us=0)
def test_many_ranks(rank: Rank) -> None:
    steps = 1 if native_build.FLAVOUR else 3  # so many threads share one interpreter that a sanitizer slows down
    for step in range(steps):
        check(rank, [random_plan(rank.size, step)])


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ((1, 1), "2 splits; 3 ranks take part"),
        ((1, 1, 1, 1), "4 splits; 3 ranks take part"),
        ((2, -1, 3), "split 1 is -1; it must be 0 or more"),
        ((2, 2, 2), "the splits up to number 1 are more than the .* rows of the tensor"),
        ((1, 0, 1), "1 of the 3 rows of the tensor are in no split"),
        ((), "3 of the 3 rows of the tensor are in no split"),
    ],
)
@on_ranks([3])
def test_wrong_splits_are_refused_where_they_are_submitted(rank: Rank, splits: tuple[int, ...], said: str) -> None:
    array = np.ones((sum(splits) if len(splits) in (2, 4) else 3, 2), np.float32)
    (tensor,) = describe([array], [array])
    with pytest.raises(UsageError, match=f"alltoall 'a': {said}"):
        rank.context.submit(context.RequestBuffer.of(context.OPS["alltoall"], "a", [tensor._replace(splits=splits)]))
    check(rank, [random_plan(3, 1)])


NULL = 0
SIZES = (0, 1, 5, 1000, 20_001)


def run(rank: Rank, op: str, name: str, tensors: Sequence[Tensor], **options: Any) -> None:
    rank.context.run(context.RequestBuffer.of(context.OPS[op], name, tensors, sync=True, **options))


def address(array: np.ndarray | None) -> int:
    return NULL if array is None else array.ctypes.data


def tensor(given: np.ndarray | None, got: np.ndarray | None, like: np.ndarray, wire: str | None = None) -> Tensor:
    """Of the shape and dtype of ``like``."""
    (described,) = describe([like], [like], [wire])
    return described._replace(input=address(given), output=address(got))


def reduce(rank: Rank, array: np.ndarray, root: int, name: str = "r", op: str = "sum", **options: Any) -> Any:
    """The result at the root, None elsewhere; where nothing is scaled, every other time into the input."""
    wire = options.pop("wire", None)
    kept, is_root = array.copy(), rank.rank == root
    got = np.full_like(array, 99) if is_root else None
    reduce_op = context.REDUCE_OPS[op]
    run(rank, "reduce", name, [tensor(array, got, array, wire)], root_rank=root, reduce_op=reduce_op, **options)
    assert np.array_equal(array, kept)
    target = array if is_root else None
    run(rank, "reduce", name, [tensor(array, target, array, wire)], root_rank=root, reduce_op=reduce_op, **options)
    assert np.array_equal(array, got if is_root else kept)
    return got


def blocks(rank: Rank, like: np.ndarray, root: int) -> np.ndarray | None:
    return np.full((rank.size, *like.shape), 99, like.dtype) if rank.rank == root else None


def numbered(rank: int, count: int, dtype: Any = np.float64) -> np.ndarray:
    return ((np.arange(count) + 7 * rank) % 100).astype(dtype)


@over_every_layout
@pytest.mark.parametrize(("segment_bytes", "direct_bytes"), [(1 << 12, 0), (1 << 18, 4096)])
@on_ranks("host_of_rank", "segment_bytes", "direct_bytes")
def test_any_root_and_group_over_any_layout(rank: Rank) -> None:
    """A group of one tensor of each size, and one of all of them and of other dtypes."""
    groups = [[("float64", size)] for size in SIZES]
    groups.append([("float32", 3), ("int64", 10), ("float64", 9001), ("float32", 0), ("float16", 11)])
    for step, kinds in enumerate(groups):
        mine = [numbered(rank.rank, count, dtype) for dtype, count in kinds]
        every = [np.stack([numbered(r, count, dtype) for r in range(rank.size)]) for dtype, count in kinds]
        for root in {0, step % rank.size, rank.size - 1}:
            got = [np.full_like(array, 99) if rank.rank == root else None for array in mine]
            tensors = [tensor(a, b, a) for a, b in zip(mine, got, strict=True)]
            run(rank, "reduce", f"r{step}", tensors, root_rank=root, reduce_op=context.REDUCE_OPS["max"])
            gathered = [blocks(rank, array, root) for array in mine]
            tensors = [tensor(a, b, a) for a, b in zip(mine, gathered, strict=True)]
            run(rank, "gather", f"g{step}", tensors, root_rank=root)
            received = [np.full_like(array, 99) for array in mine]
            tensors = [tensor(b, c, a) for a, b, c in zip(mine, gathered, received, strict=True)]
            run(rank, "scatter", f"s{step}", tensors, root_rank=root)
            for i, all_of_it in enumerate(every):
                assert np.array_equal(received[i], mine[i])
                if rank.rank == root:
                    assert np.array_equal(got[i], all_of_it.max(axis=0))
                    assert np.array_equal(gathered[i], all_of_it)


@pytest.mark.parametrize("dtype", sorted(NUMPY_OF_DTYPE))
@pytest.mark.parametrize(("hosts", "direct_bytes"), [([2], 1), ([3], 0), ([5], 1), ([1, 1], 0), ([2, 2], 1)], ids=str)
@on_ranks("hosts", "direct_bytes", segment_bytes=1 << 15)
def test_on_every_layout_the_bits_are_those_of_an_allreduce(rank: Rank, dtype: str) -> None:
    kind = np.dtype(NUMPY_OF_DTYPE[dtype])
    ops = ["sum", "min", "max", "product", *(["average"] if dtype != "bool" else [])]
    ops += ["band", "bor", "bxor"] if kind.kind != "f" else []
    forms: list[tuple[str, str | None, dict[str, float]]] = [(op, None, {}) for op in ops]
    if dtype == "float32":
        forms += [("average", None, {"prescale": 0.3, "postscale": 4.0}), ("sum", "float16", {})]
    for count, (op, wire, factors) in itertools.product((1, 9, 4097, 60_000), forms):
        values = (np.random.default_rng(rank.rank).standard_normal(count) * 3).astype(kind)
        name = f"{count} {wire} {factors}"
        whole = rank.allreduce(values.copy(), f"a{name}", op, wires=[wire], **factors)
        part = rank.reducescatter(values, f"s{name}", op, wires=[wire], **factors)
        assert np.array_equal(part, whole[rows_of(count, rank.size, rank.rank)], equal_nan=kind.kind == "f")
        got = reduce(rank, values, rank.size - 1, f"r{name}", op, wire=wire, **factors)
        assert got is None or np.array_equal(got, whole, equal_nan=kind.kind == "f")


@on_ranks([2], [4], [1, 2], direct_bytes=0)
def test_the_block_of_the_root_may_be_where_it_belongs(rank: Rank) -> None:
    every = np.stack([numbered(r, 3000) for r in range(rank.size)])
    whole = every.copy()
    mine = whole[rank.rank] if rank.rank == 1 else numbered(rank.rank, 3000)
    if rank.rank == 1:
        whole[:1] = 99
        whole[2:] = 99
    run(rank, "gather", "g", [tensor(mine, whole if rank.rank == 1 else None, mine)], root_rank=1)
    assert rank.rank != 1 or np.array_equal(whole, every)
    mine[:] = every[1] if rank.rank == 1 else 99
    run(rank, "scatter", "s", [tensor(whole if rank.rank == 1 else None, mine, mine)], root_rank=1)
    assert np.array_equal(mine, every[rank.rank])


@on_ranks([4], [1, 3], [2, 2])
def test_in_a_process_set_the_root_is_a_rank_of_the_job(rank: Rank) -> None:
    team = rank.add_team([1, 3])
    if rank.rank in {1, 3}:
        mine = numbered(rank.rank, 300)
        got = reduce(rank, mine.copy(), 3, team=team)
        gathered = np.full((2, 300), 99.0) if rank.rank == 3 else None
        run(rank, "gather", "g", [tensor(mine, gathered, mine)], root_rank=3, team=team)
        if gathered is not None:
            assert np.array_equal(gathered, np.stack([numbered(1, 300), numbered(3, 300)]))
            assert np.array_equal(got, numbered(1, 300) + numbered(3, 300))
        with pytest.raises(UsageError, match=r"gather 'g': root rank 0 is no member of process set 1"):
            run(rank, "gather", "g", [tensor(mine, gathered, mine)], root_rank=0, team=team)
    rank.barrier("end")


@on_ranks([3])
def test_with_a_rank_that_has_joined_they_fail(rank: Rank) -> None:
    one = np.ones(3)
    if rank.rank == 2:
        rank.context.finish(rank.context.start_join(0))
        return
    with pytest.raises(MismatchError, match="reduce 'r': rank 2 has joined and can neither send nor receive anything"):
        run(rank, "reduce", "r", [tensor(one, one, one)], reduce_op=SUM)
    rank.context.finish(rank.context.start_join(0))
