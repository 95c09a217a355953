"""Optimizers whose ``step()`` takes something else than a closure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small_model import assert_close, make_model

import horo.torch as hvd


class _Scaled(torch.optim.Optimizer):
    """SGD with the learning rate as the argument of each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, rate: float) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(rate * parameter.grad)


@pytest.mark.parametrize(("op", "ready"), [("Average", "backward"), ("Average", "step"), ("Adasum", None)])
def test_an_argument_that_is_no_closure_is_passed_on(ranks2: RankPool, op: str, ready: str | None) -> None:
    def check(op: str, ready: str | None) -> None:
        model = make_model()
        optimizer: Any = hvd.DistributedOptimizer(
            _Scaled(model.parameters()), op=getattr(hvd, op), gradients_ready=ready
        )
        start = [parameter.detach().clone() for parameter in model.parameters()]
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step(0.5)  # equal steps of all ranks: their mean
        assert_close(model.parameters(), [value - 0.5 for value in start])

    ranks2.run(check, op, ready)
