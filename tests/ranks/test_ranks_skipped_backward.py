"""A rank that skips ``backward()``, or has one more than others: parameters do not part without an error."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on, on_own
from small_model import assert_close, gradients_of, made, make_loss, mean_gradients, sgd

import horo.torch as hvd
from horo.torch.engine import runtime
from horo.torch.optimizer.at_backward import BackwardReducer


def copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def parts_of_rank_0(model: torch.nn.Module, step: int = 0) -> list[torch.Tensor]:
    """The gradients if rank 0 alone, of two, has a loss."""
    return [g / 2 for g in torch.autograd.grad(make_loss(model, 0, step), list(model.parameters()))]


@pytest.mark.parametrize("groups", [None, 1])
@on("ranks2_in_backward")
def test_gradients_clipped_where_another_rank_skipped_backward_are_an_error_on_all(groups: int | None) -> None:
    model, optimizer = made(groups=groups)
    for step in range(2):
        optimizer.zero_grad()
        make_loss(model, hvd.rank(), step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    optimizer.zero_grad()
    before = copies(model)
    if hvd.rank() == 0:
        make_loss(model, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(
        ValueError,
        match=r"rank 1 took part in the reduction.*the gradient of '0\.bias' is not equal.*"
        r"optimizer\.synchronize\(\) on every rank",
    ):
        optimizer.step()
    assert_close(model.parameters(), before)


@on("ranks2_in_backward")
def test_synchronize_on_every_rank_makes_clipping_right_where_one_skipped_backward() -> None:
    model, optimizer = made()
    for step in range(4):
        optimizer.zero_grad()
        wanted = parts_of_rank_0(model, step)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted]))
        if hvd.rank() == 0:
            make_loss(model, 0, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 4)
        optimizer.step()
        for found, gradient in zip(gradients_of(model), wanted, strict=True):
            torch.testing.assert_close(found, gradient / 4, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("groups", [None, 1])
@on("ranks2_in_each_order")
def test_a_skipped_backward_is_no_error_where_gradients_stay_as_they_are(groups: int | None) -> None:
    model, optimizer = made(groups=groups)
    for step in range(6):
        optimizer.zero_grad()
        if step % 2:
            wanted = parts_of_rank_0(model, step)
            if hvd.rank() == 0:
                make_loss(model, 0, step).backward()
        else:
            wanted = mean_gradients(model, 2, step)
            make_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        assert_close(gradients_of(model), wanted)


@pytest.mark.parametrize("clip", [True, False])
@on("ranks2_in_backward")
def test_a_sparse_gradient_clipped_where_another_rank_skipped_backward_is_an_error(clip: bool) -> None:
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    hvd.broadcast_parameters(table.state_dict(), 0)
    before = copies(table)
    optimizer = sgd(table)
    if hvd.rank() == 0:
        table(torch.tensor([1, 4])).sum().backward()
        if clip:
            table.weight.grad.mul_(0.5)
    if clip:
        with pytest.raises(ValueError, match="the gradient of 'weight' is not equal on all ranks"):
            optimizer.step()
        assert_close(table.parameters(), before)
    else:
        optimizer.step()
        moved = torch.zeros(6, 2, dtype=torch.float64)
        moved[[1, 4]] = 0.1 / 2
        assert_close(table.parameters(), [before[0] - moved])


@on("ranks2_in_backward")
def test_a_backward_more_on_one_rank_does_not_meet_that_of_the_next_step() -> None:
    model, optimizer = made()
    make_loss(model, hvd.rank()).backward()
    if hvd.rank() == 1:
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(
        ValueError, match=r"rank 0 has called backward\(\) once more since its last optimizer\.step\(\).*rank 1"
    ):
        make_loss(model, hvd.rank(), 1).backward()


@on_own(2, HORO_OVERLAP="always", HORO_GRADIENTS_READY="backward")
def test_a_second_backward_after_one_that_another_rank_has_joined_from_its_step_is_an_error() -> None:
    model, optimizer = made()
    if hvd.rank() == 0:
        make_loss(model, 0).backward()
        with pytest.raises(ValueError, match=r"rank 1 .* waits in optimizer\.step\(\)"):
            make_loss(model, 0).backward()
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError):
            optimizer.step()


@on("ranks2_in_backward")
def test_who_comes_late_costs_one_request_in_later_steps() -> None:
    model, optimizer = made()
    assert isinstance(optimizer._reducer, BackwardReducer)
    optimizer.step()  # the first reduction has one request more
    counts = []
    for step in range(6):
        optimizer.zero_grad()
        before = runtime.current().core.counters()["requests"]
        if step % 3 == 0 or (step % 3 == 1 and hvd.rank() == 0):
            make_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        counts.append(runtime.current().core.counters()["requests"] - before)
    # First, all four gradients again, what each rank has sent for them, and the comparison; besides that of the
    # first three reductions. From then on, which of them each rank has used; and the second time the same for the
    # first gradient only.
    assert counts == [4, 14, 5, 5, 8, 5]


@on("ranks2_in_each_order")
def test_sparse_gradients_that_a_rank_lacks_are_averaged_where_ranks_have_other_orders() -> None:
    """Ranks ask each other about two gradients of one optimizer, and about those of two optimizers of one loss."""

    def make(seed: int) -> torch.nn.ModuleDict:
        torch.manual_seed(seed)
        names = [f"t{seed}{k}" for k in range(2)]
        return torch.nn.ModuleDict({name: torch.nn.Embedding(6, 2, sparse=True) for name in names}).double()

    models = [make(1), make(2)]
    rank = hvd.rank()
    optimizers = []
    for model in models if rank == 0 else models[::-1]:
        order = list(model.parameters())[:: 1 if rank == 0 else -1]
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(order, lr=0.1), model))
    extra = torch.ones(1, requires_grad=True)
    tables = [table for model in models for table in model.values()]
    wanted = [table.weight.detach().clone() for table in tables]
    for step in range(3):
        rows = torch.tensor([step])
        used = tables if rank == step % 2 else tables[1::2]  # a backward with no parameter of a model joins later
        (sum(table(rows).sum() for table in used) + extra.sum()).backward()
        for optimizer in sorted(optimizers, key=lambda item: item._reducer.membership.label):
            optimizer.step()
            optimizer.zero_grad()
        for number, value in enumerate(wanted):
            value[step] -= 0.1 if number % 2 else 0.1 / 2
        assert_close([table.weight.detach() for table in tables], wanted)
