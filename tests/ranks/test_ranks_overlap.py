"""When gradients are reduced, by hooks of several threads, also views of one storage; and the profiler."""

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
from small_model import assert_close, compressor, made, make_loss, train

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


def _leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _numbers(start: int, end: int) -> torch.Tensor:
    return torch.arange(float(start), float(end), dtype=torch.float64)


def _case(kind: str) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Parameters, a loss that is linear in them, and its gradients."""
    if kind == "stack":
        leaves = _leaves(*[(3,)] * 4)
        factors = _numbers(1, 13).view(4, 3)
        return leaves, lambda: torch.sum(torch.stack(leaves) * factors), list(factors)
    if kind == "flat":
        leaves = _leaves((2, 3), (2,), (1, 1))
        wanted = [_numbers(1, 7).view(2, 3), _numbers(7, 9), _numbers(9, 10).view(1, 1)]
        return leaves, lambda: torch.nn.utils.parameters_to_vector(leaves) @ _numbers(1, 10), wanted
    if kind == "the same":
        leaves = _leaves((2, 2), (4, 1), (4,))
        wanted = [_numbers(1, 5).view(leaf.shape) for leaf in leaves]
        return leaves, lambda: (leaves[0].view(4) + leaves[1].view(4) + leaves[2].view(4)) @ _numbers(1, 5), wanted
    leaves = _leaves((3,), (3,), (2,), (4,))  # "overlapping"
    wanted = [_numbers(1, 4), _numbers(4, 7), _numbers(1, 3), _numbers(3, 7)]
    return leaves, lambda: (torch.cat(leaves[:2]) + torch.cat(leaves[2:])) @ _numbers(1, 7), wanted


def _optimizer(leaves: list[torch.Tensor], **options: Any) -> Any:
    named = [(f"p{number}", leaf) for number, leaf in enumerate(leaves)]
    return hvd.DistributedOptimizer(torch.optim.SGD(leaves, lr=1.0), named, **options)


def _assert_gradients(leaves: list[torch.Tensor], wanted: list[torch.Tensor], factor: float) -> None:
    assert_close([leaf.grad for leaf in leaves], [gradient * factor for gradient in wanted])


@pytest.mark.parametrize("kind", ["stack", "flat", "the same", "overlapping"])
@on("ranks2_in_each_order")
def test_gradients_that_are_views_of_one_storage_are_averaged_or_summed(kind: str) -> None:
    for options in (
        {},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.bf16},  # small integers are exact in it
        {"compression": compressor(lambda t: t.view(-1), torch.Tensor.view)},
        {"groups": 1},
        {"gradient_predivide_factor": 2.0},
    ):
        leaves, loss, wanted = _case(kind)
        optimizer = _optimizer(leaves, **options)
        factor = 3.0 if options.get("op") == hvd.Sum else 1.5
        for step in range(1, 4):
            optimizer.zero_grad()
            (loss() * (hvd.rank() + 1)).backward()
            optimizer.step()
            _assert_gradients(leaves, wanted, factor)
            assert_close([leaf.detach() for leaf in leaves], [-step * factor * each for each in wanted])


@pytest.mark.parametrize("kind", ["stack", "the same", "overlapping"])
@on("ranks2_in_backward")
def test_a_second_backward_adds_to_averaged_views(kind: str) -> None:
    for op, factor in ((hvd.Average, 1.5), (hvd.Sum, 3.0)):
        leaves, loss, wanted = _case(kind)
        optimizer = _optimizer(leaves, op=op)
        for number in range(1, 4):
            (loss() * (hvd.rank() + 1)).backward()
            _assert_gradients(leaves, wanted, factor * number)
        torch.nn.utils.clip_grad_value_(leaves, 0.5)
        assert all(leaf.grad is not None and leaf.grad.eq(0.5).all() for leaf in leaves)
        optimizer.step()


@on("ranks2_in_each_order")
def test_gradients_stay_in_the_buffer_that_the_script_has_put_them_into() -> None:
    for op, factor in ((hvd.Average, 1.5), (hvd.Sum, 3.0)):
        leaves, loss, wanted = _case("flat")
        first, second = _optimizer(leaves[:2], op=op), _optimizer(leaves[2:], op=op)
        buffer = torch.zeros(9, dtype=torch.float64)
        offset = 0
        for leaf in leaves:
            leaf.grad = buffer[offset : offset + leaf.numel()].view_as(leaf)
            offset += leaf.numel()
        for _ in range(3):
            buffer.zero_()
            (loss() * (hvd.rank() + 1)).backward()
            first.step()
            second.step()
            _assert_gradients(leaves, wanted, factor)
            assert_close([buffer], [torch.cat([each.flatten() for each in wanted]) * factor])


@pytest.mark.parametrize("through", ["the gradient", "the buffer"])
@on("ranks2_in_step")
def test_a_view_that_was_changed_while_it_was_being_reduced_is_found(through: str) -> None:
    leaves, loss, _ = _case("flat")
    optimizer = _optimizer(leaves)
    buffer = torch.zeros(9, dtype=torch.float64)
    for leaf, part in zip(leaves, buffer.split([6, 2, 1]), strict=True):
        leaf.grad = part.view_as(leaf)
    loss().backward()
    changed = leaves[1].grad if through == "the gradient" else buffer
    assert changed is not None
    changed.mul_(0.5)
    with pytest.raises(ValueError, match="was changed while it was being reduced"):
        optimizer.step()


@on("ranks2_in_step")
def test_a_group_with_an_unused_parameter_may_share_memory_with_another_group() -> None:
    for first in (True, False):
        leaves, loss, wanted = _case("stack")
        (unused,) = _leaves((2,))
        groups = [leaves[:2], leaves[2:]]
        groups[0 if first else 1].append(unused)
        optimizer = _optimizer([*leaves, unused], groups=groups)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss().backward()
            (loss() * (hvd.rank() + 1)).backward()
            optimizer.step()
            _assert_gradients(leaves, wanted, 2.5)
