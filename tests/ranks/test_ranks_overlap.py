"""When gradients are reduced: while backward runs, or after it."""

from __future__ import annotations

import os

import pytest
import torch
from rank_pool import RankPool
from small_model import make_loss, make_model, sgd

import horo.torch as hvd
from horo.torch.engine import runtime


@pytest.mark.parametrize("overlap", ["auto", "always", "never"])
def test_gradients_travel_before_or_after_the_end_of_backward(overlap: str) -> None:
    def check(ready: str) -> list[int]:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # every core computes
        model = make_model()
        optimizer = sgd(model, gradients_ready=ready)
        optimizer.step()  # the first reduction has one request more
        optimizer.zero_grad()
        counters = runtime.current().core.counters
        counts = [counters()["requests"]]
        last = model[0].weight
        last.register_post_accumulate_grad_hook(lambda _: counts.append(counters()["requests"]))  # type: ignore[no-untyped-call]
        make_loss(model, hvd.rank()).backward()
        counts.append(counters()["requests"])
        optimizer.step()
        counts.append(counters()["requests"])
        return [count - counts[0] for count in counts[1:]]

    pool = RankPool(2, environment={"HORO_OVERLAP": overlap})
    during = 4 if overlap == "always" else 0
    try:
        assert pool.run(check, "backward") == [[during, 4, 4]] * 2
        assert pool.run(check, "step") == [[during, during, 4]] * 2
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["always", "never"])
def test_ranks_may_differ_in_when_they_reduce(kind: str) -> None:
    def check(mine: str, other: str) -> torch.Tensor:
        runtime.current().job.overlap = mine if hvd.rank() == 0 else other
        model = make_model()
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            make_loss(model, hvd.rank(), step).backward()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())  # waits for the others, whatever they do
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    pool = RankPool(2)
    try:
        first, second = pool.run(check, kind, "never" if kind == "always" else "always")
    finally:
        pool.close()
    assert torch.equal(first, second)
