"""Large allreduces of tensors on a GPU flow: pieces are reduced, and return, while others are on their way."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, captured_by_rank_0
from ranks import NUMPY_OF_DTYPE, Group, Rank, describe, recorded_stderr, wait_for
from test_teams import Links, hosts_of

from horo import _core
from horo._core_libraries import copy_back
from horo.errors import GroupError, ResourceError, StalledError

PIECE = 2 << 20
LENGTH = 3 * PIECE // 4 + 777
"""Of float32: three pieces and a bit, so there are four copies."""
FRONT = PIECE // 4
"""Values of the first piece."""
HOSTS = [(2,), (3,), (1, 1), (2, 1), (1, 1, 1)]
REASON = "the copy from the GPU failed with code 719: unspecified launch failure"
HINT = "if a kernel of the program is at fault, a run with CUDA_LAUNCH_BLOCKING=1 shows which"
LOST = f"an error on GPU 0 that lost the values of allreduce 'x': {REASON}; {HINT}"


def values(rank: int, length: int = LENGTH) -> np.ndarray:
    return np.resize(np.arange(1000, dtype=np.float32), length) + rank


def total(size: int, length: int = LENGTH) -> np.ndarray:
    return size * values(0, length) + size * (size - 1) / 2


def await_return(gpu: Gpu, target: int, size: int) -> None:
    """Until the first piece is back on the GPU, where two have come from there; the last one is not."""
    wait_for(lambda: gpu.copies() >= 3)
    np.testing.assert_array_equal(gpu.get(target, np.zeros(FRONT, np.float32)), total(size)[:FRONT])
    assert gpu.get(target + 4 * (LENGTH - 1), np.zeros(1, np.float32)).tolist() == [-1]


def has_begun(rank: Rank, name: str = "x") -> bool:
    return any(event.event == "begun" and event.name == name for event in rank.context.events())


# ---- Overlap ----


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_the_first_piece_is_reduced_and_returns_while_others_have_not_been_copied(
    gpu: Gpu, hosts: tuple[int, ...]
) -> None:
    size = sum(hosts)
    seen = threading.Barrier(size)
    gpu.let_copies(0)

    def body(rank: Rank) -> np.ndarray:
        array = values(rank.rank)
        if rank.rank > 0:
            handle = rank.submit("allreduce", "x", [array], reduce_op=SUM)
            wait_for(lambda: bool((array[:FRONT] == total(size)[:FRONT]).all()))
            assert array[-1] == values(rank.rank)[-1]
            seen.wait(60)
            rank.finish(handle)
            return array
        own = OnGpu(rank, gpu)
        output = np.full(LENGTH, -1, np.float32)
        handle, source, target = own.submit("allreduce", "x", array, output, reduce_op=SUM)
        assert not rank.context.poll(handle)
        gpu.let_copies(2)
        await_return(gpu, target, size)
        seen.wait(60)
        assert not rank.context.poll(handle)
        gpu.let_copies(-1)
        own.finish(handle)
        gpu.synchronize(own.stream)
        own.close()
        np.testing.assert_array_equal(gpu.get(source, array), array)
        return gpu.get(target, output)

    with Group(hosts) as group:
        for result in group.run(body):
            np.testing.assert_array_equal(result, total(size))


def test_values_are_taken_behind_the_programs_work_and_it_goes_on_behind_the_result(gpu: Gpu) -> None:
    def body(rank: Rank) -> np.ndarray:
        own = OnGpu(rank, gpu)
        array = values(rank.rank)
        gate = gpu.hold(own.stream)
        handle, source, _ = own.submit("allreduce", "x", array - 1, reduce_op=SUM)
        assert not rank.context.poll(handle)
        gpu.open(gate)
        own.finish(handle)
        gpu.add(own.stream, source, array, 2)
        gpu.synchronize(own.stream)
        own.close()
        return gpu.get(source, array)

    with Group((2,)) as group:
        for result in group.run(body):
            np.testing.assert_array_equal(result, total(2))


def test_it_is_announced_when_its_first_piece_has_come(gpu: Gpu) -> None:
    gpu.let_copies(0)

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            rank.allreduce(values(1))
            return
        own = OnGpu(rank, gpu)
        handle, _, _ = own.submit("allreduce", "x", values(0), reduce_op=SUM)
        assert not has_begun(rank)
        gpu.let_copies(1)
        wait_for(lambda: has_begun(rank))
        gpu.let_copies(-1)
        own.finish(handle)
        own.close()
        kinds = [event.event for event in rank.context.events() if event.name == "x"]
        assert kinds == ["submitted", "agreed", "begun", "ended"], "it is one request"

    with Group((2,)) as group:
        group.run(body)


def test_other_teams_go_on_while_a_batch_waits_for_a_copy(gpu: Gpu) -> None:
    links = Links(hosts_of((1, 2)))
    gpu.let_copies(0)

    def body(rank: Rank) -> None:
        team = rank.context.add_team([0, 1], **links.of(rank.rank, [0, 1], 0))
        array = values(rank.rank)
        own = OnGpu(rank, gpu) if rank.rank == 0 else None
        if own is not None:
            handle, _, _ = own.submit("allreduce", "x", array, reduce_op=SUM)
            gpu.let_copies(1)
        else:
            handle = rank.submit("allreduce", "x", [array], reduce_op=SUM)
        wait_for(lambda: has_begun(rank))
        for step in range(20 if rank.rank < 2 else 0):
            assert rank.allreduce(np.full(100_000, step, np.float32), "y", team=team)[-1] == 2 * step
        assert not rank.context.poll(handle)
        if own is not None:
            rank.barrier("looked", team=team)
            gpu.let_copies(-1)
            own.finish(handle)
            own.close()
            return
        if rank.rank == 1:
            rank.barrier("looked", team=team)
        rank.finish(handle)
        np.testing.assert_array_equal(array, total(3))

    with Group((1, 2)) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_many_at_once_flow_in_process_sets_and_fused_with_others(gpu: Gpu, hosts: tuple[int, ...]) -> None:
    links = Links(hosts_of(hosts))

    def body(rank: Rank) -> None:
        team = rank.context.add_team([0, 1], **links.of(rank.rank, [0, 1], 0))
        own = OnGpu(rank, gpu)
        lengths = [10, PIECE // 4 * 2, 3, LENGTH, PIECE // 4 * 2 + 1, 1000]
        for step in range(2):
            begun = []
            for number, length in enumerate(lengths):
                options = {"team": team if number % 2 else 0, "reduce_op": SUM}
                begun.append(own.submit("allreduce", f"x{number}", values(rank.rank + step, length), **options))
            for handle, _, _ in reversed(begun):
                own.finish(handle)
            gpu.synchronize(own.stream)
            for (_, source, _), length in zip(begun, lengths, strict=True):
                np.testing.assert_array_equal(gpu.get(source, values(0, length)), total(2, length) + 2 * step)
        own.close()

    with Group(hosts, fusion_bytes=32 << 20) as group:
        group.run(body)
    assert gpu.counts()["pinned_ever"] <= 2 * 2 * 6


# ---- Numbers ----


@pytest.mark.parametrize("hosts", [(2,), (3,), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("extra", [-1, 0, 1, PIECE // 4 - 1, PIECE // 4, PIECE // 4 + 1, 100_003])
def test_lengths_around_the_bounds(gpu: Gpu, hosts: tuple[int, ...], extra: int) -> None:
    size, length = sum(hosts), 2 * PIECE // 4 + extra

    def body(rank: Rank) -> np.ndarray:
        if rank.rank == 1:
            return rank.allreduce(values(1, length))
        return OnGpu(rank, gpu, default_stream=True).allreduce(values(rank.rank, length))

    with Group(hosts) as group:
        for result in group.run(body):
            np.testing.assert_array_equal(result, total(size, length))


WAYS: dict[str, tuple[str, str | None, dict[str, float]]] = {
    "sum": ("sum", None, {}),
    "scaled average": ("average", None, {"prescale": 0.5, "postscale": 3.0}),
    "max": ("max", None, {}),
    "average as float16": ("average", "float16", {"prescale": 2.0}),
    "sum as bfloat16": ("sum", "bfloat16", {}),
}
KINDS = [
    (dtype, how)
    for dtype in NUMPY_OF_DTYPE
    for how, (op, wire, _) in WAYS.items()
    if (op != "average" or dtype != "bool") and (wire is None or dtype in ("float32", "float64"))
]


@pytest.mark.parametrize("hosts", [(2,), (3,), (1, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "how"), KINDS, ids=str)
def test_results_are_those_of_host_memory_to_the_bit(gpu: Gpu, hosts: tuple[int, ...], dtype: str, how: str) -> None:
    """All ranks have the same values on their GPU and in host memory."""
    op, wire, factors = WAYS[how]
    kind = NUMPY_OF_DTYPE[dtype]
    length = (2 * PIECE + PIECE // 2) // np.dtype(kind).itemsize + 13
    chance = np.random.default_rng(7)
    arrays = [(chance.random(length) * 100).astype(kind) for _ in range(sum(hosts))]

    def body(rank: Rank) -> None:
        array = arrays[rank.rank]
        options: dict[str, Any] = {"reduce_op": _core.REDUCE_OPS[op], **factors}
        wanted = array.copy()
        rank.finish(rank.submit("allreduce", "host", [wanted], wires=[wire], **options))
        own = OnGpu(rank, gpu)
        address = gpu.put(array)
        (tensor,) = describe([array], [array], [wire])
        tensor = tensor._replace(input=address, output=address)
        request = _core.RequestBuffer.of(
            _core.OPS["allreduce"], "device", [tensor], device=1, stream=own.stream, **options
        )
        own.finish(rank.context.submit(request))
        gpu.synchronize(own.stream)
        own.close()
        assert gpu.get(address, array).tobytes() == wanted.tobytes()

    with Group(hosts) as group:
        group.run(body)


def test_a_tensor_has_a_bounded_number_of_pieces(gpu: Gpu) -> None:
    length = 70 << 20

    def body(rank: Rank) -> None:
        array = np.full(length, 3 + rank.rank, np.uint8)
        array[-1] = 0
        result = OnGpu(rank, gpu, default_stream=True).allreduce(array) if rank.rank == 0 else rank.allreduce(array)
        assert (result[:-1] == 7).all() and result[-1] == 0

    with Group((2,), segment_bytes=1 << 20) as group:
        group.run(body)
    assert gpu.copies() <= 2 * 32 + 1


# ---- What does not flow ----


@pytest.mark.parametrize("what", ["small", "adasum", "group", "broadcast", "alone"])
def test_what_does_not_flow_is_copied_at_once(gpu: Gpu, what: str) -> None:
    length = PIECE // 4 * 2 - (what == "small")

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        array = np.ones(length, np.float32)
        if what == "group":
            (tensor,) = describe([array], [array])
            tensors = [tensor._replace(input=address, output=address) for address in (gpu.put(array), gpu.put(array))]
            options: dict[str, Any] = {"device": 1, "stream": own.stream, "reduce_op": SUM}
            own.finish(rank.context.submit(_core.RequestBuffer.of(_core.OPS["allreduce"], "x", tensors, **options)))
        elif what == "broadcast":
            own.run("broadcast", "x", array, root_rank=0)
        else:
            own.allreduce(array, op="adasum" if what == "adasum" else "sum")
        own.close()

    with Group((1,) if what == "alone" else (2,)) as group:
        group.run(body)
    assert gpu.copies() == {"group": 8, "broadcast": 3, "alone": 2}.get(what, 4)


def test_what_nccl_has_refused_flows_from_then_on(gpu: Gpu, nccl: Nccl) -> None:
    """The first one is copied, at once, when the ranks have found out that they share a GPU."""

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu, [nccl.path])
        for _ in range(2):
            np.testing.assert_array_equal(own.allreduce(values(rank.rank)), total(2))
        own.close()

    with recorded_stderr(), Group((2,)) as group:
        group.run(body)
    wait_for(lambda: gpu.calls() == 2 * (1 + 4))


# ---- Failures ----


@pytest.mark.parametrize("hosts", [(2,), (3,), (1, 1)], ids=str)
@pytest.mark.parametrize("copy", [2, 4])
@pytest.mark.parametrize("way", ["wait", "poll", "nothing"])
def test_a_copy_that_fails_in_the_middle_ends_the_group_with_its_reason(
    gpu: Gpu, hosts: tuple[int, ...], copy: int, way: str
) -> None:
    def body(rank: Rank) -> None:
        if rank.rank > 0:
            with pytest.raises(GroupError, match=rf"rank 0 \(host0\) ended with {LOST}; pending here: 'x'"):
                rank.allreduce(values(rank.rank))
            return
        own = OnGpu(rank, gpu)
        gpu.is_broken = True
        gpu.let_copies(1)
        gpu.fail_staging(copy)
        handle, _, _ = own.submit("allreduce", "x", values(0), reduce_op=SUM)
        wait_for(lambda: has_begun(rank))
        gpu.let_copies(-1)
        if way == "poll":
            wait_for(lambda: rank.context.poll(handle))
        if way == "nothing":
            wait_for(lambda: rank.context.health() is not None)
        with pytest.raises(GroupError, match=rf"this rank ended with {LOST}; pending here: 'x'"):
            rank.context.wait(handle)
        rank.context.release(handle)
        own.close()

    with Group(hosts) as group:
        group.run(body)


def test_a_copy_that_fails_before_anybody_else_has_submitted_ends_the_group(gpu: Gpu) -> None:
    is_lost = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            assert is_lost.wait(60)
            with pytest.raises(GroupError, match=rf"rank 0 \(host0\) ended with {LOST}"):
                rank.allreduce(values(1))
            return
        own = OnGpu(rank, gpu)
        gpu.is_broken = True
        gpu.let_copies(1)
        gpu.fail_staging(3)
        handle, _, _ = own.submit("allreduce", "x", values(0), reduce_op=SUM)
        wait_for(lambda: gpu.calls() == 1)
        gpu.let_copies(-1)
        with pytest.raises(GroupError, match=rf"this rank ended with {LOST}; pending here: 'x'"):
            rank.context.wait(handle)
        rank.context.release(handle)
        is_lost.set()
        own.close()

    with Group((2,)) as group:
        group.run(body)


def test_a_first_piece_that_fails_fails_the_call_only(gpu: Gpu) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(ResourceError, match=rf"rank 0 \(host0\) has refused it: {REASON}"):
                rank.allreduce(values(1))
        else:
            own = OnGpu(rank, gpu)
            gpu.is_broken = True
            gpu.fail_staging(1)
            handle, _, _ = own.submit("allreduce", "x", values(0), reduce_op=SUM)
            with pytest.raises(ResourceError, match="the copy from the GPU failed with code 719"):
                rank.context.wait(handle)
            rank.context.release(handle)
            own.close()
        assert rank.allreduce(np.ones(2)).tolist() == [2, 2]

    with Group((2,)) as group:
        group.run(body)


def submit_and_fail(own: OnGpu, piece: int, before: Any) -> tuple[int, int, int]:
    """Submits 'x'; the driver refuses to let piece number ``piece`` be followed, behind a call of ``before``."""
    gpu = own.gpu
    found: list[tuple[int, int, int]] = []
    gate = gpu.pause()  # the first one is where horo's stream waits for the program's
    thread = threading.Thread(
        target=lambda: found.append(own.submit("allreduce", "x", values(own.rank.rank), reduce_op=SUM))
    )
    thread.start()
    for _ in range(piece):
        gpu.await_pause(gate)
        next_gate = gpu.pause()
        gpu.resume(gate)
        gate = next_gate
    gpu.await_pause(gate)
    before()
    gpu.resume(gate, 1)
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("piece", [1, 2, 4])
def test_a_driver_that_refuses_a_piece_fails_what_is_not_announced(gpu: Gpu, piece: int) -> None:
    reason = "cuStreamWaitEvent failed with code 1"
    gpu.let_copies(0)

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(ResourceError, match=rf"rank 0 \(host0\) has refused it: {reason}"):
                rank.allreduce(values(1))
            assert rank.allreduce(values(1))[-1] == total(2)[-1]
            return
        own = OnGpu(rank, gpu)
        handle, _, _ = submit_and_fail(own, piece, lambda: None)
        with pytest.raises(ResourceError, match=reason):
            rank.context.wait(handle)
        rank.context.release(handle)
        gpu.let_copies(-1)
        np.testing.assert_array_equal(own.allreduce(values(0)), total(2))
        own.close()

    with Group((2,)) as group:
        group.run(body)


def test_a_driver_that_refuses_a_piece_of_what_is_announced_ends_the_group(gpu: Gpu) -> None:
    words = "cuStreamWaitEvent failed with code 1: the driver has no text for it"
    reason = f"an error on GPU 0 that lost the values of allreduce 'x': {words}; {HINT}"

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(GroupError, match=rf"rank 0 \(host0\) ended with {reason}"):
                rank.allreduce(values(1))
            return
        own = OnGpu(rank, gpu)
        handle, _, _ = submit_and_fail(own, 3, lambda: wait_for(lambda: has_begun(rank)))
        with pytest.raises(GroupError, match=rf"this rank ended with {reason}"):
            rank.context.wait(handle)
        rank.context.release(handle)
        own.close()

    with Group((2,)) as group:
        group.run(body)


@pytest.mark.parametrize("refused", [1, 2])
def test_copies_back_that_the_driver_refuses_are_the_callers(gpu: Gpu, refused: int) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 1:
            rank.allreduce(values(1))
            return
        own = OnGpu(rank, gpu)
        gpu.fail_staging(returns=refused)
        handle, source, _ = own.submit("allreduce", "x", values(0), reduce_op=SUM)
        rank.context.wait(handle)
        if refused == 2:  # that of a piece, and that of the rest
            with pytest.raises(ResourceError, match="cuMemcpyHtoDAsync failed with code 1"):
                copy_back(rank.context, handle, own.stream)
        copy_back(rank.context, handle, own.stream)
        rank.context.release(handle)
        gpu.synchronize(own.stream)
        np.testing.assert_array_equal(gpu.get(source, values(0)), total(2))
        own.close()

    with Group((2,)) as group:
        group.run(body)


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("pieces", [0, 2])
def test_a_loss_ends_it_in_the_middle_and_what_is_on_its_way_ends_before(
    gpu: Gpu, hosts: tuple[int, ...], pieces: int
) -> None:
    gpu.let_copies(0)
    is_there = threading.Event()
    have_submitted = threading.Barrier(sum(hosts) - 1)

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            own = OnGpu(rank, gpu)
            output = np.full(LENGTH, -1, np.float32)
            handle, _, target = own.submit("allreduce", "x", values(0), output, reduce_op=SUM)
            gpu.let_copies(pieces)
            if pieces > 0:
                await_return(gpu, target, rank.size)
            is_there.set()
            with pytest.raises(GroupError, match="bad batch"):
                rank.context.wait(handle)
            rank.context.release(handle)
            gpu.let_copies(-1)
            own.close()
            return
        handle = rank.submit("allreduce", "x", [values(rank.rank)], reduce_op=SUM)
        have_submitted.wait(60)
        assert is_there.wait(60)
        if rank.rank == rank.size - 1:
            rank.context.end("ValueError: bad batch")
        with pytest.raises(GroupError, match="bad batch"):
            rank.finish(handle)

    with Group(hosts) as group:
        group.run(body)


def test_a_rank_that_leaves_while_pieces_are_on_their_way_waits_for_the_driver(gpu: Gpu) -> None:
    gpu.let_copies(0)

    def body(rank: Rank) -> OnGpu:
        own = OnGpu(rank, gpu)
        own.submit("allreduce", "x", values(0), reduce_op=SUM)
        return own

    group = Group((2,))
    owners = group.run(body)
    gpu.let_copies(3)
    group.destroy_while(lambda: gpu.let_copies(-1))
    for own in owners:
        own.close()


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_a_gpu_that_stands_still_is_reported_as_a_stall_and_ends_the_job_if_so_configured(
    gpu: Gpu, hosts: tuple[int, ...]
) -> None:
    gpu.let_copies(0)

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(StalledError):
                rank.allreduce(values(1))
            return
        own = OnGpu(rank, gpu)
        handle, _, _ = own.submit("allreduce", "x", values(0), reduce_op=SUM)
        gpu.let_copies(2)
        with pytest.raises(StalledError):
            rank.context.wait(handle)
        rank.context.release(handle)
        gpu.let_copies(-1)
        own.close()

    with recorded_stderr() as written:
        with Group(hosts, stall_warning_ms=100, stall_shutdown_ms=1000) as group:
            group.run(body)
        assert re.search("waiting for its own GPU in the middle of an operation", written())


# ---- What is learnt meanwhile ----


# ---- Beside others ----


def test_a_rank_that_has_joined_stands_in(gpu: Gpu) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 2:
            handle = rank.context.start_join(0)
            rank.context.wait(handle)
            rank.context.release(handle)
            return
        own = OnGpu(rank, gpu)
        np.testing.assert_array_equal(own.allreduce(values(rank.rank)), total(2))
        own.close()
        handle = rank.context.start_join(0)
        rank.context.wait(handle)
        rank.context.release(handle)

    with Group((3,)) as group:
        group.run(body)


def test_a_graph_that_is_captured_meanwhile_stays_whole(gpu: Gpu) -> None:
    captured = gpu.stream()

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        with captured_by_rank_0(rank, gpu, captured):
            handle, source, _ = own.submit("allreduce", "x", values(rank.rank), reduce_op=SUM)
            own.finish(handle)
        gpu.synchronize(own.stream)
        np.testing.assert_array_equal(gpu.get(source, values(0)), total(2))
        own.close()

    with Group((2,)) as group:
        group.run(body)
    gpu.close(captured)


def test_no_copy_of_another_stream_comes_between_pieces(gpu: Gpu) -> None:
    """One that waits for a stream of the program's would hold up a batch that has begun."""

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            rank.allreduce(values(1))
            rank.allreduce(values(1), "y")
            return
        own, other = OnGpu(rank, gpu), gpu.stream()
        held = gpu.hold(other)
        found: dict[str, int] = {}

        def submit(name: str, stream: int) -> None:
            found[name] = own.submit("allreduce", name, values(0), reduce_op=SUM, stream=stream)[0]

        first = gpu.pause()
        one = threading.Thread(target=submit, args=("x", own.stream))
        one.start()
        gpu.await_pause(first)
        second = gpu.pause()
        gpu.resume(first)
        gpu.await_pause(second)  # behind its first piece
        pinned = gpu.counts()["pinned_ever"]
        two = threading.Thread(target=submit, args=("y", other))
        two.start()
        wait_for(lambda: gpu.counts()["pinned_ever"] == pinned + 1)
        two.join(0.2)  # in vain: it has to wait for the other pieces
        gpu.resume(second)
        one.join(60)
        own.finish(found["x"])
        gpu.open(held)
        two.join(60)
        own.finish(found["y"])
        gpu.synchronize(own.stream)
        own.close()
        gpu.close(other)

    with Group((2,)) as group:
        group.run(body)


def test_a_request_that_nobody_copies_back_leaves_nothing(gpu: Gpu) -> None:
    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        for _ in range(3):
            handle, _, _ = own.submit("allreduce", "x", values(rank.rank), reduce_op=SUM)
            rank.context.wait(handle)
            rank.context.release(handle)
        handle, source, _ = own.submit("allreduce", "x", values(rank.rank), reduce_op=SUM)
        rank.context.wait(handle)
        copy_back(rank.context, handle, own.stream)
        copy_back(rank.context, handle, 0)
        rank.context.release(handle)
        gpu.synchronize(own.stream)
        np.testing.assert_array_equal(gpu.get(source, values(0)), total(2))
        own.close()

    with Group((2,)) as group:
        group.run(body)
    assert gpu.counts()["pinned_ever"] <= 4
