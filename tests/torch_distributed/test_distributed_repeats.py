"""Calls that come again: their requests are kept, and only addresses change; operations in progress share no memory."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on

from horo.core import context
from horo.errors import NotInitializedError, PeerLostError, UnsupportedError


@pytest.mark.parametrize("is_async", [False, True])
@on("group")
def test_a_call_that_comes_again_takes_the_memory_of_its_own(is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def do(call: Callable[..., dist.Work | None], *args: object, **options: object) -> None:
        work = call(*args, async_op=is_async, **options)
        assert work is None or work.wait()

    for i in range(4):
        given = torch.full((size,), float(i + rank))
        total = sum(float(i + each) for each in range(size))
        tensor = given.clone()
        before = tensor._version
        do(dist.all_reduce, tensor)
        assert tensor.tolist() == [total] * size
        assert tensor._version > before
        do(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
        assert tensor.tolist() == [total] * size
        tensor = given.clone()
        do(dist.broadcast, tensor, i % size)
        assert tensor.tolist() == [float(i + i % size)] * size
        gathered, mine = torch.zeros(size), torch.zeros(1)
        do(dist.all_gather_into_tensor, gathered, given[:1])
        assert gathered.tolist() == [float(i + each) for each in range(size)]
        do(dist.reduce_scatter_tensor, mine, given)
        assert mine.item() == total
        do(dist.all_to_all_single, gathered, given)
        assert gathered.tolist() == [float(i + each) for each in range(size)]
        do(dist.barrier)


@on("group")
def test_what_is_not_plain_is_no_repetition() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors: list[tuple[torch.Tensor, Callable[[float], torch.Tensor]]] = [
        (torch.ones(4), lambda factor: torch.full((4,), factor)),
        (torch.ones(4, 2)[:, 0], lambda factor: torch.full((4,), factor)),
        (torch.full((4,), 1j).conj().imag, lambda factor: torch.full((4,), -factor)),
        (torch.nn.Parameter(torch.ones(4), requires_grad=False), lambda factor: torch.full((4,), factor)),
    ]
    for _ in range(3):
        for tensor, want in tensors:
            once = tensor if tensor.is_neg() else tensor.clone()
            dist.all_reduce(once)
            assert torch.equal(once, want(float(size)))
            with torch.no_grad():
                once /= size
    halves = [(0.5, 1.5), (1.0, 3.0), (0.25, 0.75)]
    for factor, of_two in halves * 2:
        tensor = torch.full((4,), rank + 1.0)
        dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
        assert tensor.tolist() == [of_two if size == 2 else factor * 6] * 4
    for _ in range(3):
        pair = torch.full((2,), complex(rank, 1.0))
        group = dist.group.WORLD
        assert group is not None
        group.broadcast([pair], dist.BroadcastOptions()).wait()
        assert pair.tolist() == [1j, 1j]
        conjugated = torch.full((2,), 1j).conj()
        group.broadcast([conjugated], dist.BroadcastOptions()).wait()
        assert conjugated.tolist() == [-1j, -1j]
    for values in range(3):
        sparse = torch.sparse_coo_tensor([[rank]], [values + 1.0], (4,), check_invariants=True)
        dist.all_reduce(sparse)
        assert sparse.to_dense().sum() == size * (values + 1.0)


@pytest.mark.parametrize("is_async", [False, True])
@on("group2")
def test_a_tensor_whose_storage_was_cut_between_two_calls_is_refused(is_async: bool) -> None:
    for cut in range(2):
        tensors = [torch.ones(2, 6)[1], torch.ones(2, 6)[1]]  # at the end of their storages
        for _ in range(3):
            work = dist.all_to_all_single(*tensors, async_op=is_async)
            assert work is None or work.wait()
        tensors[cut].untyped_storage().resize_(44)
        with pytest.raises(UnsupportedError, match="bytes, and its storage has"):
            dist.all_to_all_single(*tensors, async_op=is_async)
        dist.barrier()


@on("group")
def test_operations_in_progress_share_no_memory() -> None:
    size = dist.get_world_size()
    tensor = torch.ones(6)
    works = [dist.all_reduce(part, async_op=True) for part in (tensor, tensor, tensor[:3], tensor[2:], tensor)]
    dist.all_reduce(tensor[5:])
    assert all(work.wait() for work in reversed(works))
    assert tensor.tolist() == [float(size**n) for n in (4, 4, 5, 4, 4, 5)]
    for _ in range(5):  # nobody waits for them
        dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor)
    assert tensor[0].item() == size**10
    outputs, given = torch.zeros(3, size), torch.ones(1)
    works = [dist.all_gather_into_tensor(output, given, async_op=True) for output in outputs]
    for work in works[::-1]:
        assert work.wait()
    assert torch.equal(outputs, torch.ones(3, size))


@on("group2")
def test_of_calls_that_are_no_repetition_few_requests_are_kept() -> None:
    group: Any = dist.group.WORLD
    exchange = group._exchange
    parameter = torch.nn.Parameter(torch.ones(77), requires_grad=False)
    for tensor in (parameter, torch.ones(78, 2)[:, 0], torch.ones(0)):
        before = sum(len(buffers) for buffers in exchange._kept.values())
        for _ in range(5):
            dist.broadcast(tensor, 0)
        assert sum(len(buffers) for buffers in exchange._kept.values()) <= before + 1


@on("group2")
def test_an_error_of_horo_that_a_signal_handler_raises_ends_no_operation() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["raised"])
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        return
    group: Any = dist.group.WORLD
    core, thread = group._exchange.pending.core, threading.get_ident()
    before = core.count_of("allreduce")

    def interrupt(begun: int) -> None:
        while (
            core.count_of("allreduce") < before + begun
            or sys._current_frames()[thread].f_code.co_filename != context.__file__
        ):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)

    def raise_error(*_: object) -> None:
        raise PeerLostError("of another group")

    def fails(call: Callable[[], object], begun: int) -> None:
        interrupts = threading.Thread(target=interrupt, args=(begun,))
        interrupts.start()
        with pytest.raises(PeerLostError, match="of another group"):
            call()
        interrupts.join()

    handler = signal.signal(signal.SIGUSR1, raise_error)
    tensor = torch.ones(1)
    memory = weakref.ref(tensor)
    fails(functools.partial(dist.all_reduce, tensor), 1)
    tensor = torch.ones(1)
    gc.collect()
    assert memory() is not None
    work = dist.all_reduce(tensor, async_op=True)
    fails(work.wait, 2)
    assert not work.is_completed()
    fails(lambda: dist.all_reduce(tensor), 2)  # waits for the other one
    signal.signal(signal.SIGUSR1, handler)
    store.set("raised", "")
    assert work.wait()
    assert tensor.item() == 2.0


@on("group2")
def test_two_threads_that_make_one_call_use_their_own_requests() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                tensor = torch.ones(3)
                dist.all_reduce(tensor)
                assert tensor.tolist() == [2.0, 2.0, 2.0]
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@on("fresh_group2")
def test_a_call_that_comes_again_after_the_end_is_refused() -> None:
    group = dist.group.WORLD
    assert group is not None
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    group.shutdown()
    with pytest.raises(NotInitializedError, match="it has been destroyed"):
        dist.all_reduce(torch.ones(1))


@on("group2")
def test_where_torch_forgets_works_they_are_held_until_somebody_waits() -> None:
    """As before torch 2.7: of a work that C++ gets from Python, the Python half is dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("horo.torch.distributed.work._IS_FORGOTTEN", True)
        held = dist.group.WORLD._exchange.pending._held
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
        assert list(held) == works
        works[0].wait()
        works[1].get_future().wait()
        assert list(held) == works[2:]
        for _ in range(100):
            dist.all_reduce(torch.ones(2), async_op=True)
        dist.barrier()
        assert len(held) <= 64
        held.clear()
