"""Pinned memory: how it is let go of, and results that one thread takes while another one releases their request."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Group, Rank, describe, on_ranks, recorded_stderr, wait_for
from test_teams import Links, hosts_of

from horo.core import context
from horo.core.libraries import copy_back
from horo.core.setup import MpiCalls, MpiUse, Setup
from horo.errors import GroupError, ResourceError, UsageError


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


def test_a_driver_that_waits_for_another_stream_keeps_no_rank_that_leaves(gpu: Gpu) -> None:
    """What it has not let go of then goes when the stream goes on."""
    stream = gpu.stream()  # which horo knows nothing of
    gate = leave_behind(gpu, stream)
    assert gpu.counts()["contexts"] == 1
    gpu.open(gate)
    gpu.close(stream)
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


@on_ranks((2,))
def test_results_that_are_asked_for_too_early_are_refused_while_nccl_is(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    """Another thread launches, when the gate is open, than the one that asks for results all the time."""
    own = on_gpu(rank, gpu, nccl)
    gate = gpu.hold(own.stream)
    handles = [own.submit("allreduce", f"x{number}", THOUSAND, reduce_op=SUM)[0] for number in range(100)]
    gpu.open(gate)
    for number, handle in enumerate(handles):
        while not own.context.poll(handle):
            for early in handles[number:]:
                try:
                    copy_back(own.context, early, own.stream)
                except UsageError as error:
                    assert str(error).endswith("has no results for the GPU: it is not done, or has failed")
        own.finish(handle)
    own.close()


MANY = np.ones(100_000, np.float32)
HELD_MAX = 256


class FakeMpi:
    """An MPI that carries what the ranks of a group send, until it stops."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.state: Any = native.lib.shim_fake_reset()
        self.state.carries = 1

    def calls(self, rank: int, size: int) -> MpiCalls:
        """Its communicator is the number of the rank that calls."""
        described = self.native.ffi.new("horo_mpi *")
        self.native.lib.shim_fake_describe(described, size)
        return MpiCalls(
            handle_bytes=described.handle_bytes,
            status_bytes=described.status_bytes,
            size=size,
            communicator=rank,
            byte=described.byte,
            functions=list(described.functions),
        )

    def held(self, rank: int) -> list[int]:
        """Where what it holds of a rank's lies."""
        places = self.native.ffi.new("char *[]", HELD_MAX)
        count = self.native.lib.shim_fake_held(rank, places, HELD_MAX)
        return [int(self.native.ffi.cast("uintptr_t", place)) for place in places[0:count]]

    def join(self, setups: list[Setup]) -> list[Setup]:
        """The same with this MPI: data between hosts goes to the ranks of equal local index."""
        hosts = list(setups[0].host_of_rank)
        members = [[rank for rank, host in enumerate(hosts) if host == other] for other in range(max(hosts) + 1)]
        joined = []
        for setup in setups:
            own = members[hosts[setup.rank]]
            index = own.index(setup.rank)
            peers = [m[index] if m is not own and index < len(m) else -1 for m in members]
            calls = self.calls(setup.rank, len(setups))
            joined.append(replace(setup, mpi=MpiUse(calls, rank_of_host=peers)))
        return joined


@pytest.fixture
def mpi(native: ModuleType) -> FakeMpi:
    return FakeMpi(native)


def is_cut_off(mpi: FakeMpi, gpu: Gpu, hosts: tuple[int, ...], make: Callable[[Rank], OnGpu]) -> list[int]:
    """Where in pinned memory MPI still reads and writes after ranks have lost one, and are gone.

    MPI stops before an allreduce, and the last rank ends when MPI holds something of each rank with a part between
    hosts.
    """
    last = sum(hosts) - 1
    owners = [rank for rank in range(last + 1) if rank % hosts[0] < min(hosts)]

    def body(rank: Rank) -> list[int]:
        own = make(rank)
        assert own.allreduce(MANY, "first").tolist() == [sum(hosts)] * len(MANY)
        rank.barrier()
        mpi.state.carries = 0
        rank.barrier("it has stopped")
        handle, _, _ = own.submit("allreduce", "x", MANY, reduce_op=SUM)
        if rank.rank == last:
            wait_for(lambda: all(map(mpi.held, owners)))
            own.context.end("ValueError: bad batch")
        with suppress(GroupError):  # a rank that has no part between hosts may be done
            own.context.wait(handle)
        own.context.release(handle)
        own.close()
        return own.context.counters()["mpi_stranded"]

    with recorded_stderr(), Group(hosts, rewire=mpi.join) as group:
        stranded = group.run(body)
        held = [[place for place in mpi.held(rank) if gpu.is_pinned(place)] for rank in owners]
    assert all(held) and all(stranded[rank] > 0 for rank in owners)
    gpu.pinned_left = len(owners)
    return [place for places in held for place in places]


def test_staged_values_that_mpi_holds_stay_where_they_are(mpi: FakeMpi, gpu: Gpu) -> None:
    held = is_cut_off(mpi, gpu, (1, 1), lambda rank: OnGpu(rank, gpu))
    assert all(map(gpu.is_pinned, held))
    for place in held:
        ctypes.memset(place, 0xEE, 1)  # as MPI may; a sanitizer would see it
