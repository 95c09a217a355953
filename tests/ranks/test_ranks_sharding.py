"""``DistributedOptimizer(sharding="optimizer")``: parameters and state once per host, each rank steps its share."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
from collections.abc import Callable
from typing import Any

import pytest
import small_model as small
import torch
from rank_pool import on, on_own

import horo.torch as hvd
from horo.errors import UnsupportedError, UsageError
from horo.torch.optimizer.sharding import placement

Make = Callable[[Any], torch.optim.Optimizer]


def _make(name: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


OPTIMIZERS: dict[str, Make] = {
    "sgd": _make("SGD", lr=0.1),
    "sgd momentum": _make("SGD", lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": _make("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": _make("SGD", lr=0.1, momentum=0.9, fused=True),
    "adam": _make("Adam", lr=0.01, foreach=False),
    "adam foreach amsgrad": _make("Adam", lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": _make("AdamW", lr=0.01, fused=True),
    "adagrad": _make("Adagrad", lr=0.1),
    "adagrad fused": _make("Adagrad", lr=0.1, fused=True),
    "rmsprop": _make("RMSprop", lr=0.01, momentum=0.9, centered=True),
    "nadam": _make("NAdam", lr=0.01),
    "radam": _make("RAdam", lr=0.01),
    "adamax": _make("Adamax", lr=0.01),
    "adadelta": _make("Adadelta", lr=0.5),
    "asgd": _make("ASGD", lr=0.1, t0=2),
    "rprop": _make("Rprop", lr=0.01),
    "adafactor": _make("Adafactor", lr=0.01),
}


class Model(torch.nn.Module):
    """Two dtypes' worth of odd shapes, a tied weight, a channels_last one, a scalar, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 7)
        self.tied = torch.nn.Linear(7, 7)
        self.again = torch.nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.picture = torch.nn.Conv2d(7, 5, (1, 2), padding=(0, 1)).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.single = torch.nn.Parameter(torch.ones(5))
        self.double()
        self.single.data = torch.ones(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.again(torch.tanh(self.tied(self.first(x)))))
        x = self.picture(x[:, :, None, None]).sum((2, 3))
        return x * self.scale * self.single


def _sharded(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, model, sharding="optimizer", **options)


@pytest.mark.parametrize(("kind", "is_cut"), [*((kind, True) for kind in OPTIMIZERS), ("adam", False)])
@on("ranks")
def test_it_has_the_bits_of_an_unsharded_run(kind: str, is_cut: bool) -> None:
    """Where large parameters are cut, small ones are whole."""
    pair = small.make_pair(OPTIMIZERS[kind], Model)
    with small.cutting(is_cut):
        small.go_on(pair, range(4))
    placed = pair[0][1]._sharded_step._placement.placed.values()
    assert any(there.block.shares for there in placed) == (is_cut and kind != "adafactor")


def _pair(kind: str = "adam", **options: Any) -> small.Pair:
    """One that has done two steps."""
    pair = small.make_pair(OPTIMIZERS[kind], Model, **options)
    small.train_pair(pair, range(2))
    return pair


# -- between backward() and the end of step() ------------------------------------------------------------------------


def _edit(model: Any, optimizer: Any) -> None:
    model.scale.grad = torch.full_like(model.scale, 0.5)
    model.first.weight.grad.mul_(2)


def _scale_parameters(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
            parameter.data.clamp_(-0.3, 0.3)


def _vector(model: Any, optimizer: Any) -> None:
    parameters = [model.first.weight, model.first.bias, model.scale, model.tied.weight]
    vector = torch.nn.utils.parameters_to_vector(parameters) * 0.9
    torch.nn.utils.vector_to_parameters(vector.clone(), parameters)


def _zero_state(model: Any, optimizer: Any) -> None:
    for entries in optimizer.state.values():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and key != "step":
                value.zero_()


def _freeze(model: Any, optimizer: Any) -> None:
    model.first.weight.requires_grad_(False)
    model.first.weight.grad = None


def _narrow(model: Any, optimizer: Any) -> None:
    model.single.data = model.single.data.double()
    model.single.grad = None
    optimizer.state.pop(model.single, None)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "clip": lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "edit": _edit,
    "remove": lambda model, _: setattr(model.first.weight, "grad", None),
    "scale_parameters": _scale_parameters,
    "group_options": lambda _, optimizer: [group.update(lr=group["lr"] * 0.5) for group in optimizer.param_groups],
    "assign": lambda model, _: setattr(model.first.weight, "data", model.first.weight.data * 0.5),
    "vector": _vector,
    "load_model": lambda model, _: model.load_state_dict({name: t * 0.5 for name, t in model.state_dict().items()}),
    "load_state": lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "broadcast_model": lambda model, _: hvd.broadcast_parameters(model.state_dict(), 0),
    "broadcast_state": lambda _, optimizer: hvd.broadcast_optimizer_state(optimizer, 0),
    "zero_state": _zero_state,
    "freeze": _freeze,
    "thaw": lambda model, _: model.frozen.requires_grad_(True),
    "narrow": _narrow,
    "clear": lambda _, optimizer: (optimizer.zero_grad(set_to_none=False), optimizer.step()),
    "other_state": lambda _, optimizer: [
        entries.update(own=entries.get("own", 0) + 1) for entries in optimizer.state.values()
    ],
}


@pytest.mark.parametrize(("kind", "is_cut"), [("sgd momentum", False), ("adamw fused", True)])
@pytest.mark.parametrize("change", CHANGES)
@on("ranks")
def test_what_a_script_does_on_all_ranks_counts_once(change: str, kind: str, is_cut: bool) -> None:
    with small.cutting(is_cut):
        (model, _), (plain, _) = pair = _pair(kind)
        for step in range(2, 5):
            for trained, using in pair:
                using.zero_grad()
                small.make_loss(trained, hvd.rank(), step).backward()
                CHANGES[change](trained, using)
                using.step()
            small.assert_same_bits(model, plain)
        small.go_on(pair)


@on("ranks")
def test_gradients_and_parameters_are_what_they_are_without_it() -> None:
    (model, ours), (plain, theirs) = pair = _pair()
    for trained, using in pair:
        using.zero_grad()
        small.make_loss(trained, hvd.rank(), 3).backward()
    found, wanted = ([p.grad.tolist() for p in each.parameters() if p.grad is not None] for each in (model, plain))
    assert found == wanted
    kept = [parameter.grad for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    ours.step()
    theirs.step()
    assert all(one is parameter.grad for one, parameter in zip(kept, model.parameters(), strict=True))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    small.assert_same_bits(model, plain)


@on("ranks")
def test_passes_before_a_step_and_no_sync() -> None:
    pair = _pair(backward_passes_per_step=2)
    for trained, using in pair:
        using.zero_grad()
        for step in range(4):
            small.make_loss(trained, hvd.rank(), step).backward()
        using.step()
        using.set_backward_passes_per_step(1)
        using.zero_grad()
        with using.no_sync():
            small.make_loss(trained, hvd.rank(), 8).backward()
        small.make_loss(trained, hvd.rank(), 9).backward()
        using.synchronize()
        with using.skip_synchronize():
            using.step()
    small.go_on(pair)


@pytest.mark.parametrize("order", ["backward", "step"])
@on("ranks")
def test_a_closure_in_both_orders_of_calls(order: str) -> None:
    pair = _pair(gradients_ready=order)
    losses = []
    for trained, using in pair:

        def closure(trained: Any = trained, using: Any = using) -> torch.Tensor:
            using.zero_grad()
            loss = small.make_loss(trained, hvd.rank(), 4)
            loss.backward()
            return loss

        losses.append(using.step(closure).item())
    assert losses[0] == losses[1]
    small.go_on(pair)


@on("ranks")
def test_hooks_of_users_and_schedulers_are_outside_the_window() -> None:
    pair = _pair()
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for index, (trained, using) in enumerate(pair):

        def note(optimizer: Any, args: Any, kwargs: Any, index: int = index, trained: Any = trained) -> None:
            seen[index].append(small.bits_of(trained))
            seen[index].append([p.grad is not None and p.grad.tolist() for p in trained.parameters()])

        using.register_step_pre_hook(note)
        using.register_step_post_hook(note)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(using, 0.5)
        small.take_steps(trained, using, range(3, 5))
        scheduler.step()
    assert seen[0] == seen[1] and len(seen[0]) == 8
    small.go_on(pair)


@on("ranks")
def test_a_graph_that_is_kept_over_a_step_is_refused_as_in_torch() -> None:
    model = small.make_model()
    optimizer = _sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = small.make_loss(model, hvd.rank(), 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()


def _without_first(parameters: Any) -> list[Any]:
    """Those of ``Model`` that are not of its module ``first``."""
    given = list(parameters)
    return given[:4] + given[6:]


@on("ranks")
def test_groups_that_come_later() -> None:
    pair = small.make_pair(lambda parameters: torch.optim.Adam(_without_first(parameters), lr=0.01), Model)
    small.train_pair(pair, range(2))
    for trained, using in pair:
        using.add_param_group({"params": list(trained.first.parameters()), "lr": 0.02})
    small.go_on(pair)


@on("ranks")
def test_two_optimizers_and_a_newer_one() -> None:
    models = [Model(), Model()]
    for trained, sharding in zip(models, ("optimizer", None), strict=True):
        named = list(trained.named_parameters())
        pair = [
            hvd.DistributedOptimizer(torch.optim.Adam([p for _, p in part], lr=0.01), part, sharding=sharding)
            for part in (named[:3], named[3:])
        ]
        for step in range(3):
            for using in pair:
                using.zero_grad()
            small.make_loss(trained, hvd.rank(), step).backward()
            for using in pair:
                using.step()
        del pair, using
        again = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=0.1), trained, sharding=sharding)
        small.take_steps(trained, again, range(3, 6))
    small.assert_same_bits(*models)


@on("ranks")
def test_a_plain_optimizer_beside_it_and_copies() -> None:
    (model, ours), (plain, _) = pair = _pair()
    for trained, using in pair:
        beside = torch.optim.SGD(trained.parameters(), lr=0.01)
        using.zero_grad()
        small.make_loss(trained, hvd.rank(), 3).backward()
        beside.step()
        using.step()
    small.assert_same_bits(model, plain)
    twin, its = copy.deepcopy((model, ours))
    average = torch.optim.swa_utils.AveragedModel(model)
    before = small.bits_of(average.module)
    small.take_steps(model, ours, range(3, 5))
    assert small.bits_of(average.module) == before
    small.take_steps(twin, its, range(3, 5))
    small.assert_same_bits(twin, model)


@on("ranks")
def test_sparse_gradients() -> None:
    models = []
    for sharding in ("optimizer", None):
        torch.manual_seed(1)
        table = torch.nn.Embedding(10, 4, sparse=True)
        dense = torch.nn.Embedding(5, 4)
        model = torch.nn.ModuleList([table, dense])
        optimizers = [
            hvd.DistributedOptimizer(inner, part.named_parameters(), sharding=sharding)
            for inner, part in (
                (torch.optim.SparseAdam(table.parameters(), lr=0.1), table),
                (torch.optim.SGD(dense.parameters(), lr=0.1), dense),
            )
        ]
        for step in range(3):
            for using in optimizers:
                using.zero_grad()
            rows = torch.tensor([hvd.rank(), step, 4])
            (table(rows) * dense(rows % 5)).square().sum().backward()
            for using in optimizers:
                using.step()
        models.append(model)
    small.assert_same_bits(*models)


@on_own(4, ranks_per_host=2)
def test_each_of_two_hosts_steps_all_of_it_in_shares_of_its_ranks_and_they_compare() -> None:
    with small.cutting():
        (model, ours), (plain, theirs) = pair = _pair("adamw fused")
        small.go_on(pair)
        _scale_parameters(model, ours)
        _scale_parameters(plain, theirs)
        small.go_on(pair, range(8, 10))
        assert {len(there.block.shares) for there in ours._sharded_step._placement.placed.values()} == {0, 2}
        small.train_pair(pair, range(10, 18))  # the 1st, 2nd, 4th and 8th step were compared
        ours.zero_grad()
        small.make_loss(model, hvd.rank(), 18).backward()
        if hvd.rank() >= 2:
            model.scale.grad.mul_(2)
        with pytest.raises(UsageError, match=r"^parameter .scale. is not equal on all hosts after step 16 of t"):
            ours.step()


@on_own(3, ranks_per_host=2)
def test_hosts_of_other_sizes_and_with_other_processors() -> None:
    pair = _pair()
    small.go_on(pair)
    if hvd.rank() == 2:
        placement.arithmetic = lambda: ("2.0", "AVX512", "of another kind")  # type: ignore[assignment]
    model = Model()
    again = _sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    small.make_loss(model, hvd.rank(), 0).backward()
    told = r"each of which steps all parameters: torch .* at rank 0, 2\.0 at rank 2"
    with pytest.raises(UnsupportedError, match=told):
        again.step()


@on("ranks4")
def test_fewer_parameters_than_ranks_and_one_without_elements() -> None:
    parameter, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0, 2))
    named = [("w", parameter), ("e", empty)]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([parameter, empty]), named, sharding="optimizer")
    twin = torch.nn.Parameter(torch.ones(3))
    plain = torch.optim.Adam([twin])
    for _ in range(3):
        optimizer.zero_grad()
        (parameter.square().sum() + empty.sum()).backward()
        optimizer.step()
        plain.zero_grad()
        twin.square().sum().backward()
        plain.step()
    assert parameter.tolist() == twin.tolist()
    assert len(optimizer.state_dict()["state"]) == 2


@pytest.mark.parametrize("at", [0, 2])
@on("ranks")
def test_state_of_a_plain_optimizer_loads_and_the_other_way_round(at: int) -> None:
    model = Model()
    before = torch.optim.Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before.step()
    saved = copy.deepcopy((model.state_dict(), before.state_dict()))
    sharded = Model()
    optimizer = _sharded(sharded, torch.optim.Adam(sharded.parameters(), lr=0.01))
    small.take_steps(sharded, optimizer, range(at))
    sharded.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for using, trained in ((before, model), (optimizer, sharded)):
        for parameter in trained.parameters():
            parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
        using.step()
    assert small.bits_of(sharded) == small.bits_of(model)
    small.assert_same_state(optimizer.state_dict(), before.state_dict())
    third = torch.optim.Adam(model.parameters(), lr=0.01)
    third.load_state_dict(optimizer.state_dict())
    small.assert_same_state(third.state_dict(), before.state_dict())
