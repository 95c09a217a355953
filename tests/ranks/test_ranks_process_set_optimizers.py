"""Optimizers over some of the ranks: several sets, overlapping ones, ranks that are no members; as one process does."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from rank_pool import on, on_own
from small_model import make_batch, make_loss, make_model

import horo.torch as hvd
from horo.errors import MismatchError, UsageError

forms = pytest.mark.parametrize("form", ["backward", "step"])


def train_alone(
    model: torch.nn.Module, ranks: list[int], steps: Iterable[int], factor: float = 1.0
) -> list[torch.Tensor]:
    """What the ranks come to together: one process takes the mean of their gradients, times ``factor``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (make_loss(model, rank, step) * factor / len(ranks)).backward()
        optimizer.step()
    return list(model.parameters())


def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        make_loss(model, hvd.rank(), step).backward()
        optimizer.step()


def assert_close(model: torch.nn.Module, wanted: list[torch.Tensor]) -> None:
    for parameter, expected in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), expected.detach())


@forms
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("sets", [[[0, 1], [2, 3]], [[0, 3]], [[1, 2, 3]], [[2]]], ids=str)
@on("four")
def test_members_train_together_and_others_alone(form: str, op: str, sets: list[list[int]]) -> None:
    added = [hvd.add_process_set(ranks) for ranks in sets]
    mine = next((members for members in added if members.included()), added[0])
    ranks = (mine.ranks or []) if mine.included() else [hvd.rank()]
    model = make_model(sets.index(mine.ranks))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        op=getattr(hvd, op),
        process_set=mine,
        gradients_ready=form,
    )
    assert optimizer.process_set is mine
    train(model, optimizer, 3)
    factor = len(ranks) if op == "Sum" else 1
    assert_close(model, train_alone(make_model(sets.index(mine.ranks)), ranks, range(3), factor))
    hvd.barrier()
    for members in added:
        hvd.remove_process_set(members)


@forms
@on("four")
def test_model_parallel_and_data_parallel_in_one_process(form: str) -> None:
    """Rank 2 * d + m has half m of the hidden layer, and the data d: sets of rows share activations, columns
    gradients, and all ranks the last bias. The optimizers have overlapping sets and are reduced in one backward."""

    def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (4, 2), (2,)))
        first, second, bias = tensors
        return first, second, bias

    def alone() -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(tensor) for tensor in whole()]
        first, second, bias = parameters
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for data in range(2):
                hidden = torch.tanh(make_batch(data, step) @ first)
                ((hidden @ second + bias).square().mean() / 2).backward()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    rows = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
    data, part = divmod(hvd.rank(), 2)
    half = slice(2 * part, 2 * part + 2)
    first, second, bias = (
        torch.nn.Parameter(tensor.clone()) for tensor in (whole()[0][:, half], whole()[1][half], whole()[2])
    )
    distributed = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(owned, lr=rate),
            [(f"w{index}", parameter) for index, parameter in enumerate(owned)],  # the names of both are alike
            process_set=members,
            gradients_ready=form,
        )
        # each member of a row has half of the loss: the mean over all is half of the mean over the data
        for owned, rate, members in (([first, second], 0.1, columns[part]), ([bias], 0.2, hvd.global_process_set))
    ]
    for step in range(4):
        for optimizer in distributed:
            optimizer.zero_grad()
        own = torch.tanh(make_batch(data, step) @ first) @ second
        output = hvd.allreduce(own, op=hvd.Sum, process_set=rows[data]) + bias
        (output.square().mean() / 2).backward()
        for optimizer in distributed if hvd.rank() % 2 else distributed[::-1]:
            optimizer.step()
    wanted = alone()
    torch.testing.assert_close(first.detach(), wanted[0][:, half])
    torch.testing.assert_close(second.detach(), wanted[1][half])
    torch.testing.assert_close(bias.detach(), wanted[2])
    hvd.barrier()
    for members in rows + columns:
        hvd.remove_process_set(members)


@forms
@on("four")
def test_an_optimizer_outlives_its_registration(form: str) -> None:
    """While the set is removed, it is refused; in the set as it is added again, it goes on, and so does a copy."""
    members = hvd.ProcessSet([1, 3])
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match=r"^DistributedOptimizer: Process set .* has not been registered"):
        hvd.DistributedOptimizer(plain, model, process_set=members)
    hvd.add_process_set(members)
    optimizer: Any = hvd.DistributedOptimizer(plain, model, process_set=members, gradients_ready=form)
    for turn in range(3):
        if turn == 1:
            hvd.remove_process_set(members)
            with pytest.raises(UsageError, match=r"^DistributedOptimizer: Process set .* has not been registered"):
                train(model, optimizer, 1)
            optimizer.zero_grad()
            between = hvd.add_process_set([0, 1])
            hvd.add_process_set(members)
            assert members.process_set_id == 2
            hvd.remove_process_set(between)
        elif turn == 2:
            model, optimizer = copy.deepcopy((model, optimizer))
            assert optimizer.process_set is members
        train(model, optimizer, 2)
    ranks = [1, 3] if members.included() else [hvd.rank()]
    assert_close(model, train_alone(make_model(), ranks, (0, 1) * 3))
    hvd.barrier()
    hvd.remove_process_set(members)


@on("four")
def test_what_differs_between_members_is_told_by_their_ranks() -> None:
    members = hvd.add_process_set([1, 3])
    if members.included():
        model = make_model(hvd.rank())
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, process_set=members
        )
        with pytest.raises(UsageError, match=r"model.state_dict\(\), root_rank=1, process_set=...\)"):
            train(model, optimizer, 1)
        with pytest.raises(MismatchError, match=r"on rank 1, .* on rank 3"):
            hvd.broadcast_parameters([torch.ones(hvd.rank())], 1, process_set=members)
    hvd.barrier()
    hvd.remove_process_set(members)


@on_own(3)
def test_a_parameter_that_only_some_members_train_is_named_with_their_ranks() -> None:
    members = hvd.add_process_set([0, 2])
    if members.included():
        model = make_model()
        model[0].requires_grad_(hvd.rank() == 0)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(plain, model, process_set=members)
        with pytest.raises(UsageError, match=r"'0.bias' is trained on rank 0, but frozen on rank 2"):
            train(model, optimizer, 1)


@on("four")
def test_ranks_that_skip_a_backward_are_told_by_their_ranks() -> None:
    members = hvd.add_process_set([1, 3])
    if members.included():
        model = make_model()
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, process_set=members, gradients_ready="backward"
        )
        train(model, optimizer, 1)
        optimizer.zero_grad()
        if hvd.rank() == 1:
            make_loss(model, 1, 1).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        with pytest.raises(UsageError, match=r"^rank 3 took part in the reduction from optimizer.step"):
            optimizer.step()
    hvd.barrier()
    hvd.remove_process_set(members)


@on("four")
def test_members_are_given_equal_parameters_state_and_buffers() -> None:
    members = hvd.add_process_set([1, 2, 3])
    if members.included():
        model = torch.nn.Sequential(make_model(hvd.rank()), torch.nn.BatchNorm1d(3).double())
        hvd.broadcast_parameters(model.state_dict(), 2, process_set=members)
        assert_close(model[0], list(make_model(2).parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.rank(), momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, hvd.rank())}
        hvd.broadcast_optimizer_state(optimizer, 3, process_set=members)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
        buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        assert all((buffer == 3).all() for buffer in buffers)
        model[1].running_mean.fill_(hvd.rank())
        model[1].num_batches_tracked.fill_(hvd.rank())
        hvd.average_buffers(model, process_set=members)
        assert model[1].running_mean.tolist() == [2.0] * 3
        assert model[1].num_batches_tracked.item() == 1
        with pytest.raises(UsageError, match="invalid root rank 0 for provided process set"):
            hvd.broadcast_parameters(model.state_dict(), 0, process_set=members)
    else:
        for call in (
            lambda: hvd.broadcast_parameters([], 1, process_set=members),
            lambda: hvd.average_buffers(torch.nn.Linear(1, 1), process_set=members),
            lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([torch.ones(1)], 0.1), 1, process_set=members),
        ):
            with pytest.raises(UsageError, match="Rank 0 is not a member of"):
                call()
    hvd.barrier()
    hvd.remove_process_set(members)
