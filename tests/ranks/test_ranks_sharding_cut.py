"""``sharding="optimizer"`` with parameters of which each rank steps a part: all is whole outside the window."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
import os
from typing import Any

import pytest
import torch
from rank_pool import on
from small_model import (
    Pair,
    assert_pair_is_alike,
    assert_same_bits,
    bits_of,
    cutting,
    make_loss,
    make_pair,
    take_steps,
    train_pair,
)

import horo.torch as hvd
from horo.errors import AbortedError, UsageError


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).double()


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def _pair(steps: int = 2) -> Pair:
    pair = make_pair(_adam, _model)
    train_pair(pair, range(steps))
    return pair


def _shapes(model: torch.nn.Module, optimizer: Any) -> list[Any]:
    return [
        (p.shape, p.grad.shape, p.data_ptr(), [value.shape for value in optimizer.state.get(p, {}).values()])
        for p in model.parameters()
        if p.grad is not None
    ]


@pytest.mark.parametrize("is_cut", [False, True])
@on("ranks2")
def test_an_elastic_state_commits_and_restores(is_cut: bool) -> None:
    with cutting(is_cut):
        pair = _pair()
        states = [hvd.elastic.TorchState(model=model, optimizer=optimizer) for model, optimizer in pair]
        for (model, optimizer), state in zip(pair, states, strict=True):
            state.save()
            take_steps(model, optimizer, range(2, 4))
            state.restore()
        assert_same_bits(pair[0][0], pair[1][0])
        train_pair(pair, range(5, 8))
    assert_pair_is_alike(pair)


@on("ranks")
def test_parameters_that_are_large_are_cut_and_no_others() -> None:
    torch.manual_seed(1)
    table, layer = torch.nn.Embedding(1000, 200), torch.nn.Linear(200, 2)
    short = torch.nn.Parameter(torch.ones(200_000, dtype=torch.bfloat16))
    model = torch.nn.ModuleList([table, layer])
    named = [*model.named_parameters(), ("short", short)]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([p for _, p in named]), named, sharding="optimizer")
    rows = torch.arange(3) + hvd.rank()
    (layer(table(rows)).sum() + short.float().sum()).backward()
    optimizer.step()
    cut = {
        state.name: [(share.owner, share.start % 1024, share.end) for share in there.block.shares]
        for state, there in optimizer._sharded_step._placement.placed.items()
        if there.block.shares
    }
    assert list(cut) == ["0.weight"]
    assert [owner for owner, _, _ in cut["0.weight"]] == list(range(hvd.size()))
    assert all(start == 0 for _, start, _ in cut["0.weight"]) and cut["0.weight"][-1][2] == 200_000


@pytest.mark.parametrize("steps", [0, 2])
@on("ranks")
def test_a_step_that_raises_leaves_them_whole(steps: int) -> None:
    with cutting():
        (model, optimizer), (plain, its) = pair = _pair(steps)
        optimizer.zero_grad()
        make_loss(model, hvd.rank(), 7).backward()
        before = _shapes(model, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        if is_last := hvd.rank() == hvd.size() - 1:
            optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(Exception if is_last else AbortedError, match=r".") as caught:
            optimizer.step()
        assert not is_last or not isinstance(caught.value, AbortedError)
        optimizer.param_groups[0]["lr"] = rate
        if steps:
            assert _shapes(model, optimizer) == before
        assert [shapes[:2] for shapes in _shapes(model, optimizer)] == [shapes[:2] for shapes in before]
        with pytest.raises(UsageError, match=r"may be of two steps"):
            optimizer.state_dict()
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        train_pair(pair, range(3, 6))
    assert_pair_is_alike(pair)


@on("ranks2")
def test_a_script_that_writes_state_and_reads_it_before_the_next_step() -> None:
    with cutting():
        pair = _pair()
        for _, optimizer in pair:
            for rank in range(hvd.size()):  # one after the other: a later one would see what an earlier one wrote
                for entries in optimizer.state.values() if rank == hvd.rank() else ():
                    entries["exp_avg"].mul_(0.5)
                    entries["step"].add_(5.0)
                hvd.barrier()
            found = optimizer.state_dict()["state"]
            assert all(entries["step"] == 7.0 for entries in found.values())
        assert_pair_is_alike(pair)
        train_pair(pair, range(3, 6))
    assert_pair_is_alike(pair)


@pytest.mark.parametrize("is_cut", [False, True])
@on("ranks2")
def test_a_later_job_and_a_child_have_their_own(is_cut: bool) -> None:
    with cutting(is_cut):
        (model, optimizer), (plain, _) = pair = _pair()
        whole = bits_of(model)
        child = os.fork()
        if child == 0:
            for parameter in model.parameters():
                parameter.data.zero_()
                for value in optimizer.state[parameter].values():
                    value.zero_()
            os._exit(any(map(any, bits_of(model))))
        assert os.waitpid(child, 0)[1] == 0
        assert bits_of(model) == whole
        assert_pair_is_alike(pair)
        hvd.shutdown()
        assert bits_of(model) == bits_of(plain)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1)
        hvd.init()
        train_pair(pair, range(4, 7))
    assert_pair_is_alike(pair)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
@on("ranks2")
def test_a_parameter_whose_gradient_is_sparse_later_is_no_longer_cut(kind: str) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.ModuleList([torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 2)])

    def take(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        rows = model[0](torch.arange(3) + hvd.rank() + step) if step else torch.ones(3, 8)
        model[1](rows).square().sum().backward()
        optimizer.step()

    with cutting():
        pair = make_pair(lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.1), make)
        for model, optimizer in pair:
            take(model, optimizer, 0)
        assert any(there.block.shares for there in pair[0][1]._sharded_step._placement.placed.values())
        for model, optimizer in pair:
            if kind == "Adam":
                with pytest.raises((AbortedError, RuntimeError), match=r"Adam does not support sparse gradients"):
                    take(model, optimizer, 1)
            else:
                for step in range(1, 4):
                    take(model, optimizer, step)
    if kind != "Adam":
        assert_pair_is_alike(pair)
