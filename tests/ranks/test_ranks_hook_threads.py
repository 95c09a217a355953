"""Hooks of one backward in several threads: autograd has one for each device that gradients are on.

No machine without a GPU has two, so that the threads here call the hooks themselves, in a run of autograd that does not
exist. They change places after every few instructions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import on, one_of

import horo.torch as hvd
from horo.torch.optimizer import at_backward, backward_hooks
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS

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
    submitted: list[None] = []
    submit = reducer.submitter.submit

    def count(*args: Any, **options: Any) -> None:
        submitted.append(None)
        submit(*args, **options)

    reducer.submitter.submit = count
    for leaf in leaves:
        leaf.grad = torch.ones(2)
    assert _call_at_once([lambda leaf=leaf: reducer.gradient_ready(leaf) for leaf in leaves]) == []
    submits = reducer._overlaps and COUNTS_IN_HOOKS  # an older torch does not in the first step
    assert len(submitted) == (0 if not submits else 1 if groups else 2)
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
                patch.setattr(at_backward, "_refuse_in_backward", lambda what: None)
                _backward_in_two_threads(run, groups, ends)
    finally:
        sys.setswitchinterval(turn_s)
