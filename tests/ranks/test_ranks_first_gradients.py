"""Ranks that read the same samples are told of it; and gradients that are not finite, where they are looked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from small_model import assert_close, gradients_of, made, make_loss, make_model, mean_gradients, sgd, take_step

import horo.torch as hvd
from horo.torch.engine import runtime


def _warnings_of(train: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in seen]


def _train(batch: int, steps: int = 5, scale: float = 1.0, **options: Any) -> None:
    model, optimizer = made(**options)
    for step in range(steps):
        optimizer.zero_grad()
        (make_loss(model, batch, step) * scale).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"op": hvd.Sum, "compression": hvd.Compression.fp16}])
def test_ranks_with_the_same_samples_are_told_once(ranks2_in_most_orders: RankPool, options: dict[str, Any]) -> None:
    def check(options: dict[str, Any]) -> list[str]:
        return _warnings_of(lambda: _train(0, **options))

    first, second = ranks2_in_most_orders.run(check, options)
    assert second == []
    (sentence,) = first
    assert sentence.startswith("all ranks had exactly the same gradients in the first 3 steps")
    assert "torch.utils.data.DistributedSampler(dataset, hvd.size(), hvd.rank())" in sentence
    assert "torch.manual_seed(seed + hvd.rank())" in sentence


def test_two_of_four_ranks_with_the_same_samples_are_named(ranks4: RankPool) -> None:
    def check() -> list[str]:
        return _warnings_of(lambda: _train([0, 1, 2, 1][hvd.rank()]))

    (sentence,), *others = ranks4.run(check)
    assert others == [[], [], []]
    assert sentence.startswith("ranks 1, 3 had exactly the same gradients")


def test_ranks_that_differ_are_told_of_nothing(ranks2_in_most_orders: RankPool) -> None:
    def check() -> list[str]:
        def no_gradient() -> None:
            _train(0, scale=0.0)

        def other_rows() -> None:  # of one table, in which equal values come to different rows
            table = torch.nn.Embedding(3000, 4)
            hvd.broadcast_parameters(table.state_dict(), 0)
            optimizer = sgd(table)
            for step in range(4):
                optimizer.zero_grad()
                table(torch.tensor([100 * step + 7 * hvd.rank()])).sum().backward()
                optimizer.step()

        def unused() -> None:
            optimizer = sgd(make_model())
            for _ in range(4):
                optimizer.step()

        def one_step_differs() -> None:
            model, optimizer = made()
            for step in range(4):
                optimizer.zero_grad()
                make_loss(model, hvd.rank() * (step == 1), step).backward()
                optimizer.step()

        def not_a_number() -> None:
            _train(0, scale=float("nan"))

        return [
            sentence
            for train in (lambda: _train(hvd.rank()), no_gradient, other_rows, unused, one_step_differs, not_a_number)
            for sentence in _warnings_of(train)
        ]

    assert ranks2_in_most_orders.run(check) == [[], []]


def test_sparse_gradients_of_the_same_rows_are_found(ranks2_in_most_orders: RankPool) -> None:
    def check() -> list[str]:
        def train() -> None:
            table = torch.nn.Embedding(6, 2, sparse=True)
            hvd.broadcast_parameters(table.state_dict(), 0)
            optimizer = sgd(table)
            for step in range(4):
                optimizer.zero_grad()
                table(torch.tensor([step])).square().sum().backward()
                optimizer.step()

        return _warnings_of(train)

    first, second = ranks2_in_most_orders.run(check)
    assert len(first) == 1
    assert second == []


def test_the_first_checks_can_be_left_out() -> None:
    def check() -> list[str]:
        def train() -> None:
            model = make_model(seed=1 + hvd.rank())  # would be refused
            optimizer = sgd(model)
            for _ in range(4):
                optimizer.zero_grad()
                model[2](torch.ones(1, 6, dtype=torch.float64)).sum().backward()
                optimizer.step()

        counters = runtime.current().core.counters
        before = counters()["requests"]
        seen = _warnings_of(train)
        assert counters()["requests"] - before == 4 * 4  # nothing but the gradients
        return seen

    with RankPool(2, environment={"HORO_FIRST_CHECKS": "0"}) as pool:
        assert pool.run(check) == [[], []]


@pytest.fixture(scope="module")
def checking2() -> Iterator[RankPool]:
    """Two ranks that would reduce gradients while backward runs, if they did not look at them first."""
    with RankPool(2, environment={"HORO_CHECK_NAN": "1", "HORO_OVERLAP": "always"}) as pool:
        yield pool


def _spoil(model: torch.nn.Module, name: str, value: float) -> Any:
    """Has the gradient of one parameter get a value, when it is computed."""

    def spoiled(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    return dict(model.named_parameters())[name].register_hook(spoiled)


@pytest.mark.parametrize("ready", ["backward", "step"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@on("checking2")
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks(value: float, ready: str) -> None:
    model, optimizer = made(gradients_ready=ready)
    for step in range(4):
        optimizer.zero_grad()
        wanted = mean_gradients(model, 2, step)
        if step != 2:
            make_loss(model, hvd.rank(), step).backward()
        else:
            handles = [_spoil(model, name, value) for name in ("0.weight", "2.bias")] if hvd.rank() == 1 else []
            with pytest.raises(
                ValueError,
                match=r"gradient of '2\.bias' has a value that is NaN or infinite on rank 1 in step 3 \(2 of 4 ",
            ):
                take_step(model, optimizer, step)
            own = [p.grad.isfinite().all().item() for p in model.parameters() if p.grad is not None]
            assert own == ([True] * 4 if hvd.rank() == 0 else [False, True, True, False])
            for handle in handles:
                handle.remove()
            optimizer.zero_grad()
            make_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        assert_close(gradients_of(model), wanted)


@on("checking2")
def test_a_gradient_that_is_not_finite_is_found_before_adasum_combines_steps() -> None:
    model, optimizer = made(op=hvd.Adasum)
    if hvd.rank() == 0:
        _spoil(model, "0.bias", float("inf"))
    make_loss(model, hvd.rank()).backward()
    with pytest.raises(ValueError, match=r"gradient of '0\.bias' .* on rank 0 in step 1 \(1 of 4"):
        optimizer.step()
