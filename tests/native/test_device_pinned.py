"""Pinned memory of which too much is idle. A driver that frees some waits for all that runs on the device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu
from ranks import Group, Rank, describe, recorded_stderr, wait_for
from test_teams import Links, hosts_of

from horo.core import context
from horo.core.libraries import copy_back
from horo.errors import GroupError

IDLE = 2  # of enum hr_nccl_state
LARGE, SMALL = 200 << 20, 60 << 20


@pytest.fixture
def comm(native: Any, gpu: Gpu, nccl: Nccl) -> Iterator[Any]:
    """A communicator of one rank, whose kernel hangs until it is aborted."""
    lib, ffi = native.lib, native.ffi
    identity = ffi.new("char[]", lib.SHIM_NCCL_ID_BYTES)
    made = lib.shim_nccl_connect(str(gpu.path).encode(), str(nccl.path).encode(), 1, 0, identity)
    assert made
    wait_for(lambda: lib.shim_nccl_poll(made) == IDLE)
    yield made
    lib.shim_nccl_destroy(made)


def launch(native: Any, gpu: Gpu, comm: Any) -> None:
    native.lib.shim_nccl_launch(comm, gpu.put(np.ones(1, np.uint8)))
    wait_for(lambda: native.lib.shim_nccl_poll(comm) == IDLE)


def test_memory_goes_back_while_a_kernel_hangs_and_nobody_waits(native: Any, gpu: Gpu, nccl: Nccl, comm: Any) -> None:
    nccl.fail("hang", 0)
    launch(native, gpu, comm)
    using = threading.Thread(target=native.lib.shim_nccl_use_pinned, args=(comm, 2, LARGE), daemon=True)
    using.start()
    using.join(20)
    assert not using.is_alive(), "it waits for the kernel"
    assert gpu.counts()["pinned"] == 2


def test_what_is_too_much_is_freed_by_a_thread_that_may_wait(native: Any, gpu: Gpu, comm: Any) -> None:
    assert native.lib.shim_nccl_use_pinned(comm, 4, LARGE) == 4
    assert gpu.counts()["pinned"] == 4
    native.lib.shim_nccl_trim_pinned(comm)
    assert gpu.counts()["pinned"] == 1


def test_what_is_too_much_is_used_for_anything_before_more_is_pinned(native: Any, gpu: Gpu, comm: Any) -> None:
    native.lib.shim_nccl_use_pinned(comm, 2, LARGE)
    native.lib.shim_nccl_use_pinned(comm, 2, 1000)
    assert gpu.counts()["pinned_ever"] == 3, "the rest of it is not too much"
    native.lib.shim_nccl_trim_pinned(comm)
    native.lib.shim_nccl_use_pinned(comm, 1, SMALL)
    assert gpu.counts()["pinned_ever"] == 3


def submit_four(own: OnGpu, op: str, **options: int) -> list[int]:
    """Operations on 66 MiB each, on the same memory of the device."""
    array = np.zeros(66 << 20, np.uint8)
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

    with Group((1,)) as group:
        group.run(body)


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

    with Group((2,)) as group:
        group.run(body)


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


def leave_behind(gpu: Gpu, stream: int, others: int = 0) -> ctypes.c_int:
    """A rank alone, which has pinned memory, leaves while a stream of the program's stands still.

    ``others`` have done so before. Returns the gate that it stands behind.
    """
    gates = []

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        np.testing.assert_array_equal(own.allreduce(np.full(5, 3, np.int32), op="average"), [3] * 5)
        assert gpu.counts()["pinned"] == others + 1
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


def test_what_several_jobs_of_a_process_have_left_goes_together(gpu: Gpu) -> None:
    gates = [leave_behind(gpu, 0, others) for others in range(3)]
    assert gpu.counts()["pinned"] == 3
    gpu.open(*gates)
    wait_for(lambda: gpu.counts()["contexts"] == 0)


def test_a_driver_that_waits_for_another_stream_keeps_no_rank_that_leaves(gpu: Gpu) -> None:
    """What it has not let go of then goes when the stream goes on."""
    stream = gpu.stream()  # which horo knows nothing of
    gate = leave_behind(gpu, stream)
    assert gpu.counts()["contexts"] == 1
    gpu.open(gate)
    gpu.close(stream)
    wait_for(lambda: gpu.counts()["contexts"] == 0)
