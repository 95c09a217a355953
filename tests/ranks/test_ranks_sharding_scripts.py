"""Scripts and optimizers of others under ``sharding="optimizer"``: the bits of the run without it."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import mmap
import os
from typing import Any

import pytest
import torch
from forked import in_child
from rank_pool import on, on_own
from small_model import (
    OwnOptimizer,
    Pair,
    assert_pair_is_alike,
    make_batch,
    make_model,
    make_pair,
    take_steps,
    train_pair,
)

import horo.torch as hvd
from horo.errors import ResourceError, UsageError
from horo.torch.optimizer.sharding import memory


class _Clipped(torch.optim.SGD):
    """Clips all parameters behind each step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)
        return loss


class _Decaying(OwnOptimizer):
    """Lets all weights decay, also of parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
            self.move(group["lr"])


class _Reassigning(OwnOptimizer):
    """Gives parameters new memory, also those that have no gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = torch.zeros(()) if parameter.grad is None else parameter.grad
                parameter.data = parameter.data * 0.9 - group["lr"] * gradient


class _LookingAhead(torch.optim.Adam):
    """Goes half way back to slow weights, which are its state, in every second step."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                if self.steps % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss


def _model() -> torch.nn.Module:
    model = make_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return model


def _pair(kind: Any, **options: Any) -> Pair:
    return make_pair(lambda parameters: kind(parameters, **options), _model)


@pytest.mark.parametrize("kind", [_Clipped, _Decaying, _Reassigning, _LookingAhead])
@on("ranks")
def test_an_optimizer_that_writes_all_parameters_in_its_step(kind: Any) -> None:
    pair = _pair(kind, lr=0.05)
    for step in range(5):
        train_pair(pair, range(step, step + 1))
        assert_pair_is_alike(pair, in_order=False)


@on("ranks2")
def test_a_model_that_is_shared_with_other_processes_before_each_step_takes_no_more_memory() -> None:
    pair = _pair(torch.optim.Adam, lr=0.01)
    sizes = set()
    for step in range(5):
        for model, optimizer in pair:
            take_steps(model, optimizer, range(step, step + 1))
            if step != 3 or hvd.rank() == 1:
                model.share_memory()
        sizes.add(os.fstat(pair[0][1]._sharded_step._placement.memory.descriptor).st_size)
    assert_pair_is_alike(pair)
    assert len(sizes) == 1


@on_own(2)
def test_a_rank_without_memory_for_more_parameters_and_another_try() -> None:
    pair = _pair(torch.optim.SGD, lr=0.1, momentum=0.9)
    for model, optimizer in pair:
        take_steps(model, optimizer, range(1))
        model.register_parameter("more", torch.nn.Parameter(torch.ones(3)))
        optimizer.add_param_group({"params": [model.more]})
    pages = memory.Pages

    def fail(*_: Any) -> Any:
        raise ResourceError("no memory")

    for step in range(1, 4):
        for model, optimizer in pair:
            optimizer.zero_grad()
            (model(make_batch(hvd.rank(), step)) * model.more).square().mean().backward()
            if step == 1 and model is pair[0][0]:
                memory.Pages = fail if hvd.rank() == 1 else pages  # type: ignore[misc]
                with pytest.raises(ResourceError, match="no memory"):
                    optimizer.step()
                memory.Pages = pages  # type: ignore[misc]
            optimizer.step()
    assert_pair_is_alike(pair)


@on_own(2)
def test_a_rank_without_memory_for_state_leaves_no_half_of_it() -> None:
    model, optimizer = _pair(torch.optim.Adam)[0]
    pages, made = memory.Pages, []

    def fail(*args: Any) -> Any:
        made.append(args)
        if len(made) == 2 and hvd.rank() == 1:
            raise ResourceError("no memory")
        return pages(*args)

    memory.Pages = fail  # type: ignore[assignment,misc]
    with pytest.raises(ResourceError, match="no memory"):
        take_steps(model, optimizer, range(1))
    with pytest.raises(UsageError, match=r"parameters may be of two steps, since .*no memory"):
        optimizer.state_dict()


@on_own(2)
def test_a_forked_child_that_drops_the_optimizer_keeps_its_own_memory() -> None:
    size = 1 << 22
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1000, size // 4000)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sharding="optimizer")
    model(torch.ones(1000) * (1 + hvd.rank())).sum().backward()
    optimizer.step()
    held = [model, optimizer]
    del model, optimizer

    def drop() -> None:
        own = [mmap.mmap(-1, size) for _ in range(4)]
        for each in own:
            each[:] = b"x" * size
        held.clear()
        assert all(each[size - 1] == ord("x") for each in own)

    in_child(drop)
