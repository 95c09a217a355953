"""Allgathers: what each rank gives travels with its announcement, so that nothing but the rows moves afterwards."""

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from ranks import Group, Rank, describe, on_ranks, over_every_layout, wait_for

from horo.core import context
from horo.errors import PeerLostError, UsageError

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
    return np.full((len(result) + more, *result.shape[1:]), 99, result.dtype)


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


@on_ranks([1, 1])
def test_as_many_rows_as_a_result_can_have_are_counted(rank: Rank) -> None:
    rows = [2**63 - 1 - 5, 5]
    assert gather(rank, [(rows[rank.rank], 0)], "float32") == rows


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


@pytest.mark.parametrize("more", [-1, 1, 5000])
@on_ranks([2], [1, 1], [2, 1, 2])
def test_an_output_of_another_length_fails_on_its_rank_alone(rank: Rank, more: int) -> None:
    odd = rank.rank == 1
    for step in range(1, 4):
        inputs = [part(rank.rank, step, i) for i in range(3)]
        if len(whole(rank.size, step, 1)) + more < 0:
            continue
        outputs = [room(rank, step, 0), room(rank, step, 1, more=more if odd else 0), room(rank, step, 2)]
        handle = rank.submit("allgather", "g", inputs, outputs=outputs, into=True)
        if odd:
            wanted, there = whole(rank.size, step, 1).nbytes, outputs[1].nbytes
            said = f"allgather 'g': the result of tensor 1 of the group has {wanted} bytes, but its output has {there}$"
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
        check_group(rank, step, 2)


@on_ranks([2])
def test_what_was_refused_is_done(rank: Rank) -> None:
    """A poll says so, and takes its error for no missing handle; a missing one is told apart."""
    arrays, nothing = [np.ones((1, 4), np.float32)], [np.zeros((0, 4), np.float32)]
    handle = rank.submit("allgather", "g", arrays, outputs=nothing, into=True)
    wait_for(lambda: rank.context.poll(handle))
    with pytest.raises(UsageError, match=r"its output has 0$"):
        rank.finish(handle)
    with pytest.raises(UsageError, match=f"Handle {handle} was not created or has been cleared"):
        rank.context.poll(handle)


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
