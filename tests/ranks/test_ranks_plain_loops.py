"""Training loops as they are written for one process: on ranks with a share of the batch each, they do the same."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pool import on, one_of
from small_model import make_batch, make_model
from torch.utils.checkpoint import checkpoint

import horo.torch as hvd

Tensors = list[torch.Tensor]
STEPS = 3


class Side:
    """One rank with its share of each batch, or one process with the whole."""

    def __init__(self, rank: int | None, size: int, *, models: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.models = models
        """Whether models are distributed, and optimizers stay what they are."""

    def batch(self, step: int) -> torch.Tensor:
        """[5, 4] on a rank, [5 * size, 4] alone."""
        if self.rank is not None:
            return make_batch(self.rank, step)
        return torch.cat([make_batch(rank, step) for rank in range(self.size)])

    def wrap(self, optimizer: torch.optim.Optimizer, *models: torch.nn.Module, **options: Any) -> Any:
        """The optimizer, distributed on a rank."""
        if self.rank is None:
            return optimizer
        if self.models:
            for model in models:
                hvd.distribute(model, **options)
            return optimizer
        names = [(f"{i}.{name}", p) for i, model in enumerate(models) for name, p in model.named_parameters()]
        return hvd.DistributedOptimizer(optimizer, names, **options)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over the batch, so that the mean of the ranks' losses is that of the whole batch."""
    return output.square().mean()


def state_of(model: torch.nn.Module) -> Tensors:
    """Copies of parameters and gradients, and which gradients are None."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
    is_none = torch.tensor([p.grad is None for p in model.parameters()])
    return [p.detach().clone() for p in model.parameters()] + grads + [is_none]


def momentum(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def clip(side: Side, **options: Any) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(side.batch(step))).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        yield [norm, *state_of(model)]


def scaler(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model)
    scale = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        batch = side.batch(step)
        if step == 2 and side.rank in {None, 1}:
            batch[-1] = float("inf")
        scale.scale(loss_of(model(batch))).backward()
        if step % 2:
            scale.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scale.step(optimizer)
        scale.update()
        yield [torch.tensor(scale.get_scale()), *(p.detach().clone() for p in model.parameters())]


def accumulate(side: Side, op: int = 0, clips: bool = True, **options: Any) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model, **({"op": op} if op else {}), **options)
    factor = side.size if op == hvd.Sum and side.rank is None else 1
    for i in range(6):
        (factor * loss_of(model(side.batch(i))) / 3).backward()
        if i % 3 == 2:
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            yield state_of(model)
            optimizer.zero_grad(set_to_none=i > 3)


def accumulate_without_clearing(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model, op=hvd.Sum)
    factor = side.size if side.rank is None else 1
    for step in range(STEPS):
        (factor * loss_of(model(side.batch(step)))).backward()
        optimizer.step()
        optimizer.step()
        yield state_of(model)


def no_sync(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            if side.rank is None:
                loss_of(model(side.batch(3 * step + part))).backward()
            else:
                with hvd.no_sync(model) if side.models else optimizer.no_sync():
                    loss_of(model(side.batch(3 * step + part))).backward()
        loss_of(model[2](torch.tanh(side.batch(step) @ torch.ones(4, 6, dtype=torch.float64)))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        yield state_of(model)


def gan(side: Side) -> Iterator[Tensors]:
    generator, critic = make_model(1), torch.nn.Sequential(make_model(2), torch.nn.Linear(3, 1).double())
    fill = torch.nn.Linear(3, 4).double()
    with torch.no_grad():
        for p in [*critic[1].parameters(), *fill.parameters()]:
            p.fill_(0.3)
    makers = torch.nn.ModuleList([generator, fill])
    g_optimizer = side.wrap(torch.optim.Adam(makers.parameters(), lr=0.01), makers)
    d_optimizer = side.wrap(torch.optim.Adam(critic.parameters(), lr=0.01), critic)
    for step in range(STEPS):
        fake = fill(generator(side.batch(step)))
        critic.zero_grad()
        loss_of(critic(side.batch(step + 10)) - 1).backward()
        loss_of(critic(fake.detach())).backward()
        yield state_of(critic)
        d_optimizer.step()
        makers.zero_grad()
        loss_of(critic(fake) - 1).backward()
        torch.nn.utils.clip_grad_value_(makers.parameters(), 0.01)
        yield state_of(makers)
        g_optimizer.step()
        yield state_of(critic)


def closure_that_clips(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(side.batch(step)))  # noqa: B023
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            return loss

        yield [optimizer.step(closure).detach(), *state_of(model)]


def retained_graph(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(side.batch(step))
        loss_of(output).backward(retain_graph=True)
        output.mean().backward(inputs=list(model[2].parameters()), retain_graph=True)
        yield state_of(model)
        output.abs().mean().backward()
        optimizer.step()
        yield state_of(model)


def gradient_penalty(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = side.batch(step).requires_grad_()
        output = model(batch)
        (slope,) = torch.autograd.grad(output.sum(), [batch], create_graph=True)
        (loss_of(output) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        yield state_of(model)


def second_order(side: Side) -> Iterator[Tensors]:
    model = make_model()
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model(side.batch(step))).backward(create_graph=True)
        yield [grad.detach() for grad in state_of(model)]
        optimizer.step()


def checkpoints(side: Side, reentrant: bool = True) -> Iterator[Tensors]:
    """A block inside a checkpoint inside another, and one that two checkpoints share."""
    inner, outer, shared = make_model(1), torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 4).double()
    torch.manual_seed(9)
    for p in [*outer.parameters(), *shared.parameters()]:
        torch.nn.init.normal_(p, std=0.3)
    model = torch.nn.ModuleList([inner, outer, shared])
    optimizer = side.wrap(momentum(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = side.batch(step).requires_grad_()
        x = checkpoint(shared, x, use_reentrant=reentrant)
        x = checkpoint(
            lambda v: outer(checkpoint(inner, torch.tanh(v), use_reentrant=reentrant)), x, use_reentrant=reentrant
        )
        loss_of(checkpoint(shared, x, use_reentrant=reentrant)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        yield state_of(model)


def sparse(side: Side, op: int = hvd.Average, **options: Any) -> Iterator[Tensors]:
    table = torch.nn.Embedding(9, 3, sparse=True).double()
    with torch.no_grad():
        table.weight.copy_(torch.linspace(-1, 1, 27, dtype=torch.float64).view(9, 3))
    optimizer = side.wrap(torch.optim.SGD(table.parameters(), lr=0.5), table, op=op, **options)
    factor = side.size if op == hvd.Sum and side.rank is None else 1
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            rows = (side.batch(2 * step + part).abs() * 4).long() % 9
            (factor * loss_of(table(rows))).backward()
        yield [table.weight.grad.to_dense()]
        optimizer.step()
        yield [table.weight.detach().clone()]


LOOPS: dict[str, tuple[Callable[..., Iterator[Tensors]], dict[str, Any]]] = {
    "accumulate": (accumulate, {}),
    "accumulate, counted": (accumulate, {"backward_passes_per_step": 3}),
    "accumulate sums": (accumulate, {"op": hvd.Sum}),
    "accumulate sums, in groups": (accumulate, {"op": hvd.Sum, "groups": 1}),
    "accumulate, fewer passes": (accumulate, {"clips": False, "backward_passes_per_step": 2}),
    "accumulate without clearing": (accumulate_without_clearing, {}),
    "checkpoints": (checkpoints, {}),
    "checkpoints, not reentrant": (checkpoints, {"reentrant": False}),
    "clip": (clip, {}),
    "clip, in groups": (clip, {"groups": 2}),
    "clip, predivided": (clip, {"gradient_predivide_factor": 3.0}),
    "closure that clips": (closure_that_clips, {}),
    "gan": (gan, {}),
    "gradient penalty": (gradient_penalty, {}),
    "no_sync": (no_sync, {}),
    "retained graph": (retained_graph, {}),
    **({"scaler": (scaler, {})} if hasattr(torch.amp, "GradScaler") else {}),
    "second order": (second_order, {}),
    "sparse": (sparse, {}),
    "sparse sums": (sparse, {"op": hvd.Sum}),
    "sparse as dense": (sparse, {"sparse_as_dense": True}),
}

OF_OPTIMIZERS = {"backward_passes_per_step", "groups", "gradient_predivide_factor"}
"""Options that a distributed model does not have."""

pools = one_of("ranks2_always", "ranks2_never", "ranks4_always")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS)
@on("pools")
def test_a_loop_for_one_process_does_the_same_on_ranks(loop: str) -> None:
    compare(loop, models=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", [name for name, (_, options) in LOOPS.items() if not OF_OPTIMIZERS & options.keys()])
@on("pools")
def test_a_loop_does_the_same_with_a_distributed_model(loop: str) -> None:
    compare(loop, models=True)


def compare(loop: str, *, models: bool) -> None:
    make, options = LOOPS[loop]
    alone = [copy.deepcopy(tensors) for tensors in make(Side(None, hvd.size()), **options)]
    together = list(make(Side(hvd.rank(), hvd.size(), models=models), **options))
    for number, (found, wanted) in enumerate(itertools.zip_longest(together, alone)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=f"record {number}: {one} != {other}")
    assert len({repr(told) for told in hvd.allgather_object([each.tolist() for each in together[-1]])}) == 1
