"""When gradients are reduced: while backward runs, or after it."""

from __future__ import annotations

import os

import pytest
import torch
from rank_pool import RankPool

import horo.torch as hvd
from horo.torch import _state


def _model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def _loss(model: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize("overlap", ["auto", "always", "never"])
def test_gradients_are_reduced_before_or_after_the_end_of_backward(overlap: str) -> None:
    def check() -> tuple[int, int, int]:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # every core computes
        model = _model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        before = _state.current().core.counters()["requests"]
        _loss(model, hvd.rank()).backward()
        during = _state.current().core.counters()["requests"] - before
        held = len(optimizer._handles)
        optimizer.step()
        return during, held, _state.current().core.counters()["requests"] - before

    pool = RankPool(2, environment={"HORO_OVERLAP": overlap})
    try:
        assert pool.run(check) == [(4 if overlap == "always" else 0, 4, 4)] * 2
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["always", "never"])
def test_ranks_may_differ_in_when_they_reduce(kind: str) -> None:
    def check(mine: str, other: str) -> torch.Tensor:
        _state.current().job.overlap = mine if hvd.rank() == 0 else other
        model = _model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            _loss(model, hvd.rank(), step).backward()
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
