"""Pinned memory: how it is let go of, and results that one thread takes while another one releases their request."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu
from ranks import Group, Links, Rank, describe, hosts_of, on_ranks, recorded_stderr, run_ranks, wait_for

from horo.core import context
from horo.core.libraries import copy_back
from horo.errors import GroupError, ResourceError


def submit_four(own: OnGpu, op: str, **options: int) -> list[int]:
    """Operations on 264 KiB each, on the same memory of the device: three fit what stays pinned, see CHECK_FLAGS."""
    array = np.zeros(264 << 10, np.uint8)
    address = own.gpu.put(array)
    (tensor,) = describe([array], [array])
    tensor = tensor._replace(input=address, output=address)
    options = {"device": own.device + 1, "stream": own.stream, **options}
    return [
        own.context.submit(context.RequestBuffer.of(context.OPS[op], f"x{i}", [tensor], **options)) for i in range(4)
    ]


def release(own: OnGpu, handles: list[int]) -> None:
    """In a thread of its own, which does not wait for the GPU."""

    def body() -> None:
        for handle in handles:
            own.context.release(handle)

    releasing = threading.Thread(target=body, daemon=True)
    releasing.start()
    releasing.join(20)
    assert not releasing.is_alive(), "it waits for the GPU"


def test_a_caller_that_releases_its_request_frees_what_is_too_much(gpu: Gpu) -> None:
    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        handles = submit_four(own, "broadcast", root_rank=0)
        for handle in handles:
            own.context.wait(handle)
        for handle in handles:
            copy_back(own.context, handle, own.stream)
        gpu.synchronize(own.stream)
        assert gpu.counts()["pinned"] == 4
        for handle in handles:
            own.context.release(handle)
        assert gpu.counts()["pinned"] == 3
        own.close()

    run_ranks(body, (1,))


def test_a_caller_that_releases_what_has_failed_does_not_wait_for_a_gpu_that_stands_still(gpu: Gpu) -> None:
    is_stuck = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            assert is_stuck.wait(60)
            rank.context.end("ValueError: bad batch")
            return
        own = OnGpu(rank, gpu)
        handles = submit_four(own, "broadcast", root_rank=1)
        wait_for(lambda: gpu.calls() == 4)
        gpu.let_copies(0)
        stuck, _, _ = own.submit("allreduce", "stuck", np.ones(5, np.float32), reduce_op=SUM)
        is_stuck.set()
        for handle in [*handles, stuck]:
            with pytest.raises(GroupError, match="bad batch"):
                own.context.wait(handle)
        release(own, handles)
        gpu.let_copies(-1)
        own.context.release(stuck)
        own.close()

    run_ranks(body, (2,))


def test_a_caller_that_releases_its_request_does_not_wait_for_a_kernel_of_nccl(gpu: Gpu, nccl: Nccl) -> None:
    """The kernel is of the process set of ranks 0 and 1; NCCL takes no averages of integers, so those are staged."""
    links = Links(hosts_of((3,)))
    counted = threading.Barrier(3)

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu, [nccl.path], device=rank.rank)
        team = own.add_team([0, 1], **links.of(rank.rank, [0, 1], 0))
        handles = submit_four(own, "allreduce", reduce_op=context.REDUCE_OPS["average"])
        for handle in handles:
            own.context.wait(handle)
        if rank.rank < 2:
            own.allreduce(np.ones(5, np.float32), team=team)
            if rank.rank == 1:
                nccl.fail("hang", 1)
            rank.barrier(team=team)
            hung, _, _ = own.submit("allreduce", "hung", np.ones(5, np.float32), team=team, reduce_op=SUM)
            own.context.wait(hung)
            own.context.release(hung)
            release(own, handles)
        rank.barrier("released")
        assert gpu.counts()["pinned"] == 3 * len(handles)
        counted.wait(60)
        if rank.rank == 1:
            rank.context.end("ValueError: bad batch")
        with pytest.raises(GroupError, match="bad batch"):
            while True:
                rank.barrier("ended")
        if rank.rank == 2:
            release(own, handles)
        gpu.synchronize(own.stream)
        own.close()

    with recorded_stderr(), Group((3,)) as group:
        group.run(body)


# ---- A rank that leaves while a kernel of the program's hangs ----


def leave_behind(gpu: Gpu, stream: int) -> ctypes.c_int:
    """A rank alone, which has pinned memory, leaves while a stream of the program's stands still; returns the gate."""
    gates = []

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        np.testing.assert_array_equal(own.allreduce(np.full(5, 3, np.int32), op="average"), [3] * 5)
        assert gpu.counts()["pinned"] == 1
        own.close()
        gpu.await_program()
        gates.append(gpu.hold(stream))

    with recorded_stderr(), Group((1,)) as group:
        group.run(body)
    return gates[0]


def test_what_the_default_stream_stands_in_front_of_goes_when_that_goes_on(gpu: Gpu) -> None:
    """However long that takes, and with as little on the stream: a mark, whose event is the third."""
    gate = leave_behind(gpu, 0)
    counts = gpu.counts()
    assert [counts[name] for name in ("pinned", "contexts", "events")] == [1, 1, 3]
    gpu.open(gate)
    wait_for(lambda: gpu.counts()["contexts"] == 0)


THOUSAND = np.arange(1000, dtype=np.float32)
INVALID_VALUE = 1


@pytest.mark.parametrize("code", [0, INVALID_VALUE])
@on_ranks((1,))
def test_a_staged_request_may_be_released_while_its_results_go_back(rank: Rank, gpu: Gpu, code: int) -> None:
    own = OnGpu(rank, gpu)
    handle, _, target = own.submit("allreduce", "x", THOUSAND, reduce_op=SUM)
    own.context.wait(handle)
    failures = []

    def take() -> None:
        try:
            copy_back(own.context, handle, own.stream)
        except ResourceError as error:
            failures.append(str(error))

    gate = gpu.pause()
    taker = threading.Thread(target=take)
    taker.start()
    gpu.await_pause(gate)
    own.context.release(handle)
    gpu.resume(gate, code)
    taker.join(60)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(target, THOUSAND), THOUSAND)
    assert len(failures) == (code != 0)
    assert all("cuStreamWaitEvent failed with code 1" in failure for failure in failures)
    own.close()


@on_ranks((1,))
def test_a_second_thread_that_takes_results_waits_for_the_first_to_begin_their_copy(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    other = gpu.stream()
    handle, _, target = own.submit("allreduce", "x", THOUSAND, reduce_op=context.REDUCE_OPS["average"], postscale=2.0)
    own.context.wait(handle)
    found = []

    def take_second() -> None:
        copy_back(own.context, handle, other)
        gpu.synchronize(other)
        found.append(gpu.get(target, THOUSAND))

    gate = gpu.pause()
    first = threading.Thread(target=copy_back, args=(own.context, handle, own.stream))
    first.start()
    gpu.await_pause(gate)
    second = threading.Thread(target=take_second)
    second.start()
    second.join(0.3)  # by then it would have read what is not there yet
    gpu.resume(gate)
    first.join(60)
    second.join(60)
    np.testing.assert_array_equal(found, [2 * THOUSAND])
    own.context.release(handle)
    gpu.close(other)
    own.close()
