"""Signal handlers that come to a call of torch.distributed: they may call collectives themselves, and raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interrupts import do_at
from rank_pool import on


class _StopError(Exception):
    pass


def serve() -> None:
    """Rank 1: takes part in all that rank 0 begins, in whatever order, until that is over."""
    total = torch.zeros(4)
    while total[0] >= 0:
        total.zero_()
        dist.all_reduce(total)


def step(works: list[dist.Work]) -> None:
    """Operations in all ways; ``works`` gets those that are in progress."""
    tensor, apart = torch.ones(4), torch.ones(4, 2)[:, 0]
    works.append(dist.all_reduce(tensor, async_op=True))
    works.append(dist.all_reduce(apart, async_op=True))
    works.append(dist.all_reduce(tensor, async_op=True))  # waits for the first one
    future = works[1].get_future()
    works[2].wait()
    assert future.wait()[0].tolist() == [1.0] * 4
    dist.all_reduce(tensor)
    for work in works:
        work.wait()
    assert tensor.tolist() == apart.tolist() == [1.0] * 4


@pytest.mark.parametrize("how", ["calls", "raises"])
@on("fresh_group2", deadline_s=60)
def test_a_handler_may_come_anywhere(how: str) -> None:
    if dist.get_rank() == 1:
        serve()
        return
    works: list[dist.Work] = []

    def handle() -> None:
        if how == "raises":
            raise _StopError
        begun = [*works]
        assert all(work.get_future().wait() for work in begun)
        assert all(work.wait() for work in begun)
        step([])

    at, more = 0, True
    while more:
        works.clear()
        try:
            more = do_at(lambda: step(works), at, handle)
        except _StopError:
            assert how == "raises"
            for work in works:
                assert work.wait()
                assert work.get_future().wait()
        at += 1
    assert at > 100
    step([])
    dist.all_reduce(torch.full((4,), -1.0))


def sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=True)


FORMS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "all_reduce": (lambda: torch.ones(4), lambda t: dist.all_reduce(t, async_op=True), dist.all_reduce),
    "sparse": (sparse, lambda t: dist.all_reduce(t, async_op=True), dist.all_reduce),
    "send": (lambda: torch.ones(4), lambda t: dist.isend(t, 1), lambda t: dist.recv(t, 0)),
    "receive": (lambda: torch.ones(4), lambda t: dist.irecv(t, 1), lambda t: dist.send(t, 0)),
}
"""A tensor, what rank 0 begins with it, and what rank 1 does."""


@pytest.mark.parametrize("form", FORMS)
@on("fresh_group2", deadline_s=120)
def test_memory_stays_wherever_a_handler_raises(form: str) -> None:
    make, begin, answer = FORMS[form]
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        for _ in range(int(store.get("begun"))):
            answer(make())
        dist.barrier()
        return

    def fail() -> None:
        raise _StopError

    pending = dist.group.WORLD._exchange.pending
    core = pending.core
    at, more = 0, True
    while more and at < 50:  # with each operation that is left, there are more places
        handle = core.counters()["requests"] + 1
        with contextlib.suppress(_StopError):
            more = do_at(lambda: begin(make()), at, fail, {"horo_submit", "horo_send", "horo_receive"})
        assert core.in_progress(handle), (form, at)
        assert core._kept.get(handle) or pending.in_use.get(handle), (form, at)
        at += 1
    assert at > 4
    store.set("begun", str(at))
    dist.barrier()
