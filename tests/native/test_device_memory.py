"""Pinned memory: how it is let go of, and results that one thread takes while another one releases their request."""

import ctypes
import threading

import numpy as np
import pytest
from device_group import Gpu, OnGpu
from ranks import SUM, Group, Rank, on_ranks, recorded_stderr, wait_for

from horo.core import context
from horo.core.libraries import copy_back
from horo.errors import ResourceError


@on_ranks((1,))
def test_pinned_memory_is_used_again(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    for _ in range(3):
        handles = [own.submit("allreduce", f"x{i}", np.ones(5, np.float32), reduce_op=SUM)[0] for i in range(4)]
        for handle in handles:
            own.context.wait(handle)
            copy_back(own.context, handle, own.stream)
        gpu.synchronize(own.stream)
        for handle in handles:
            own.context.release(handle)
    assert gpu.counts()["pinned"] == 4
    own.close()


def leave_behind(gpu: Gpu, stream: int) -> ctypes.c_int:
    """A rank alone, which has pinned memory, leaves while a stream of the program's stands still; returns the gate."""
    gates = []

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        np.testing.assert_array_equal(own.allreduce(np.full(5, 3, np.int32), op="average"), [3] * 5)
        assert gpu.counts()["pinned"] == 1
        own.close()
        gpu.await_program()
        gates.append(gpu.hold_stream(stream))

    with recorded_stderr(), Group((1,)) as group:
        group.run(body)
    return gates[0]


def test_what_the_default_stream_stands_in_front_of_goes_when_that_goes_on(gpu: Gpu) -> None:
    """However long that takes, and with as little on the stream: a mark, whose event is the second."""
    gate = leave_behind(gpu, 0)
    counts = gpu.counts()
    assert [counts[name] for name in ("pinned", "contexts", "events")] == [1, 1, 2]
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
    other = gpu.make_stream()
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
