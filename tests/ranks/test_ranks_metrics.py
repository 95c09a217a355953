"""Metrics over all ranks, a rate that warms up; and what ``help()`` shows of functions, with examples that run."""

import inspect
import math
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from small_model import make_model

import horo.torch as hvd
from horo.torch.engine import runtime


@on("ranks")
def test_means_are_over_all_samples_of_all_ranks() -> None:
    averages = hvd.MetricAverage("loss", "accuracy", "never")
    for batch in range(hvd.rank()):  # rank 0 has none, rank 1 one, ...
        averages.update(batch + 1, loss=torch.tensor(float(hvd.rank()), requires_grad=True), accuracy=batch)
    averages.update(0, loss=math.nan, accuracy=torch.tensor([math.inf]))
    before = runtime.current().core.counters()["requests"]
    first = averages.compute()
    assert runtime.current().core.counters()["requests"] - before == 1
    weights = {rank: [batch + 1 for batch in range(rank)] for rank in range(hvd.size())}
    total = sum(sum(own) for own in weights.values())
    loss = sum(rank * sum(own) for rank, own in weights.items()) / total
    accuracy = sum(batch * weight for own in weights.values() for batch, weight in enumerate(own)) / total
    assert first == pytest.approx({"loss": loss, "accuracy": accuracy, "never": math.nan}, rel=1e-12, nan_ok=True)
    assert list(first) == ["loss", "accuracy", "never"]
    assert {repr(told) for told in hvd.allgather_object(first)} == {repr(first)}
    averages.reset()
    averages.update(accuracy=torch.tensor([[4]], dtype=torch.int64) + hvd.rank())
    second = averages.compute()
    assert second["accuracy"] == 4 + (hvd.size() - 1) / 2
    assert math.isnan(second["loss"])


def test_what_is_wrong_with_a_metric_or_a_warmup_is_named() -> None:
    for names in ((), ("a", "a"), ("a", ""), (1,)):
        with pytest.raises(hvd.UsageError, match="expected the names of the metrics, each once"):
            hvd.MetricAverage(*names)
    averages = hvd.MetricAverage("loss")
    with pytest.raises(hvd.UsageError, match=r"update\(los=...\): its metrics are loss"):
        averages.update(los=1)
    with pytest.raises(hvd.NotInitializedError):
        averages.compute()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for steps in (-1, 2.5, "5", None):
        with pytest.raises(hvd.UsageError, match=r"LearningRateWarmup\(steps=.*from 0 on"):
            hvd.LearningRateWarmup(optimizer, steps)
    with pytest.raises(hvd.NotInitializedError):
        hvd.LearningRateWarmup(optimizer, 5)


def test_an_update_that_fails_counts_nothing_and_names_metric_and_value() -> None:
    averages = hvd.MetricAverage("a", "b")
    wrong = [("x", "'x'"), ("1", "'1'"), (None, "None"), ([1], "[1]"), (10**400, "1000")]
    for value, shown in [*wrong, (torch.ones(1) * 1j, "a tensor of torch.complex")]:
        with pytest.raises(hvd.UsageError) as caught:
            averages.update(1, a=1, b=value)
        assert f"update(b=...): {shown}" in str(caught.value)
        assert str(caught.value).endswith(" is not one number")
    tensors = [(torch.ones(2), "a tensor of shape [2]"), (-torch.ones(1), "-1")]
    for weight, shown in [*tensors, ("1", "'1'"), (None, "None"), (-1, "-1"), (math.nan, "nan"), (math.inf, "inf")]:
        with pytest.raises(hvd.UsageError) as caught:
            averages.update(weight, a=1)
        assert f"update({shown}, ...): a weight is a number from 0 on" in str(caught.value)
    hvd.init()
    try:
        assert all(math.isnan(mean) for mean in averages.compute().values())
        averages.update(torch.tensor([2]), a=3)
        assert averages.compute()["a"] == 3
    finally:
        hvd.shutdown()


def rates(steps: int, calls: int, beside: bool = False) -> list[float]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    warmup = hvd.LearningRateWarmup(optimizer, steps)
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps + 1]) if beside else None
    found = []
    for _ in range(calls):
        found.append(optimizer.param_groups[0]["lr"])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        warmup.step()
        if decay is not None:
            decay.step()
    return found


@on("ranks")
def test_the_rate_rises_from_that_of_one_rank_to_that_of_all() -> None:
    size = hvd.size()
    expected = [0.5 * (1 + (size - 1) * min(1.0, step / 4)) for step in range(7)]
    assert rates(4, 7) == pytest.approx(expected, rel=1e-9)
    assert rates(0, 2) == pytest.approx([0.5 * size] * 2)
    expected = [rate * (0.1 if step >= 5 else 1) for step, rate in enumerate(expected)]
    assert rates(4, 7, beside=True) == pytest.approx(expected, rel=1e-9)


@on("ranks2")
def test_a_warmup_goes_on_from_its_state() -> None:
    def make() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5 * hvd.size())
        return optimizer, hvd.LearningRateWarmup(optimizer, 5)

    def go_on(optimizer: Any, warmup: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            warmup.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    whole = go_on(*make(), 8)
    optimizer, warmup = make()
    begun = go_on(optimizer, warmup, 3)
    saved = optimizer.state_dict(), warmup.state_dict()
    optimizer, warmup = make()
    optimizer.load_state_dict(saved[0])
    warmup.load_state_dict(saved[1])
    assert begun + go_on(optimizer, warmup, 5) == pytest.approx(whole, rel=1e-12)
    assert whole[-1] == pytest.approx(1.0)


@on("ranks4")
def test_a_process_set_averages_among_its_members_and_has_as_many_ranks_as_it_has() -> None:
    first = hvd.add_process_set([0, 1, 2])
    averages = hvd.MetricAverage("x", process_set=first)
    averages.update(x=hvd.rank())
    if first.included():
        assert averages.compute() == {"x": 1.0}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    hvd.LearningRateWarmup(optimizer, 5, process_set=first)
    hvd.remove_process_set(first)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0 if hvd.rank() < 3 else 3.0)


FUNCTIONS = [name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))]
EXAMPLES = [name for name in hvd.__all__ if "Example:\n" in (inspect.getdoc(getattr(hvd, name)) or "")]
CONSTANT = {name for name in FUNCTIONS if re.search(r"_(built|enabled)$", name)}
"""They take nothing, raise nothing and say yes or no, or a version."""


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - CONSTANT))
def test_a_function_says_what_it_takes_raises_and_when_it_returns(name: str) -> None:
    said = inspect.getdoc(getattr(hvd, name)) or ""
    arguments = inspect.signature(getattr(hvd, name)).parameters
    if arguments:
        assert "Args:\n" in said
    missing = [argument for argument in arguments if not re.search(rf"^ +(\w+, )*{argument}[:,]", said, re.MULTILINE)]
    assert not missing
    assert "Raises:\n" in said or "raises nothing" in said
    assert re.search(r"\bblocks?\b|returns? at once", said, re.IGNORECASE)
    assert name in EXAMPLES


@pytest.fixture(params=[1, 2])
def one_or_two(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


def test_examples_run_on_one_rank_and_on_two(one_or_two: RankPool) -> None:
    def check(examples: dict[str, str]) -> None:
        for name, code in examples.items():
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            known: dict[str, Any] = {"hvd": hvd, "torch": torch, "os": os, "model": model, "optimizer": optimizer}
            exec(compile(code, f"<example of {name}>", "exec"), known)
            hvd.init()
        torch.set_num_threads(1)

    said = {name: inspect.getdoc(getattr(hvd, name)) or "" for name in EXAMPLES}
    one_or_two.run(check, {name: textwrap.dedent(text.split("Example:\n")[1]) for name, text in said.items()})
