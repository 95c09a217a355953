"""Results on a GPU that several threads take, or that one takes while another one releases their request."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import Rank, on_ranks, run_ranks

from horo.core import context
from horo.core.libraries import copy_back
from horo.errors import ResourceError, UsageError

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


def fail_call(gpu: Gpu, number: int, call: Callable[[], None]) -> None:
    """The ``number``-th call of the thread that makes a stream wait for an event is refused."""

    def run() -> None:
        with pytest.raises(ResourceError, match="cuStreamWaitEvent failed with code 1"):
            call()

    gate = gpu.pause()
    caller = threading.Thread(target=run)
    caller.start()
    for _ in range(number - 1):
        gpu.await_pause(gate)
        before, gate = gate, gpu.pause()
        gpu.resume(before)
    gpu.await_pause(gate)
    gpu.resume(gate, INVALID_VALUE)
    caller.join(60)
    assert not caller.is_alive()


@on_ranks((1,))
def test_memory_is_not_used_again_before_copies_from_it_whose_stream_could_not_wait(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    gpu.hold_returns(True)
    handle, _, target = own.submit("allreduce", "x", THOUSAND, reduce_op=SUM)
    own.context.wait(handle)
    fail_call(gpu, 2, lambda: copy_back(own.context, handle, own.stream))
    own.context.release(handle)
    other, _, _ = own.submit("allreduce", "y", -THOUSAND, reduce_op=SUM)
    own.context.wait(other)
    gpu.hold_returns(False)
    own.finish(other)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(target, THOUSAND), THOUSAND)
    own.close()


def test_memory_is_not_used_again_before_a_copy_that_no_event_could_be_put_behind(gpu: Gpu) -> None:
    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        gpu.let_copies(0)
        gpu.refuse_records(1)  # a refused call is made again, for its message
        handle, _, target = own.submit("allreduce", "x", THOUSAND, reduce_op=SUM)
        assert gpu.counts()["pinned_ever"] == 2
        gpu.let_copies(-1)
        own.finish(handle)
        gpu.synchronize(own.stream)
        np.testing.assert_array_equal(gpu.get(target, THOUSAND), THOUSAND)
        own.close()

    run_ranks(body, (1,))
    gpu.pinned_left = 1


@on_ranks((1,))
def test_copies_back_that_the_driver_refuses_may_be_asked_for_again(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    handle, _, target = own.submit("allreduce", "x", THOUSAND, np.zeros_like(THOUSAND), reduce_op=SUM)
    own.context.wait(handle)
    gpu.fail_staging(returns=1)
    with pytest.raises(ResourceError, match="cuMemcpyHtoDAsync failed with code 1"):
        copy_back(own.context, handle, own.stream)
    own.finish(handle)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(target, THOUSAND), THOUSAND)
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
