"""Gradients that hooks submit together; what hooks keep alive; signal handlers that raise while a request goes in."""

import contextlib
import gc
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import LeftError, do_at
from rank_pool import RankPool, on
from small_model import made, make_loss, mean_gradients

import horo.torch as hvd
from horo.core.calls import know_torch
from horo.errors import UsageError
from horo.torch.compat.profiler import profiling
from horo.torch.compat.torch_private import exchange_table, forward_mode
from horo.torch.engine import operation, runtime
from horo.torch.engine import runtime as _runtime
from horo.torch.optimizer import backward_hooks
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS


class _Subclass(torch.Tensor):
    """Passes through ``__torch_function__``."""


_kept: list[torch.Tensor] = []


def _cut(grad: torch.Tensor) -> torch.Tensor:
    """Also the last rows of a storage that others have."""
    _kept[:] = [torch.cat([grad] * 3)]
    return _kept[0][-len(grad) :]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda grad: torch._neg_view(grad.neg()),
    "columns": lambda grad: grad.t().contiguous().t(),
    "part": lambda grad: torch.cat([grad, grad])[len(grad) :],
    "sparse": lambda grad: grad.to_sparse(),
    "subclass": lambda grad: grad.as_subclass(_Subclass),
    "graph": lambda grad: grad.detach().requires_grad_(),
    "view": lambda grad: grad.view(-1).view(grad.shape),
    "cut": _cut,
}
"""Each is equal to its argument."""


def _many(count: int, *shape: int, first: Callable[[torch.Tensor], None] | None = None) -> tuple[list[Any], Any]:
    """Parameters and their optimizer; the hook ``first`` of the second one is before that of horo."""
    values = [torch.nn.Parameter(torch.zeros(shape or (3,))) for _ in range(count)]
    if first is not None:
        values[1].register_post_accumulate_grad_hook(first)
    named = [(f"value {index}", value) for index, value in enumerate(values)]
    return values, hvd.DistributedOptimizer(torch.optim.SGD(values, lr=0.0), named)


def _step(values: list[torch.nn.Parameter], optimizer: Any, step: int) -> None:
    """Checks one step, whose gradients are means over the ranks."""
    optimizer.zero_grad()
    sum((value * (hvd.rank() + step + at)).real.sum() for at, value in enumerate(values)).backward()
    for at, value in enumerate(values):
        grad: Any = value.grad
        found = (grad.to_dense() if grad.layout is torch.sparse_coo else grad).detach().resolve_neg().resolve_conj()
        assert torch.equal(found.as_subclass(torch.Tensor), torch.full_like(value, 0.5 + step + at)), (step, at)
    optimizer.step()


@pytest.mark.parametrize("has_table", [True, False])
@on("ranks2_in_backward")
def test_a_gradient_may_change_between_two_steps(has_table: bool) -> None:
    """Also where this torch has no table of functions for C."""
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def replace(value: torch.Tensor) -> None:
        for each in changes:
            value.grad = each(value.grad)

    values, optimizer = _many(3, 3, 3, first=replace)
    know_torch(torch.Tensor, exchange_table() if has_table else None, profiling, operation.count_change, forward_mode)
    try:
        for change in CHANGES.values():
            for step in range(5):
                changes[:] = [change] if step in {2, 3} else []
                _step(values, optimizer, step)
    finally:
        know_torch(torch.Tensor, exchange_table(), profiling, operation.count_change, forward_mode)
        _kept.clear()


@on("ranks2_in_backward")
def test_a_parameter_may_have_another_shape_dtype_or_conjugation() -> None:
    def conjugate(value: torch.Tensor) -> None:
        if value.is_complex() and value.grad is not None:
            value.grad = value.grad.conj()

    values, optimizer = _many(3, 3, 3, first=conjugate)
    step = 0
    plain = torch.zeros(3, 3)
    for form in (plain, torch.zeros(9), plain.double(), plain.cfloat(), torch.zeros(3, 2), plain.clone()):
        optimizer.zero_grad()
        values[1].data = form
        for _ in range(4):
            _step(values, optimizer, step)
            step += 1


@on("ranks2_always")
def test_memory_that_is_cut_off_before_a_bucket_is_full_is_not_written() -> None:
    values, optimizer = _many(3, 3, 3)
    cuts: list[None] = []

    def cut(value: Any) -> None:
        if cuts:
            value.grad.untyped_storage().resize_(4)

    values[1].register_post_accumulate_grad_hook(cut)  # behind that of horo
    for step in range(4):
        _step(values, optimizer, step)
    cuts.append(None)
    with pytest.raises(hvd.HoroError):
        _step(values, optimizer, 4)
    cuts.clear()
    optimizer.zero_grad()
    _step(values, optimizer, 5)


@on("ranks2_in_backward")
def test_hooks_keep_nothing_alive_and_leave_nothing_behind() -> None:
    values, optimizer = _many(40)
    counts = []
    for steps in (20, 100, 100):
        for step in range(steps):
            _step(values, optimizer, step)
        gc.collect()
        counts.append((sys.getallocatedblocks(), sys.getrefcount(None), len(runtime.current().requests)))
    blocks, nones, requests = zip(*counts, strict=True)
    assert max(abs(blocks[2] - blocks[1]), abs(nones[2] - nones[1])) < 80, counts
    assert requests == (0, 0, 0)
    left = [weakref.ref(each) for each in (values[0], optimizer)]
    del values, optimizer
    gc.collect()
    assert [each() for each in left] == [None] * 2


def _backward(values: list[torch.nn.Parameter], scale: float) -> None:
    sum((value * scale * (at + 1)).sum() for at, value in enumerate(values)).backward()


@pytest.mark.skipif(not COUNTS_IN_HOOKS, reason="each hook submits its gradient")
@on("ranks2_always")
def test_a_bucket_is_submitted_when_it_is_full_and_the_rest_at_the_end() -> None:
    values, optimizer = _many(40)
    seen: list[int] = []
    for value in values:
        value.register_post_accumulate_grad_hook(lambda _: seen.append(runtime.current().core.counters()["requests"]))
    for _ in range(5):
        optimizer.zero_grad()
        seen.clear()
        _backward(values, hvd.rank() + 1)
        assert [count - seen[0] for count in seen] == [0] * 31 + [32] * 9
        assert all(value.grad.eq(1.5 * (at + 1)).all() for at, value in enumerate(values))
        optimizer.step()
    assert runtime.current().core.counters()["requests"] - seen[0] == 40


@on("ranks2_in_backward")
def test_a_bucket_has_a_gradient_that_only_one_rank_makes() -> None:
    values, optimizer = _many(40)
    for step in range(6):
        optimizer.zero_grad()
        used = values if hvd.rank() == 0 or step % 2 == 0 else values[:3] + values[4:]
        sum(((value if value is not values[3] else 2 * value) * (step + 1)).sum() for value in used).backward()
        for at, value in enumerate(values):
            mean = (1 + (at == 3)) * (step + 1) / (1 + (at == 3 and step % 2 == 1))
            assert value.grad.tolist() == [mean] * 3, (step, at)
        optimizer.step()


@on("ranks2_in_backward")
def test_a_change_of_one_gradient_is_found_and_the_others_of_its_bucket_are_averaged() -> None:
    values, optimizer = _many(4)
    for step in range(4):
        optimizer.zero_grad()
        if step < 3 or not COUNTS_IN_HOOKS or runtime.current().job.overlap != "always":
            _backward(values, hvd.rank())
            continue
        hook = values[2].register_post_accumulate_grad_hook(_double)
        with pytest.raises(ValueError, match="the gradient of 'value 2' was changed while it was being reduced"):
            _backward(values, hvd.rank())
        hook.remove()
        assert [value.grad.tolist() for value in values[:2]] == [[0.5] * 3, [1.0] * 3]


@pytest.mark.skipif(not COUNTS_IN_HOOKS, reason="each hook submits its gradient")
@pytest.mark.parametrize(("part", "sizes"), [(1, [32, 32]), (2, [32, 32, 29])])
@on("ranks2_always")
def test_gradients_that_the_core_refuses_in_a_hook_are_sent_by_zero_grad(
    monkeypatch: pytest.MonkeyPatch, part: int, sizes: list[int]
) -> None:
    values, optimizer = _many(100)
    parts: list[int] = []
    job = runtime.current()
    whole = job.submit_each

    def refuse_one(gradients: list[Any], sync: bool, pending: object) -> None:
        parts.append(len(gradients))
        kept = [id(grad) for request in job.requests.values() for grad in request._memory]
        assert {id(each.held) for each in gradients} <= set(kept)  # they are the core's now
        whole(gradients[: 3 * (part - 1)] if len(parts) == part else gradients, sync, pending)
        if len(parts) == part:
            raise UsageError("refused")

    for step in range(8):
        optimizer.zero_grad()
        if step < 4:  # there are requests for both ways then
            with optimizer.no_sync():
                _backward(values, 1.0)
            optimizer.synchronize()
            optimizer.zero_grad()
        elif step == 6:
            monkeypatch.setattr(job, "submit_each", refuse_one)
            with pytest.raises(UsageError, match="refused"):
                _backward(values, 1.0)
            optimizer.zero_grad()
            assert parts == sizes  # of the others there are no gradients
            assert not job.requests
        _backward(values, hvd.rank() + 1)
        assert all(value.grad.eq(1.5 * (at + 1)).all() for at, value in enumerate(values))
        optimizer.step()


def _double(value: torch.Tensor) -> None:
    value.grad.mul_(2)


@pytest.mark.parametrize("bucket_bytes", [1, 2 << 16])
def test_training_goes_on_wherever_a_signal_handler_ends_a_hook(ranks2_always: RankPool, bucket_bytes: int) -> None:
    def check() -> int:
        bytes_before, backward_hooks.BUCKET_BYTES = backward_hooks.BUCKET_BYTES, bucket_bytes
        model, optimizer = made()
        at = 0
        is_over = False

        def handler() -> None:
            nonlocal is_over
            is_over = any(frame.name == "run_ended" for frame in traceback.extract_stack())
            if not is_over:
                raise LeftError

        while not is_over:
            for step in range(3 if at == 0 else 1):
                optimizer.zero_grad()
                make_loss(model, hvd.rank(), step).backward()
                for found, wanted in zip(model.parameters(), mean_gradients(model, 2, step), strict=True):
                    torch.testing.assert_close(found.grad, wanted)
                optimizer.step()  # a further reduction would have a mark, and its first gradient a request alone
            optimizer.zero_grad()
            loss = make_loss(model, hvd.rank(), 7)
            try:
                do_at(loss.backward, at, handler)
            except LeftError:
                at += 1
        backward_hooks.BUCKET_BYTES = bytes_before
        optimizer.zero_grad()
        return at

    counts = ranks2_always.run(check)
    assert counts[0] == counts[1] > 20


def _fail() -> None:
    raise LeftError


_FORMS: dict[str, Callable[[torch.Tensor, str], Any]] = {
    "async in place": lambda t, n: hvd.allreduce_async_(t, name=n),
    "grouped": lambda t, n: hvd.grouped_allreduce_async_([t], name=n),
    "allgather": lambda t, n: hvd.allgather_async(t, name=n),
    "sync": lambda t, n: hvd.allreduce(t, name=n, op=hvd.Sum),
    "sync broadcast": lambda t, n: hvd.broadcast(t, 0, name=n),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("form", _FORMS)
@on("ranks2")
def test_memory_stays_wherever_the_interrupt_comes(form: str, warm: bool) -> None:
    call, runtime = _FORMS[form], _runtime.current()
    waits = form.startswith("sync")
    places = 5 if waits else 100  # a wait has no end

    def take_part(name: str) -> None:
        answer = call(torch.ones(8), name)
        if not waits:
            hvd.synchronize(answer)

    if warm:
        for at in range(places if waits else 20):
            take_part(f"{form}.{at}")
    if hvd.rank() == 1:
        for name in hvd.broadcast_object(None):
            take_part(name)
        return
    names = []
    more = True
    while more and len(names) < places:
        names.append(f"{form}.{len(names)}")
        before = runtime.core.counters()["requests"]
        tensor = torch.ones(8)
        memory = weakref.ref(tensor)
        with contextlib.suppress(LeftError):
            more = do_at(lambda: call(tensor, names[-1]), len(names) - 1, _fail, {"horo_submit", "go_on"})  # noqa: B023
        del tensor
        gc.collect()  # frames that the exception has kept
        assert not runtime.active_calls, names[-1]
        assert runtime.core.counters()["requests"] == before + 1
        assert runtime.core.in_progress(before + 1)
        assert memory() is not None, f"{names[-1]}: the memory is gone while the core works on it"
    assert len(names) >= 5
    hvd.broadcast_object(names)
    for request in list(runtime.requests.values()):
        request.wait()
    deadline = time.monotonic() + 50
    while runtime.abandoned:  # until rank 1 has taken part in all
        runtime.release_abandoned()
        assert time.monotonic() < deadline
