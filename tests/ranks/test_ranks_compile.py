"""torch.compile around horo: quiet and right; compiled autograd: right, or a sentence."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, one_of
from small_model import assert_close, gradients_of, make_batch, make_loss, make_model, mean_gradients, sgd, train

import horo.torch as hvd
from horo.torch.optimizer.at_backward import BackwardReducer

DEADLINE_S = 240.0


ranks2 = one_of("ranks2_always", "ranks2_never", "ranks2_step", "ranks2_step_never")
"""Two ranks in each order of calls, which reduce gradients during backward or after it."""


def warnings_about_horo(caught: list[warnings.WarningMessage]) -> list[str]:
    """By their words, or the file that they point at. The project, and torch with it, may be in a folder named horo."""
    package = Path(hvd.__file__).parents[1]
    return [
        f"{warning.filename}: {warning.message}"
        for warning in caught
        if Path(warning.filename).is_relative_to(package)
        or any(word in str(warning.message) for word in ("Dynamo", "horo"))
    ]


def test_compiled_functions_that_communicate_warn_of_nothing(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer: Any = sgd(model)

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

    ranks2.run(check, deadline_s=DEADLINE_S)


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


def test_a_compiled_model_trains_as_alone(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer: Any = sgd(model)
        compiled = torch.compile(model, backend="aot_eager")
        for number in range(3):
            wanted = mean_gradients(model, hvd.size(), number)
            compiled(make_batch(hvd.rank(), number)).square().mean().backward()
            optimizer.step()
            assert_close(gradients_of(model), wanted)
            optimizer.zero_grad()

    ranks2.run(check, deadline_s=DEADLINE_S)


def test_a_step_whose_hooks_torch_has_taken_away_calls_them_again(ranks2: RankPool) -> None:
    """As torch 2.1 does for its own classes when torch.compile is used for the first time."""

    class Descent(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)

    def check() -> None:
        kind: Any = Descent
        model, other = make_model(), make_model()
        optimizer: Any = hvd.DistributedOptimizer(kind(model.parameters()), model.named_parameters())
        for number in range(4):
            if number in {1, 2}:
                kind.step = kind.step.__wrapped__
                kind.step.hooked = True
            if number == 2:
                optimizer = hvd.DistributedOptimizer(kind(other.parameters()), other.named_parameters())
                model = other
            train(model, optimizer, number)

    ranks2.run(check, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("form", ["of a function around it", "of the step itself"])
def test_a_compiled_adasum_step_that_raises_is_undone_and_done_by_the_next_call(ranks2: RankPool, form: str) -> None:
    """Ranks have the same gradients, of which Adasum makes what one rank alone has."""

    class StopError(Exception):
        pass

    class Descent(torch.optim.SGD):
        raises = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.raises:
                raise StopError

    def check() -> None:
        model, alone = make_model(), make_model()
        plain: Any = Descent(model.parameters(), lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)

        def function() -> None:
            optimizer.step()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            called: Any = function if form == "of a function around it" else optimizer.step
            step = torch.compile(called, backend="eager")
            for number in range(4):
                for each, its_optimizer in ((model, optimizer), (alone, other)):
                    its_optimizer.zero_grad()
                    make_loss(each, 0, number).backward()
                before = [parameter.detach().clone() for parameter in model.parameters()]
                if number == 2:
                    optimizer.raises = True
                    with pytest.raises(StopError):
                        step()
                    assert_close(list(model.parameters()), before)
                    optimizer.raises = False
                step()
                other.step()
                assert_close(list(model.parameters()), list(alone.parameters()))
        assert warnings_about_horo(caught) == []

    ranks2.run(check, deadline_s=DEADLINE_S)


def test_compiled_autograd_works_in_horovods_order_and_is_refused_in_the_other(ranks2: RankPool) -> None:
    from torch._dynamo import compiled_autograd  # noqa: PLC0415

    if not hasattr(compiled_autograd, "_enable"):
        pytest.skip("this torch has another compiled autograd (`make test TORCH=torch==2.13.0`)")

    def check() -> None:
        from torch._dynamo import compiled_autograd  # noqa: PLC0415

        model = make_model()
        optimizer: Any = sgd(model)
        for number in range(3):
            wanted = mean_gradients(model, hvd.size(), number)
            with compiled_autograd._enable(torch.compile(backend="eager")):
                if isinstance(optimizer._reducer, BackwardReducer):
                    with pytest.raises(ValueError, match=r"compiled autograd .*gradients_ready='step'"):
                        make_loss(model, hvd.rank(), number).backward()
                    optimizer.zero_grad()
                    continue
                make_loss(model, hvd.rank(), number).backward()
            optimizer.step()
            assert_close(gradients_of(model), wanted)
            optimizer.zero_grad()

    ranks2.run(check, deadline_s=DEADLINE_S)


def test_sparse_gradients_warn_of_nothing(ranks2: RankPool) -> None:
    def check() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for as_dense in (False, True):
                torch.manual_seed(0)
                table = torch.nn.Embedding(6, 3, sparse=True).double()
                optimizer: Any = sgd(table, sparse_as_dense=as_dense)
                for step in range(2):
                    if step == 0 or hvd.rank() == 0:  # then one rank does not use it
                        table(torch.tensor([hvd.rank(), 3])).sum().backward()
                    optimizer.step()
                    grad = table.weight.grad
                    assert grad is not None
                    dense = grad.to_dense()[:, 0].tolist()
                    assert dense == ([0.5, 0.5, 0, 1, 0, 0] if step == 0 else [0.5, 0, 0, 0.5, 0, 0])
                    optimizer.zero_grad()

    ranks2.run(check)
