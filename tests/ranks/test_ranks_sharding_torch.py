"""``sharding="optimizer"`` with models and steps that torch changes: compiled, parametrized, fused ones."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from small_model import (
    Pair,
    assert_pair_is_alike,
    bits_of,
    make_loss,
    make_model,
    make_pair,
    needs_cpu_scaler,
    take_steps,
    train_pair,
)

import horo.torch as hvd

Make = Callable[[], torch.nn.Module]


def _adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, **{"lr": 0.01, **options})


def _pair(make: Make = make_model, kind: Any = _adam, **options: Any) -> Pair:
    return make_pair(lambda parameters: kind(parameters, **options), make)


def _go_on(pair: Pair, steps: range) -> None:
    """Both train, and are alike then."""
    train_pair(pair, steps)
    assert_pair_is_alike(pair)


@on("ranks2")
def test_compiled_models_and_steps() -> None:
    pair = _pair(foreach=True)
    compiled = [torch.compile(model, backend="eager") for model, _ in pair]
    for step in range(3):
        for model, (_, optimizer) in zip(compiled, pair, strict=True):
            take_steps(model, optimizer, range(step, step + 1))
    assert_pair_is_alike(pair)
    steps = [torch.compile(optimizer.step, backend="eager") for _, optimizer in pair]
    for step in range(3, 6):
        for (model, optimizer), call in zip(pair, steps, strict=True):
            optimizer.zero_grad()
            make_loss(model, hvd.rank(), step).backward()
            call()
    assert_pair_is_alike(pair)
    _go_on(pair, range(6, 8))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
@on("ranks2")
def test_a_learning_rate_that_is_a_tensor_and_a_scheduler_changes(options: dict[str, Any]) -> None:
    pair = _pair(kind=lambda parameters: _adam(parameters, lr=torch.tensor(0.1), **options))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pair]
    for step in range(4):
        _go_on(pair, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()


def _parametrized() -> torch.nn.Module:
    model = make_model()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    torch.nn.utils.parametrizations.orthogonal(model[2])
    return model


def _hooked() -> torch.nn.Module:
    model = make_model()
    torch.nn.utils.weight_norm(model[0])  # of older scripts
    torch.nn.utils.spectral_norm(model[2])
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("make", [_parametrized, _hooked])
@on("ranks2")
def test_weights_that_are_computed_from_parameters(make: Make) -> None:
    pair = _pair(make)
    _go_on(pair, range(3))
    for model, _ in pair:
        if make is _parametrized:
            torch.nn.utils.parametrize.remove_parametrizations(model[2], "weight")
            continue
        torch.nn.utils.remove_weight_norm(model[0])
    for model, optimizer in pair:
        optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.state.clear()
    _go_on(pair, range(3, 6))


@on("ranks2")
def test_a_state_whose_tensors_become_the_parameters() -> None:
    pair = _pair()
    _go_on(pair, range(2))
    for model, optimizer in pair:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.state.clear()
    _go_on(pair, range(2, 5))


@needs_cpu_scaler
@pytest.mark.parametrize("fused", [False, True])
@on("ranks2")
def test_a_step_under_a_gradient_scaler(fused: bool) -> None:
    pair = _pair(fused=fused)
    for model, optimizer in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(make_loss(model, hvd.rank(), step)).backward()
            if step == 2:
                next(iter(model.parameters())).grad.fill_(float("inf"))
            if step == 4:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 8.0
    assert_pair_is_alike(pair)


# -- other numbers of ranks ------------------------------------------------------------------------------------------


def test_a_later_job_of_other_ranks_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    def train(sharding: str | None, steps: range, source: str, target: str) -> list[Any]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, sharding=sharding)
        if source:
            found = torch.load(source, weights_only=True)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
        for step in steps:
            optimizer.zero_grad()
            make_loss(model, 0, step).backward()  # has equal gradients in all jobs
            optimizer.step()
        if hvd.rank() == 0 and target:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target)
        return bits_of(model)

    results = []
    for sharding in ("optimizer", None):
        file, path = "", str(tmp_path / "saved")
        for number, size in enumerate((4, 2, 1)):
            with RankPool(size) as pool:
                found = pool.run(train, sharding, range(3 * number, 3 * number + 3), file, path)
            assert all(each == found[0] for each in found)
            file = path
        results.append(found[0])
    assert results[0] == results[1]
