"""Beyond Horovod's calls: distributed models, means of metrics, a rate that warms up; and what ``help()`` shows."""

import copy
import inspect
import math
import os
import re
import textwrap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from small_model import (
    BrokenBackward,
    assert_averaged,
    assert_close,
    gradients_of,
    make_batch,
    make_loss,
    make_model,
    mean_gradients,
)
from torch.utils.data import DataLoader

import horo.torch as hvd
from horo.errors import NotInitializedError
from horo.torch.engine import runtime
from horo.torch.optimizer.advice import OF_MODEL


def assert_equal_on_all(model: torch.nn.Module) -> None:
    everyone = hvd.allgather_object([tensor.tolist() for tensor in model.state_dict().values()])
    assert all(other == everyone[0] for other in everyone)


class Trainer:
    """Makes its optimizer itself, as minGPT's does."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def run(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for step in range(3):
            self.model.zero_grad(set_to_none=step % 2 == 0)
            make_loss(self.model, hvd.rank(), step).backward()
            assert_close(gradients_of(self.model), mean_gradients(self.model, hvd.size(), step))
            optimizer.step()


@on("ranks4")
def test_a_trainer_with_an_optimizer_of_its_own_trains_on_all_ranks() -> None:
    model = torch.nn.Sequential(*make_model(seed=hvd.rank()), torch.nn.BatchNorm1d(3, momentum=0.0).double())
    model[3].running_mean.fill_(hvd.rank() + 1)
    assert hvd.distribute(model) is model
    assert model[3].running_mean.tolist() == [1.0] * 3
    Trainer(model).run()
    assert_equal_on_all(model)


@on("ranks2_in_backward")
def test_several_optimizers_step_after_one_backward_also_of_a_rank_that_skips_it() -> None:
    model = hvd.distribute(make_model())
    halves = [torch.optim.SGD(model[index].parameters(), lr=0.5) for index in (0, 2)]
    alone = make_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        there = [0] if step == 2 else [0, 1]
        if hvd.rank() in there:
            make_loss(model, hvd.rank(), step).backward()
        torch.stack([make_loss(alone, rank, step) / 2 for rank in there]).sum().backward()
        for optimizer in (*halves, plain):
            optimizer.step()
    assert_close(model.parameters(), alone.parameters())
    assert_equal_on_all(model)


@pytest.mark.parametrize("skipped", [0, 1])
@on("ranks2")
def test_a_rank_that_skips_a_backward_of_one_of_two_optimizers_in_turn_is_an_error_on_all(skipped: int) -> None:
    model = hvd.distribute(make_model())
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.5) for index in (0, 2)]
    with pytest.raises(hvd.UsageError, match=r"rank 1 has called step\(\) of more optimizers of the model"):
        for step in range(3):
            for number, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                if (step, number, hvd.rank()) != (1, skipped, 1):
                    make_loss(model, hvd.rank(), step).backward()
                optimizer.step()


@on("ranks2_in_backward")
def test_frozen_and_thawed_parameters_of_a_compiled_model_are_followed() -> None:
    inner = make_model()
    inner[0].requires_grad_(False)
    model: Any = hvd.distribute(torch.compile(inner, backend="eager"))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    for step in range(3):
        inner[0].requires_grad_(step > 0)
        optimizer.zero_grad()
        wanted = mean_gradients(inner, hvd.size(), step)
        model(make_batch(hvd.rank(), step)).square().mean().backward()
        assert_averaged(inner, wanted)
        optimizer.step()
        with torch.no_grad():
            model(make_batch(hvd.rank()))
    assert_equal_on_all(inner)


@on("ranks2")
def test_a_copy_is_not_distributed_and_nothing_keeps_the_model() -> None:
    model = hvd.distribute(make_model())
    mean = torch.optim.swa_utils.AveragedModel(model)
    make_loss(mean, hvd.rank()).backward()
    alone = copy.deepcopy(mean)
    alone.zero_grad()
    make_loss(alone, hvd.rank()).backward()
    torch.testing.assert_close(gradients_of(mean), gradients_of(alone), rtol=0, atol=0)
    make_loss(model, hvd.rank()).backward()
    part, weight = model[0], weakref.ref(model[2].weight)
    del model
    make_loss(torch.nn.Sequential(part), hvd.rank()).backward()  # its reducer lives as long as a module of the model
    everyone = hvd.allgather_object(part.weight.grad.tolist())
    assert everyone[0] == everyone[1]
    del part
    assert weight() is None


@on("ranks2")
def test_the_first_step_compares_the_state_of_an_optimizer() -> None:
    model = hvd.distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, hvd.rank())
    make_loss(model, hvd.rank()).backward()
    with pytest.raises(hvd.UsageError, match=r"the optimizer's state of parameter '0\.bias': not equal on all ranks"):
        optimizer.step()


def with_distributed_optimizer() -> Any:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return hvd.distribute(model), optimizer


def then_distributed_optimizer() -> Any:
    model = hvd.distribute(make_model())
    return hvd.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))


def step_of(*modules: torch.nn.Module, closure: Any = None) -> None:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    torch.optim.SGD(parameters, lr=0.1).step(closure)


def twice(model: torch.nn.Module) -> Any:
    return hvd.distribute(torch.nn.Sequential(hvd.distribute(model)))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "optimizer before": (
        with_distributed_optimizer,
        r"distribute: DistributedOptimizer averages .* '0\.weight' already",
    ),
    "optimizer after": (then_distributed_optimizer, r"DistributedOptimizer: hvd\.distribute averages .* '2\.weight'"),
    "twice": (lambda: twice(make_model()), r"distribute: hvd\.distribute averages the gradient of '0\.weight' already"),
    "no module": (lambda: hvd.distribute(torch.optim.SGD), "expected a torch.nn.Module, not type"),
    "no parameters": (lambda: hvd.distribute(torch.nn.Tanh()), r"the model \(Tanh\) has no parameters"),
    "lazy": (lambda: hvd.distribute(torch.nn.LazyLinear(2)), "'weight'"),
    "a stranger": (
        lambda: step_of(hvd.distribute(make_model()), torch.nn.Linear(1, 1)),
        r"parameter 4 of group 0 of the optimizer, of shape \[1, 1\], is of no distributed model",
    ),
    "not distributed": (lambda: hvd.no_sync(make_model()).__enter__(), r"call hvd\.distribute\(model\) first"),
}


@pytest.mark.parametrize("name", MISTAKES)
@on("ranks2")
def test_mistakes_are_errors_on_all_ranks(name: str) -> None:
    make, sentence = MISTAKES[name]
    with pytest.raises(hvd.UsageError, match=sentence):
        make()


@on("ranks2")
def test_what_a_distributed_model_does_not_do_is_refused() -> None:
    with pytest.raises(hvd.UnsupportedError, match="or DistributedOptimizer"):
        hvd.distribute(make_model(), op=hvd.Adasum)
    with pytest.raises(hvd.UnsupportedError, match="distribute one module that holds them"):
        step_of(hvd.distribute(make_model()), hvd.distribute(make_model(1)), closure=lambda: 0.0)


@pytest.mark.parametrize("first", ["distribute", "shard"])
@on("fresh2")
def test_a_script_without_init_begins_its_first_job_with_these(first: str) -> None:
    def begin() -> Any:
        return hvd.distribute(make_model()) if first == "distribute" else hvd.shard(DataLoader(range(8)))

    model = begin()
    assert hvd.size() == 2
    hvd.shutdown()
    with pytest.raises(NotInitializedError, match=r"call hvd\.init\(\) first"):
        begin()
    if first == "distribute":  # and a model goes on in the next jobs
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            hvd.init()
            optimizer.zero_grad()
            make_loss(model, hvd.rank()).backward()
            optimizer.step()
            assert_equal_on_all(model)
            hvd.barrier()
            hvd.shutdown()
        assert not torch.equal(model[0].weight, make_model()[0].weight)


def test_errors_advise_what_a_distributed_model_has() -> None:
    assert not any("synchronize()" in each or "GRADIENTS_READY" in each for each in OF_MODEL)


@on("ranks2_in_backward")
def test_an_exception_in_the_backward_of_a_distributed_model_has_a_remedy_that_it_has() -> None:
    model = hvd.distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="broken in the middle"):
        model[2](BrokenBackward.apply(model[0](make_batch(hvd.rank(), 7)))).square().mean().backward()
    with pytest.raises(ValueError, match=r"did not come to its end.*compute them again, on all ranks alike$"):
        optimizer.step()
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), 0).backward()
    optimizer.step()
    assert_equal_on_all(model)


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
