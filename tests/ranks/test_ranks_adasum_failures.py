"""``step()`` of ``DistributedOptimizer(op=hvd.Adasum)`` that raises: where parameters are then, and what comes next."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small_model import FailingSgd, make_loss, make_model

import horo.torch as hvd
from horo.errors import HoroError, UnsupportedError
from horo.torch.engine.request import Request
from horo.torch.optimizer import adasum


def _adasum(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum, **options)


def _step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), step).backward()
    optimizer.step()


def _values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _trained(steps: int) -> list[torch.Tensor]:
    """What undisturbed steps come to; all ranks call it."""
    model = make_model()
    optimizer = _adasum(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        _step(model, optimizer, step)
    return _values(model)


def _assert_trained(model: torch.nn.Module, expected: list[torch.Tensor]) -> None:
    for value, wanted in zip(_values(model), expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    own = [value.tolist() for value in _values(model)]
    assert hvd.allgather_object(own) == [own] * hvd.size()


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_parameters_are_back_when_a_step_has_raised(ranks2: RankPool, has_scheduler: bool) -> None:
    """And what is loaded then is where the next step begins."""

    def check(has_scheduler: bool) -> None:
        model = make_model()
        optimizer: Any = FailingSgd(model.parameters(), at=2)
        scheduled = [torch.optim.lr_scheduler.StepLR(optimizer, 9)] if has_scheduler else []
        optimizer = _adasum(model, optimizer)
        scheduled += [torch.optim.lr_scheduler.StepLR(optimizer, 9)] if has_scheduler else []
        _step(model, optimizer, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that step() was overridden
            for scheduler in scheduled:
                scheduler.step()
        before = _values(model)
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            _step(model, optimizer, 1)
        assert all(map(torch.equal, _values(model), before))
        assert "closure" in inspect.signature(optimizer.step).parameters
        model.load_state_dict(make_model(seed=hvd.rank()).state_dict())
        hvd.broadcast_parameters(model.state_dict(), 0)
        start = _values(model)
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()  # equal steps of all ranks: their mean
        for value, begun in zip(_values(model), start, strict=True):
            torch.testing.assert_close(value, begun - 0.1, rtol=1e-12, atol=1e-12)
        gone = weakref.ref(optimizer)
        del optimizer, scheduled
        assert (gone() is None) or has_scheduler  # nothing refers to itself

    ranks2.run(check, has_scheduler)


class _Stop(HoroError):
    """Not one of the exchange, though of the same kind."""


@pytest.mark.parametrize("place", ["submitted", "done"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, _Stop])
def test_what_a_signal_handler_loses_of_an_exchange_is_found(ranks2: RankPool, place: str, error: Any) -> None:
    """It raises when a function has returned, and before its result is stored."""

    def check(place: str, error: Any) -> None:
        expected = _trained(4)
        model, calls = make_model(), []
        optimizer = _adasum(model, torch.optim.SGD(model.parameters(), lr=0.1))
        _step(model, optimizer, 0)
        if hvd.rank() == 0:
            owner, name = (adasum, "start_allreduce") if place == "submitted" else (Request, "wait")
            real: Any = getattr(owner, name)

            def interrupted(*args: Any, **kwargs: Any) -> Any:
                result = real(*args, **kwargs)
                calls.append(1)
                if len(calls) == 2:
                    raise error
                return result

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(error):
                    _step(model, optimizer, 1)
        for step in (1, 2, 3):
            _step(model, optimizer, step)
        _assert_trained(model, expected)

    ranks2.run(check, place, error)


def test_a_delta_that_one_rank_cannot_send_fails_the_step_of_all(ranks2: RankPool) -> None:
    """Those behind it are sent, too: else the others would wait for them, and get those of the next step."""

    def check() -> None:
        expected = _trained(2)
        calls = []

        class Compressor(hvd.Compression.none):  # type: ignore[misc, valid-type]
            @staticmethod
            def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
                calls.append(1)
                is_wrong = hvd.rank() == 0 and len(calls) == 6
                return (tensor.to(torch.int64) if is_wrong else tensor), None

            @staticmethod
            def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
                return tensor

        model = make_model()
        optimizer = _adasum(model, torch.optim.SGD(model.parameters(), lr=0.1), compression=Compressor)
        _step(model, optimizer, 0)
        before = _values(model)
        with pytest.raises(UnsupportedError, match="not offered for int64"):
            _step(model, optimizer, 1)
        assert all(map(torch.equal, _values(model), before))
        _step(model, optimizer, 1)
        _assert_trained(model, expected)

    ranks2.run(check)
