"""Streams of torch: what is behind what, whose memory may be used when, and what a graph that is captured allows."""

import threading
import time

import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import on

import horo.torch as hvd
from horo.errors import UsageError

CYCLES_OF_A_SECOND = 1 << 31
"""Of the clock that ``torch.cuda._sleep`` counts by: one to two seconds on GPUs of today."""


@on("ranks")
def test_values_are_taken_behind_the_current_stream_which_waits_for_the_results() -> None:
    cycles = CYCLES_OF_A_SECOND // 50
    gpu, n = RealGpu(), hvd.size()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        for count in (1000, 1 << 20):
            with torch.cuda.stream(stream):
                x, y = torch.ones(count, device=gpu.device), torch.ones(count // 2, device=gpu.device)
                torch.cuda._sleep(cycles)
                x += 1
                handles = [hvd.allreduce_async_(x, op=hvd.Sum), hvd.allreduce_async(y, op=hvd.Sum, name="y")]
                results = [hvd.synchronize(handle) for handle in handles]
                assert results[0] is x
                x += 0.5
                doubled = results[1] * 2
                assert x.eq(2 * n + 0.5).all() and doubled.eq(2 * n).all()
    torch.cuda.synchronize()


@on("ranks")
def test_the_stream_that_waits_is_the_one_of_synchronize() -> None:
    gpu, n = RealGpu(), hvd.size()
    for _ in range(20):
        x = torch.ones(1 << 20, device=gpu.device)
        handle = hvd.allreduce_async_(x, op=hvd.Sum)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            hvd.synchronize(handle)
            assert (x + 1).eq(n + 1).all()
        torch.cuda.current_stream().wait_stream(stream)


@on("ranks")
def test_memory_that_a_program_frees_is_used_again_behind_the_exchange_only() -> None:
    """torch gives freed memory to the next tensor at once, in the order of its stream."""
    gpu, n, r = RealGpu(), hvd.size(), hvd.rank()
    side = torch.cuda.Stream()
    for step in range(30):
        count = (1 << 18) + step
        x = torch.full((count,), float(r + step), device=gpu.device)
        handle = hvd.allreduce_async(x, op=hvd.Sum, name="freed")
        del x
        garbage = torch.full((count,), -1e9, device=gpu.device)
        with torch.cuda.stream(side):
            result = hvd.synchronize(handle)
            del handle
            also_garbage = torch.full((count,), -2e9, device=gpu.device)
            assert result.eq(n * step + n * (n - 1) / 2).all(), step
        gathered = hvd.allgather(garbage[:3])
        del garbage, also_garbage
        assert gathered.eq(-1e9).all()


@on("ranks")
def test_no_call_waits_for_what_runs_on_other_streams() -> None:
    cycles = 2 * CYCLES_OF_A_SECOND
    gpu, n = RealGpu(), hvd.size()
    for count in (100, 1 << 18):  # what has to be made once is there afterwards
        hvd.allreduce(torch.ones(count, device=gpu.device), op=hvd.Sum)
        hvd.allgather(torch.ones(count, device=gpu.device))
    mine, busy, done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(mine):
        x = torch.ones(1 << 18, device=gpu.device)
        spare = [torch.empty_like(x) for _ in range(3)]
    del spare  # for the results: to take memory of the driver may wait for all streams
    torch.cuda.synchronize()
    hvd.barrier()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(cycles)
        done.record()
    with torch.cuda.stream(mine):
        results = [hvd.allreduce(x, op=hvd.Sum) for _ in range(3)]
        hvd.broadcast_(x, 0)
        finished = torch.cuda.Event()
        finished.record()
    while not finished.query():
        time.sleep(0.001)
    was_busy = not done.query()
    torch.cuda.synchronize()
    assert all(result.eq(n).all() for result in results)
    assert was_busy, "the GPU was idle before the calls were over: they waited for it, or it is very fast"


@on("shared2")
def test_backward_on_a_stream_of_the_program() -> None:
    """torch runs the backward of an operation on the stream of its forward; hooks find that one as the current one."""
    gpu, n, r = RealGpu(), hvd.size(), hvd.rank()
    weight = torch.nn.Parameter(torch.ones(1 << 18, device=gpu.device))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(10):
        with torch.cuda.stream(stream):
            loss = (weight * (r + 1)).sum()
            torch.cuda._sleep(1 << 22)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        assert weight.detach().eq(1 - (step + 1) * (n + 1) / 2).all(), step


@on("ranks")
def test_a_capture_of_this_thread_is_refused_and_goes_on() -> None:
    gpu, n = RealGpu(), hvd.size()
    x, y = torch.ones(1000, device=gpu.device), torch.zeros(1000, device=gpu.device)
    hvd.allreduce(x, op=hvd.Sum)
    before = [hvd.allreduce_async(x, op=hvd.Sum, name="sum"), hvd.allgather_async(x[:1], name="rows")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y += x
        with pytest.raises(UsageError, match="current stream is being captured into a CUDA graph"):
            hvd.allreduce_(y, op=hvd.Sum)
        for handle in before:
            with pytest.raises(UsageError, match="current stream is being captured into a CUDA graph"):
                hvd.synchronize(handle)
    assert all(hvd.synchronize(handle).eq(value).all() for handle, value in zip(before, (n, 1), strict=True))
    for _ in range(3):
        graph.replay()
    assert hvd.allreduce(y, op=hvd.Sum).eq(3 * n).all()


@on("ranks")
def test_a_capture_of_another_thread_is_not_disturbed() -> None:
    """In torch's own mode, in which calls that are unsafe during a capture are errors in all threads."""
    gpu = RealGpu()
    hvd.allreduce(torch.ones(8, device=gpu.device), op=hvd.Sum)
    x = torch.ones(1 << 16, device=gpu.device)
    torch.cuda.synchronize()
    begun, go_on, failures = threading.Event(), threading.Event(), []
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(100, device=gpu.device)

    def capture() -> None:
        try:
            torch.cuda.set_device(gpu.device)
            with torch.cuda.graph(graph, capture_error_mode="global"):
                y.add_(1)
                begun.set()
                go_on.wait(30)
                y.add_(1)
        except BaseException as error:
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(30)
    try:
        for _ in range(5):
            hvd.allreduce_(x, op=hvd.Average)  # into its input: torch itself may not take memory now
    finally:
        go_on.set()
        thread.join(60)
    assert failures == []
    graph.replay()
    assert y.eq(2).all() and x.eq(1).all()
