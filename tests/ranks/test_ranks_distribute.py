"""A distributed model: whatever optimizers come later, they step by averaged gradients."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import on
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
