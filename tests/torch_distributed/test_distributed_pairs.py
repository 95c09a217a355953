"""Sends and receives of torch.distributed over horo, and operations with a root."""

from __future__ import annotations

import logging
import random
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on

DTYPES = ["float32", "bfloat16", "int64", "uint8", "bool", "complex64", "uint16", "float8_e5m2"]


def value(rank: int, dtype: str, count: int) -> torch.Tensor:
    return ((torch.arange(count) + rank) % 2).to(getattr(torch, dtype))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(each if each.is_complex() else each.to(torch.float64) for each in (one, other)))


@pytest.mark.parametrize("count", [1, 1000, 3_000_000])
@pytest.mark.parametrize("dtype", DTYPES)
@on("group")
def test_a_ring_of_sends_and_receives(dtype: str, count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = value(rank, dtype, count), torch.zeros(count).to(getattr(torch, dtype))
    before = (rank - 1) % size
    works = [dist.irecv(received, before), dist.isend(sent, (rank + 1) % size)]
    assert [work.wait() for work in works] == [True, True]
    assert equal(received, value(before, dtype, count))
    apart = torch.zeros(count, 2).to(getattr(torch, dtype))[:, 0]
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, apart, before)]
    ):
        work.wait()
    assert equal(apart, value(before, dtype, count))


@on("group")
def test_tags_order_and_any_source() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        tensors = {tag: torch.zeros(1) for tag in (5, 7)}
        works = [dist.irecv(tensors[tag], 1, tag=tag) for tag in (7, 5)]
        for work in works:
            work.wait()
        assert (tensors[5].item(), tensors[7].item()) == (5.0, 7.0)
        numbers = []
        for _ in range(3):
            tensor = torch.zeros(1)
            dist.recv(tensor, 1)
            numbers.append(tensor.item())
        assert numbers == [0.0, 1.0, 2.0]
        found = {}
        for _ in range(size - 1):
            tensor = torch.zeros(1)
            source = dist.recv(tensor, tag=9)
            found[source] = tensor.item()
        assert found == {other: 10.0 * other for other in range(1, size)}
    else:
        if rank == 1:
            works = [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (5, 7)]
            for i in range(3):
                works.append(dist.isend(torch.tensor([float(i)]), 0))
            for work in works:
                work.wait()
        dist.send(torch.tensor([10.0 * rank]), 0, tag=9)
    dist.barrier()


@on("group")
def test_any_legal_order_ends() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = random.Random(17)
    plan = [(shared.randrange(size), shared.randrange(size), shared.randrange(4), i) for i in range(300)]
    plan = [(source, target, tag, i) for source, target, tag, i in plan if source != target]
    works: list[Any] = []
    received = []
    for source, target, tag, i in plan:
        if rank == source:
            works.append(dist.isend(torch.full((1 + i * 37 % 5000,), float(i)), target, tag=tag))
        if rank == target:
            tensor = torch.zeros(1 + i * 37 % 5000)
            received.append((i, tensor))
            works.append(dist.irecv(tensor, source, tag=tag))
        if i % 20 == 0:
            dist.barrier()
    random.Random(rank).shuffle(works)
    for work in works:
        work.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, float(i))) for i, tensor in received)


@on("group")
def test_lists_of_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    listed: list[Any] = [{"rank": rank}, "x" * 100_000, None] if rank == 0 else [None] * 3
    if rank > 0:
        dist.recv_object_list(listed, rank - 1)
        assert listed == [{"rank": 0}, "x" * 100_000, None]
    if rank + 1 < size:
        dist.send_object_list(listed, rank + 1)


@on("group")
def test_a_difference_is_told_to_both() -> None:
    rank = dist.get_rank()
    if rank < 2:
        with pytest.raises(RuntimeError, match=r"[23] values of float32, but .* [23] values of float32; both must"):
            if rank == 0:
                dist.send(torch.ones(3), 1)
            else:
                dist.recv(torch.ones(2), 0)
    dist.barrier()


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ("recv", "does one of the ranks send first"),
        ("send", "let one rank receive first, or use isend and irecv, or batch_isend_irecv"),
        ("all_reduce", "has a rank fewer batches"),
    ],
)
@on("impatient_group2")
def test_two_that_wait_for_each_other_are_told(call: str, advice: str) -> None:
    rank, tensor = dist.get_rank(), torch.zeros(1)
    told = rf"rank 0 waits for .*, rank 1 for '(receive from|send to) rank 0, tag 0' \(.*:\d+\); .*{advice}"
    with pytest.raises(RuntimeError, match=told):
        if rank == 0 and call == "all_reduce":
            dist.all_reduce(tensor)
        else:
            (dist.send if call == "send" else dist.recv)(tensor, 1 - rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("has_sent", [False, True])
@on("fresh_group3")
def test_a_rank_that_is_done_leaves_and_the_others_go_on(has_sent: bool) -> None:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    tensor = torch.zeros(1)
    if rank == 0:
        if has_sent:
            dist.send(tensor, 1)
        dist.destroy_process_group()
        store.set("left", "")
        return
    if rank == 1 and has_sent:
        dist.recv(tensor, 0)
    large, peer = torch.full((4_000_000,), float(rank)), 3 - rank
    got = torch.zeros(4_000_000)
    work = dist.irecv(got, peer)
    store.wait(["left"])
    for _ in range(2):
        dist.send(large, peer) if rank == 1 else work.wait()
        work.wait() if rank == 1 else dist.send(large, peer)
        assert torch.all(got == peer)
        work = dist.irecv(got.zero_(), peer)
    more = torch.zeros(4_000_000)
    calls = [(dist.isend, large), (dist.isend, large), (dist.irecv, more)]
    for each in [work, *dist.batch_isend_irecv([dist.P2POp(call, tensor, peer) for call, tensor in calls])]:
        each.wait()
    assert torch.all(got == peer)
    assert torch.all(more == peer)
    dist.destroy_process_group()


@pytest.mark.parametrize("call", ["send", "recv"])
@on("fresh_group3")
def test_a_send_or_receive_that_is_late_names_the_other_rank(call: str) -> None:
    tensor, group = torch.zeros(1), dist.distributed_c10d._get_default_group()
    group._set_default_timeout(timedelta(seconds=1))
    late = r"rank 1 \(.*\) has not called (send to|receive from) rank 0, tag 7 within the timeout of 1 s"
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match=late):
            getattr(dist, call)(tensor, 1, tag=7)
    else:
        while (error := group._exchange.job.context.health()) is None:  # as one that computes
            time.sleep(0.01)
        assert re.search(late, str(error))
    dist.destroy_process_group()


@on("warned_group")
def test_a_receive_that_waits_is_reported_and_the_other_rank_says_where_it_stands() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("horo").addHandler(handler)
    told = ["has not called send to rank 0, tag 5", "another rank waits for this one"][dist.get_rank()]
    tensor = torch.ones(1)
    work = dist.irecv(tensor, 1, tag=5) if dist.get_rank() == 0 else None
    end = time.monotonic() + 50
    while not any(told in line for line in lines) and time.monotonic() < end:
        time.sleep(0.01)
    logging.getLogger("horo").removeHandler(handler)
    assert any(told in line for line in lines), lines
    dist.send(tensor, 0, tag=5) if work is None else work.wait()


@pytest.mark.parametrize("call", ["recv", "all_reduce"])
@on("fresh_group3")
def test_a_rank_that_leaves_with_an_error_does_not_wait_for_the_others(call: str) -> None:
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        for other in (1, 2):
            dist.send(tensor, other)
        with pytest.raises(ZeroDivisionError):
            try:
                _ = 1 / 0
            finally:
                dist.destroy_process_group()
    else:
        dist.recv(tensor, 0)
        with pytest.raises(RuntimeError, match=r"rank 0 \(.*has shut horo down"):
            dist.recv(tensor, 0) if call == "recv" else dist.all_reduce(tensor)
        dist.destroy_process_group()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [1, 1000, 70_001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
@on("group")
def test_operations_with_a_root(dtype: str, count: int, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def do(call: Any, *args: Any, **options: Any) -> None:
        work = call(*args, async_op=is_async, **options)
        assert work is None or work.wait()

    all_ = [value(each, dtype, count) for each in range(size)]
    for root in range(size):
        tensor = value(rank, dtype, count)
        do(dist.reduce, tensor, root)
        assert torch.equal(tensor, sum(all_[1:], all_[0]) if rank == root else all_[rank])
        listed = [torch.zeros(count, 2, dtype=tensor.dtype)[:, 0] for _ in range(size)] if rank == root else None
        do(dist.gather, all_[rank], listed, dst=root)
        assert listed is None or all(map(torch.equal, listed, all_))
        target = torch.zeros(count, 2, dtype=tensor.dtype)[:, 0]
        do(dist.scatter, target, all_ if rank == root else None, src=root)
        assert torch.equal(target, all_[rank])
    found = [None] * size if rank == 0 else None
    dist.gather_object({"rank": rank}, found, dst=0)
    assert found is None or found == [{"rank": each} for each in range(size)]


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "bool"])
@on("group")
def test_bitwise_reductions(op: str, dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [((torch.arange(50) * 7 + 3 * each) % 120).to(getattr(torch, dtype)) for each in range(size)]
    python = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
    want = given[0]
    for other in given[1:]:
        want = python(want, other)
    tensor = given[rank].clone()
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    assert torch.equal(tensor, want)


@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PRODUCT"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
@on("group")
def test_unsigned_integers(op: str, dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [torch.arange(50) % 9 + each + 1 for each in range(size)]
    want = getattr(torch.stack(given), {"SUM": "sum", "MIN": "amin", "MAX": "amax", "PRODUCT": "prod"}[op])(0)
    tensor = given[rank].to(getattr(torch, dtype))
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    assert torch.equal(tensor.to(torch.int64), want)
