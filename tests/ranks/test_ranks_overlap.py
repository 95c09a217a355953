"""When gradients are reduced, while backward runs or after it, by hooks of several threads; and the profiler."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on, one_of
from small_model import made, make_loss, train

import horo.torch as hvd
from horo.core.calls import know_gradients
from horo.torch.engine import runtime
from horo.torch.optimizer import at_backward, backward_hooks, shared_gradients, submission
from horo.torch.optimizer.parameter_state import UnsentReduction
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS

_OWNERS = torch.strided, shared_gradients._count_owners, shared_gradients._OWN


@pytest.mark.parametrize("pool", ["ranks2", "ranks2_always", "ranks2_never"])
def test_gradients_travel_before_or_after_the_end_of_backward(request: pytest.FixtureRequest, pool: str) -> None:
    def check(ready: str, bucket_bytes: int) -> list[int]:
        threads, bytes_before = torch.get_num_threads(), backward_hooks.BUCKET_BYTES
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # every core computes
        backward_hooks.BUCKET_BYTES = bucket_bytes
        model, optimizer = made(gradients_ready=ready)
        optimizer.step()  # the first reduction has one request more
        optimizer.zero_grad()
        counters = runtime.current().core.counters
        counts = [counters()["requests"]]
        model[0].weight.register_post_accumulate_grad_hook(lambda _: counts.append(counters()["requests"]))
        make_loss(model, hvd.rank()).backward()
        counts.append(counters()["requests"])
        optimizer.step()
        counts.append(counters()["requests"])
        torch.set_num_threads(threads)
        backward_hooks.BUCKET_BYTES = bytes_before
        return [count - counts[0] for count in counts[1:]]

    ranks: RankPool = request.getfixturevalue(pool)
    during = 4 if pool == "ranks2_always" else 0
    assert ranks.run(check, "backward", 1) == [[during, 4, 4]] * 2
    if COUNTS_IN_HOOKS:  # else each hook submits
        assert ranks.run(check, "backward", 3 << 16) == [[min(during, 3), 4, 4]] * 2  # a bucket of three
        assert ranks.run(check, "backward", 1 << 20) == [[0, 4, 4]] * 2
    assert ranks.run(check, "step", 1) == [[during, during, 4]] * 2


@pytest.mark.parametrize("kinds", [("always", "never"), ("never", "always")], ids=str)
@on("ranks2")
def test_ranks_may_differ_in_when_they_reduce(kinds: tuple[str, str]) -> None:
    job = runtime.current().job
    before, job.overlap = job.overlap, kinds[hvd.rank()]
    model, optimizer = made()
    for step in range(3):
        make_loss(model, hvd.rank(), step).backward()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())  # waits for the others, whatever they do
        optimizer.step()
        optimizer.zero_grad()
    job.overlap = before
    values = [parameter.tolist() for parameter in model.parameters()]
    assert hvd.allgather_object(values) == [values] * 2


def _profiled(call: Any) -> dict[str, int]:
    """How often horo's events were shown while it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("horo.")}


@on("ranks2_in_each_order")
def test_a_training_step_is_shown_with_the_names_of_its_gradients() -> None:
    model, optimizer = made()
    for step in range(2):  # the first reduction compares parameters, the second repeats requests
        found = _profiled(lambda step=step: train(model, optimizer, step))
        for name, parameter in model.named_parameters():
            assert f"horo.allreduce {optimizer._reducer.states[parameter].kind}.{name}" in found, found
        assert "horo.synchronize" in found, found


@on("ranks2")
def test_each_operation_is_shown() -> None:
    def call() -> None:
        for _ in range(2):
            hvd.allreduce(torch.ones(3), name="shown")
            hvd.broadcast_(torch.ones(3), 0, name="shown")
            hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="shown.async"))
            hvd.allgather(torch.ones(3), name="shown")
            hvd.barrier()

    counts = _profiled(call)
    shown = [f"{kind} {kind}.shown" for kind in ("allreduce", "broadcast", "allgather")]
    for name in (*shown, "allreduce allreduce.shown.async", "synchronize allreduce.shown.async"):
        assert counts[f"horo.{name}"] == 2, counts
    assert sum(count for key, count in counts.items() if key.startswith("horo.barrier ")) == 2


ranks1 = one_of("ranks1_always", "ranks1_never", "ranks1_step")

_ROUNDS = 60
_FIRST_RUN = 1000
"""The number of the first run of autograd, higher than that of any other."""


def _call_at_once(calls: list[Callable[[], None]]) -> list[BaseException]:
    barrier = threading.Barrier(len(calls), timeout=30)
    errors: list[BaseException] = []

    def target(call: Callable[[], None]) -> None:
        try:
            barrier.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def _backward_in_two_threads(run: int, groups: int | None, ends: list[Callable[[], None]]) -> None:
    """Calls the first two hooks of a backward at once, then what autograd calls at its end."""
    leaves = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    named = [(f"hooks {groups} {run}.{i}", leaf) for i, leaf in enumerate(leaves)]  # no other optimizer has the names
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(leaves, lr=1.0), named, groups=groups)
    reducer = optimizer._reducer
    submitted: list[Any] = []

    class Counted(UnsentReduction):
        def __init__(self, states: Any, options: Any) -> None:
            super().__init__(states, options)
            submitted.extend(self._states)

    hooks = []
    for leaf in leaves:
        leaf.grad = torch.ones(2)
        hooks.append(functools.partial(reducer.states[leaf].hook, leaf))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "UnsentReduction", Counted)
        assert _call_at_once(hooks) == []
    submits = reducer._overlaps and COUNTS_IN_HOOKS  # an older torch does not in the first step
    assert len(submitted) == (2 if submits else 0)
    assert len({state.kind for state in reducer.states.values()}) == 1
    assert len(ends) == isinstance(reducer, at_backward.BackwardReducer)
    while ends:
        ends.pop()()
    optimizer.step()
    assert {state.kind for state in reducer.states.values()} == {"gradient"}  # named once
    assert all(leaf.eq(-1).all() for leaf in leaves)


@pytest.mark.parametrize("groups", [None, 1])
@on("ranks1")
def test_the_first_hooks_of_a_backward_may_come_in_two_threads_at_once(groups: int | None) -> None:
    ends: list[Callable[[], None]] = []

    class Engine:
        queue_callback = staticmethod(ends.append)

    turn_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for run in range(_FIRST_RUN, _FIRST_RUN + _ROUNDS):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.autograd.Variable, "_execution_engine", Engine)
                patch.setattr(backward_hooks, "current_run", lambda run=run: run)
                patch.setattr(at_backward, "current_run", lambda run=run: run)
                know_gradients(*_OWNERS, lambda run=run: run)
                patch.setattr(backward_hooks, "BUCKET_BYTES", 1)  # each hook submits
                patch.setattr(at_backward, "_refuse_in_backward", lambda *_: None)
                _backward_in_two_threads(run, groups, ends)
    finally:
        know_gradients(*_OWNERS, shared_gradients.current_run)
        sys.setswitchinterval(turn_s)
