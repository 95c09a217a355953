"""torch.compile around horo: quiet and right; compiled autograd: right, or a sentence."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import on, one_of
from small_model import assert_close, gradients_of, made, make_batch, make_loss, make_model, mean_gradients, train

import horo.torch as hvd
from horo.torch.optimizer.at_backward import BackwardReducer

ranks2 = one_of("ranks2_always", "ranks2_step_never")
"""Each order of calls, and reductions during backward and after it."""
DEADLINE_S = 240.0


def warnings_about_horo(caught: list[warnings.WarningMessage]) -> list[str]:
    """By their words, or the file that they point at. The project, and torch with it, may be in a folder named horo."""
    package = Path(hvd.__file__).parents[1]
    return [
        f"{warning.filename}: {warning.message}"
        for warning in caught
        if Path(warning.filename).is_relative_to(package)
        or any(word in str(warning.message) for word in ("Dynamo", "horo"))
    ]


@on("ranks2", deadline_s=DEADLINE_S)
def test_compiled_functions_that_communicate_warn_of_nothing() -> None:
    model, optimizer = made()

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = make_loss(model, hvd.rank(), number)
        loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach(), name="loss")

    def collectives(x: torch.Tensor) -> torch.Tensor:
        hvd.synchronize(hvd.allreduce_async(x))
        hvd.grouped_allreduce([x, x])
        return hvd.allgather(hvd.broadcast(hvd.allreduce(x, op=hvd.Sum), 0)) * hvd.size()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled, compiled2 = (torch.compile(f, backend="eager") for f in (step, collectives))
        for number in range(3):
            wanted = mean_gradients(model, hvd.size(), number)
            compiled(number)
            assert_close(gradients_of(model), wanted)
            assert compiled2(torch.ones(2)).tolist() == [4.0] * 4
        whole = torch.compile(lambda x: x * hvd.size() + hvd.rank(), backend="eager", fullgraph=True)
        assert whole(torch.ones(1)).item() == 2 + hvd.rank()
    assert warnings_about_horo(caught) == []


_LATE = """
import sys, torch, horo.torch as hvd
hvd.init()
assert "torch._dynamo" not in sys.modules

@torch.compile(backend="eager")
def collective(x):
    return hvd.synchronize(hvd.allreduce_async(x * 2, op=hvd.Sum, name="late")) + 1

for _ in range(3):
    assert collective(torch.ones(3)).tolist() == [3.0] * 3
"""


def test_torch_compile_that_is_loaded_after_init_warns_of_nothing() -> None:
    """Without an optimizer, nothing has loaded it before."""
    command = [sys.executable, "-W", "always", "-c", _LATE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Dynamo" not in ended.stderr and "horo" not in ended.stderr, ended.stderr


@on("ranks2", deadline_s=DEADLINE_S)
def test_a_compiled_model_trains_as_alone() -> None:
    model, optimizer = made()
    compiled = torch.compile(model, backend="aot_eager")
    for number in range(3):
        wanted = mean_gradients(model, hvd.size(), number)
        compiled(make_batch(hvd.rank(), number)).square().mean().backward()
        optimizer.step()
        assert_close(gradients_of(model), wanted)
        optimizer.zero_grad()


@on("ranks2", deadline_s=DEADLINE_S)
def test_a_step_whose_hooks_torch_has_taken_away_calls_them_again() -> None:
    """As torch 2.1 does for its own classes when torch.compile is used for the first time."""

    class Descent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)

    kind: Any = Descent
    model, other = make_model(), make_model()
    optimizer: Any = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1), model.named_parameters())
    for number in range(4):
        if number in {1, 2}:
            kind.step = kind.step.__wrapped__
            kind.step.hooked = True
        if number == 2:
            optimizer = hvd.DistributedOptimizer(kind(other.parameters(), lr=0.1), other.named_parameters())
            model = other
        train(model, optimizer, number)


@pytest.fixture
def compiled_autograd() -> str:
    """The name of its module, which takes a second to import."""
    name = "torch._dynamo.compiled_autograd"
    if not hasattr(importlib.import_module(name), "_enable"):
        pytest.skip("this torch has another compiled autograd (`make test TORCH=torch==2.13.0`)")
    return name


@on("ranks2", deadline_s=DEADLINE_S)
def test_compiled_autograd_works_in_horovods_order_and_is_refused_in_the_other(compiled_autograd: str) -> None:
    enable = importlib.import_module(compiled_autograd)._enable
    model, optimizer = made()
    for number in range(3):
        wanted = mean_gradients(model, hvd.size(), number)
        with enable(torch.compile(backend="eager")):
            if isinstance(optimizer._reducer, BackwardReducer):
                with pytest.raises(ValueError, match=r"compiled autograd .*gradients_ready='step'"):
                    make_loss(model, hvd.rank(), number).backward()
                optimizer.zero_grad()
                continue
            make_loss(model, hvd.rank(), number).backward()
        optimizer.step()
        assert_close(gradients_of(model), wanted)
        optimizer.zero_grad()
