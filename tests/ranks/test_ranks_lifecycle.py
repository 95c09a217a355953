"""Beginning and end of a job: many of them, forks in between, and ranks that die."""

import gc
import logging
import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from jobs import in_child, wait_until
from rank_pool import on
from small_model import made, make_loss, make_model, sgd, take_step

import horo.torch as hvd
from horo.errors import AbortedError, NotInitializedError, PeerLostError, UsageError
from horo.torch.engine import runtime
from horo.torch.lifecycle import _at_exit


@on("fresh2", deadline_s=100)
def test_many_jobs_in_one_process_leak_nothing() -> None:
    process = psutil.Process()

    def cycle() -> None:
        hvd.init()
        assert hvd.allreduce(torch.ones(1000), op=hvd.Sum)[0].item() == 2.0
        unfetched = hvd.allreduce_async(torch.ones(10))
        hvd.allgather(torch.ones(3))
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\) first"):
            hvd.synchronize(unfetched)

    def threads() -> set[int]:
        return {thread.id for thread in process.threads()}

    def rest(allowed: set[int]) -> None:
        """Waits for the end of all other threads: Python's join() comes back shortly before a thread is gone."""
        gc.collect()
        wait_until(lambda: threads() <= allowed, "the other threads are gone")
        assert threads() == allowed

    for _ in range(4):
        cycle()
    lasting = threads()
    cycle()
    lasting &= threads()  # one of a job that goes on for a moment is not among them, since each job has its own
    rest(lasting)
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for _ in range(40):
        cycle()
    rest(lasting)
    assert process.num_fds() == descriptors
    assert process.memory_info().rss - memory < 8 << 20
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        assert "memfd" not in maps.read()


@on("fresh2")
def test_requests_from_before_a_shutdown_say_so() -> None:
    os.environ["HORO_OVERLAP"] = "always"  # else the optimizer has no request in progress
    hvd.init()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    old = hvd.allreduce_async(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(optimizer, gradients_ready="step")
    optimizer.param_groups[0]["params"][0].sum().backward()
    hvd.barrier()  # a rank that has left already would abort what comes above
    hvd.shutdown()
    hvd.init()
    for call in (hvd.poll, hvd.synchronize):
        with pytest.raises(AbortedError, match=f"Handle {old} was created before horo was shut down"):
            call(old)
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("overlap", ["always", "never"])
@on("fresh2")
def test_a_backward_that_broke_in_an_ended_job_is_forgotten(overlap: str) -> None:
    os.environ["HORO_OVERLAP"] = overlap
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    held = torch.ones(2, requires_grad=True)
    held.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (weight * (held * 1)).sum().backward()
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    optimizer.zero_grad()
    (weight * (hvd.rank() + 1.0)).sum().backward()
    assert weight.grad.tolist() == [1.5, 1.5]
    optimizer.step()
    hvd.barrier()
    hvd.shutdown()


@on("fresh2")
def test_init_after_a_shutdown_elsewhere_begins_a_new_job() -> None:
    """Also where this rank has not called ``shutdown()``: what it had from the job that has ended is of no use."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
            hvd.allreduce(torch.ones(1), name="waiting")
        assert hvd.is_initialized()
    alone = hvd.ProcessSet([0])
    hvd.init(process_sets=[alone], cycle_time_ms=0.5)
    assert hvd.config()["cycle_time_ms"] == 0.5
    assert alone.process_set_id == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="waiting").item() == 2
    hvd.init()  # nothing: the process is in a job
    assert alone.process_set_id == 1
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("call", ["init", "shutdown"])
@on("fresh2")
def test_each_thread_may_call_init_or_shutdown_when_its_operation_has_failed(call: str) -> None:
    """Others are still in theirs then."""

    def work(handle: int) -> None:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
        getattr(hvd, call)()

    for _ in range(10):
        hvd.init()
        waiting = range(0 if hvd.rank() == 1 else 4)
        handles = [hvd.allreduce_async(torch.ones(1), name=f"waiting {number}") for number in waiting]
        hvd.barrier()
        if hvd.rank() == 1:
            hvd.shutdown()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, handles))
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.barrier()
    hvd.shutdown()


@on("ranks2")
def test_a_forked_child_gets_a_clear_error_and_leaves_the_parent_intact() -> None:
    pending = hvd.allreduce_async(torch.ones(100), name="before")
    hvd.allreduce(torch.ones(1))  # so that the child's is no first one

    def errors() -> list[str]:
        assert hvd.rank() == int(os.environ["HOROVOD_RANK"])
        told = []
        for call in (lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.synchronize(pending), hvd.barrier, hvd.init):
            with pytest.raises(UsageError) as caught:
                call()
            told.append(str(caught.value))
        hvd.shutdown()
        return told

    *told, of_init = in_child(errors)
    assert all(f"was forked from rank {hvd.rank()}" in each for each in told)
    assert "was forked from a rank" in of_init
    assert hvd.synchronize(pending).tolist() == [1.0] * 100
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


def _until_a_call_waits() -> None:
    wait_until(lambda: runtime.current().active_calls, "a call waits", every_s=0.001)


@on("ranks2")
def test_an_interrupt_during_a_wait_reaches_python_and_the_wait_can_go_on() -> None:
    def interrupt() -> None:
        _until_a_call_waits()
        os.kill(os.getpid(), signal.SIGINT)

    if hvd.rank() == 1:
        hvd.broadcast_object(None)
        assert hvd.allreduce(torch.ones(2), name="late", op=hvd.Sum).tolist() == [2.0, 2.0]
        return
    tensor = torch.ones(2)
    handle = hvd.allreduce_async_(tensor, name="late", op=hvd.Sum)
    interrupter = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # whose thread must not be early
        interrupter.start()
        hvd.synchronize(handle)
    interrupter.join()
    hvd.broadcast_object(None)
    assert hvd.synchronize(handle) is tensor
    assert tensor.tolist() == [2.0, 2.0]


@on("ranks2")
def test_shutdown_is_refused_while_another_thread_waits() -> None:
    if hvd.rank() == 1:
        hvd.broadcast_object(None)
        hvd.allreduce(torch.ones(2), name="awaited")
        return
    waiter = threading.Thread(target=hvd.allreduce, args=(torch.ones(2),), kwargs={"name": "awaited"})
    waiter.start()
    _until_a_call_waits()
    with pytest.raises(UsageError, match="another thread waits in an operation"):
        hvd.shutdown()
    hvd.broadcast_object(None)
    waiter.join()
    assert hvd.is_initialized()


@on("ranks2")
def test_a_grandchild_keeps_its_own_files() -> None:
    """The child's copies of the rank's descriptors are closed, so its own files get their numbers."""

    def child() -> None:
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
        in_child(lambda: [os.fstat(file) and None for file in files])

    in_child(child)
    hvd.barrier()


@pytest.mark.parametrize("end", ["script", "shutdown"])
@on("fresh2")
def test_a_rank_that_runs_out_of_data_is_named_with_the_steps_of_both(end: str) -> None:
    hvd.init()
    model, optimizer = made()
    for _ in range(2):
        take_step(model, optimizer)
        optimizer.zero_grad()
    if hvd.rank() == 0:
        done = {"script": "came to the end of its script", "shutdown": "has shut horo down"}[end]
        told = re.escape("uneven data or an early stop; use drop_last, DistributedSampler or hvd.join()")
        pattern = rf"^rank 1 \(.*\) {done} after 2 steps, while rank 0 is in step 3: {told}"
        with pytest.raises(AbortedError, match=pattern):
            make_loss(model, 0).backward()
            optimizer.step()
    if end == "script":
        _at_exit()
    else:
        hvd.shutdown()


@on("fresh2")
def test_training_whose_gradients_nothing_averages_is_told_of_at_the_end() -> None:
    """Only where a program has made the models equal, and then trained them each for itself by oversight."""

    def told_after(case: str, *, begins_equal: bool = True, steps: int = 3, is_wrapped: bool = False) -> list[str]:
        hvd.init()
        model = make_model()
        optimizer: Any = sgd(model) if is_wrapped else torch.optim.SGD(model.parameters(), lr=0.1)
        if begins_equal:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(steps):
            make_loss(model, hvd.rank()).backward()
            if case == "averages itself":
                hvd.allreduce(next(model.parameters()).grad)
            optimizer.step()
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("horo").addHandler(handler)
        hvd.shutdown()
        logging.getLogger("horo").removeHandler(handler)
        return records

    rank = int(os.environ["HOROVOD_RANK"])
    told = told_after("forgotten")
    assert len(told) == (rank == 0)
    for warning in told:
        assert warning.startswith("optimizer.step() was called 3 times, and nothing was averaged between the 2 ranks")
        assert "optimizer = hvd.DistributedOptimizer(optimizer, " in warning
    assert told_after("averages itself") == told_after("begins apart", begins_equal=False) == []
    assert told_after("evaluates", steps=0) == told_after("wrapped", is_wrapped=True) == []


@on("fresh2")
def test_what_horo_has_put_into_the_interpreter_is_taken_out_by_shutdown() -> None:
    def now() -> list[Any]:
        return [sys.excepthook, sys.exit, threading.excepthook, *sys.meta_path]

    before = now()
    for _ in range(2):
        hvd.init()
        assert now()[:3] != before[:3]
        hvd.shutdown()
        assert now() == before


@on("fresh2")
def test_the_exception_that_has_ended_a_thread_is_told_when_its_rank_comes_to_its_end() -> None:
    hvd.init()

    def work() -> None:
        hvd.barrier()
        raise ValueError("bad sample")

    if hvd.rank() == 0:
        hvd.barrier()
        with pytest.raises(PeerLostError, match=r"^rank 1 \(.*\) ended with ValueError: bad sample \(in a thread\)"):
            hvd.barrier()
        hvd.shutdown()
        return
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    _at_exit()
