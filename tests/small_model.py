"""A small model, its loss on each rank, and what averaging its gradients must give."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

import horo.torch as hvd
from horo.torch.compression import Compressor
from horo.torch.optimizer import Distributed
from horo.torch.optimizer.sharding import owners

needs_cpu_scaler = pytest.mark.skipif(
    not hasattr(torch.amp, "GradScaler"),
    reason="torch has a GradScaler for the CPU from 2.3 on (`make test TORCH=torch==2.13.0`)",
)


class BrokenBackward(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("broken in the middle")


def make_model(seed: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def make_batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def batches(rank: int, size: int, epoch: int) -> int:
    """Of uneven data: each rank has another number, in another order in each epoch; one has none."""
    return (rank + epoch) % size * 2


def make_loss(model: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return model(make_batch(rank, step)).square().mean()


def mean_gradients(model: torch.nn.Module, ranks: int, step: int = 0) -> list[torch.Tensor]:
    """What averaging over the ranks must give, computed alone."""
    alone = copy.deepcopy(model)
    for parameter in alone.parameters():
        parameter.grad = None
    (sum(make_loss(alone, rank, step) for rank in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def sgd(model: torch.nn.Module, **options: Any) -> Distributed:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def made(**options: Any) -> tuple[torch.nn.Sequential, Distributed]:
    """A model and its optimizer, with the options of ``DistributedOptimizer``."""
    model = make_model()
    return model, sgd(model, **options)


def take_step(model: torch.nn.Module, optimizer: Any, step: int = 0) -> None:
    """``backward()`` with the loss of this rank, and ``step()``."""
    make_loss(model, hvd.rank(), step).backward()
    optimizer.step()


def take_steps(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """As a training script does: no gradient is left of the step before."""
    for step in steps:
        optimizer.zero_grad()
        take_step(model, optimizer, step)


def bits_of(model: torch.nn.Module) -> list[Any]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def cutting(is_cut: bool = True) -> AbstractContextManager[Any]:
    """Inside, ``sharding=`` cuts parameters that are small, at whole vectors of any processor."""
    return patch.multiple(owners, _EXCESS=0.0, LOAD_OF_TENSOR=128, PAGE=128) if is_cut else nullcontext()


Pair = list[tuple[Any, Any]]
"""A model with a sharded optimizer, and its twin with an unsharded one."""


def make_pair(kind: Any, make: Any = make_model, **options: Any) -> Pair:
    """``kind`` makes an optimizer of parameters; ``options`` are those of ``DistributedOptimizer``."""
    models = [make(), make()]
    return [
        (model, hvd.DistributedOptimizer(kind(model.parameters()), model, sharding=sharding, **options))
        for model, sharding in zip(models, ("optimizer", None), strict=True)
    ]


def train_pair(pair: Pair, steps: range) -> None:
    for model, optimizer in pair:
        take_steps(model, optimizer, steps)


def go_on(pair: Pair, steps: range = range(5, 8)) -> None:
    """Both train, and are alike then."""
    train_pair(pair, steps)
    assert_pair_is_alike(pair)


def assert_same_bits(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Of parameters, on all ranks."""
    own = bits_of(model)
    assert own == bits_of(plain)
    assert all(told == own for told in hvd.allgather_object(own))


def assert_pair_is_alike(pair: Pair, *, in_order: bool = True) -> None:
    """In parameters and state; ``in_order``: so are the parameters that have state."""
    (model, optimizer), (plain, its) = pair
    assert_same_bits(model, plain)
    own, their = optimizer.state_dict(), its.state_dict()
    assert_same_state(own, their)
    assert not in_order or list(own["state"]) == list(their["state"])


def assert_same_state(own: dict[str, Any], their: dict[str, Any]) -> None:
    assert own["param_groups"] == their["param_groups"]
    assert own["state"].keys() == their["state"].keys()
    for index, entries in own["state"].items():
        assert list(entries) == list(their["state"][index])
        for key, value in entries.items():
            other = their["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert (value.shape, value.dtype, value.stride()) == (other.shape, other.dtype, other.stride())
                assert torch.equal(value, other), (index, key)
            else:
                assert value == other


def backward_averages(model: torch.nn.Module, step: int = 0) -> None:
    """``backward()``, after which each gradient is the one of a process that has the batches of all ranks."""
    wanted = mean_gradients(model, hvd.size(), step)
    make_loss(model, hvd.rank(), step).backward()
    assert_close(gradients_of(model), wanted)


def assert_averaged(model: torch.nn.Module, wanted: list[torch.Tensor]) -> None:
    """Gradients are ``mean_gradients``; frozen parameters have none."""
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert_close([parameter.grad], [gradient if parameter.requires_grad else None])


def train(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    """One step, compared with the gradients of one process that has the batches of all ranks."""
    wanted = mean_gradients(model, hvd.size(), step)
    take_step(model, optimizer, step)
    assert_averaged(model, wanted)
    optimizer.zero_grad()


def compressor(compress: Callable[[torch.Tensor], torch.Tensor], decompress: Callable[..., torch.Tensor]) -> Any:
    """Sends what ``compress`` returns; ``decompress`` gets the shape, too."""

    class Made(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return compress(tensor), tensor.shape

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return decompress(tensor, ctx)

    return Made


class OwnOptimizer(torch.optim.Optimizer):
    """Of a script; its ``step`` steps by ``move``."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def trained(self) -> list[torch.Tensor]:
        """Parameters that have a gradient."""
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """As SGD does."""
        for parameter in self.trained():
            parameter.sub_(rate * parameter.grad)


class FailingSgd(OwnOptimizer):
    """SGD that raises once, when it has moved the first parameter."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters)
        self.calls, self.at = 0, at

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for number, parameter in enumerate(self.trained()):
            if number == 1 and self.calls == self.at:
                raise RuntimeError("in the middle of a step")
            parameter.sub_(0.1 * parameter.grad)
