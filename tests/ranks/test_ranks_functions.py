"""Parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
import threading
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from interrupts import LeftError
from rank_pool import on, on_own

import horo.torch as hvd
from horo.errors import MismatchError, UsageError
from horo.torch.engine import runtime
from horo.torch.engine.submit import start_broadcast
from horo.torch.functions import broadcast_state, objects


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten())


@on("ranks")
def test_parameters_and_buffers_become_the_roots() -> None:
    for root in (0, hvd.size() - 1):
        wanted = _model(root).state_dict()
        for form in (
            dict,
            lambda s: OrderedDict(reversed(s.items())),
            lambda s: [*s.items()],
            lambda s: iter(s.items()),
        ):
            model = _model(hvd.rank()).to(memory_format=torch.channels_last)
            hvd.broadcast_parameters(form(model.state_dict()), root_rank=root)
            for name, value in model.state_dict().items():
                assert torch.equal(value, wanted[name])
        model = _model(hvd.rank())
        hvd.broadcast_parameters(list(model.parameters()), root)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _model(root).parameters(), strict=True))


@on("ranks2")
def test_many_tensors_travel_in_few_requests_and_large_ones_in_several() -> None:
    tensors = [torch.full((size,), float(hvd.rank())) for size in (10, 300, 200, 60, 0, 100, *[10] * 494)]
    for chunk_bytes, requests in ((broadcast_state._CHUNK_BYTES, range(3)), (1000, range(10, 100))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broadcast_state, "_CHUNK_BYTES", chunk_bytes)
            before = runtime.current().core.counters()["requests"]
            hvd.broadcast_parameters(tensors, root_rank=1)
        assert runtime.current().core.counters()["requests"] - before in requests
        assert all(torch.equal(t, torch.ones_like(t)) for t in tensors)
        for tensor in tensors:
            tensor.fill_(hvd.rank())


@on("ranks")
def test_models_that_differ_are_refused_with_the_first_difference() -> None:
    last = hvd.size() - 1
    for theirs, shown in (
        ({"b": torch.zeros(3)}, "'b' float32 [3]"),
        ({"b": torch.zeros(2, dtype=torch.float64)}, "'b' float64 [2]"),
        ({"c": torch.zeros(2)}, "'c' float32 [2]"),
        ({}, "nothing more"),
    ):
        ours = {"a": torch.ones(2), "b": torch.ones(2)}
        with pytest.raises(MismatchError) as caught:
            hvd.broadcast_parameters({"a": torch.zeros(2), **theirs} if hvd.rank() == last else ours, root_rank=0)
        assert isinstance(caught.value, hvd.HorovodInternalError)
        start = "broadcast_parameters: entry 1 is 'b' float32 [2] on rank 0, "
        assert str(caught.value) == f"{start}{shown} on rank {last}"
        assert torch.equal(ours["a"], torch.ones(2))
    assert hvd.allreduce(torch.ones(1)).item() == 1.0  # and the job goes on


@on("ranks2")
def test_what_is_no_list_of_tensors_is_named() -> None:
    for params, message in (
        (torch.ones(2), r"expected a model, its state_dict\(\) or named_parameters\(\), or a list, not Tensor"),
        (3, "not int"),
        ({"a": torch.ones(1), "b": 7}, "'b' is no tensor but int; use broadcast_object"),
        ([("x", None)], "'x' is no tensor but NoneType"),
        ([torch.ones(1, device="meta")], "'0': the tensor is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.broadcast_parameters(params, 0)


@on("ranks2")
def test_extra_states_of_modules_are_sent_as_objects() -> None:
    class Scaled(torch.nn.Linear):
        scale: Any = None

        def get_extra_state(self) -> Any:
            return self.scale

        def set_extra_state(self, state: Any) -> None:
            self.scale = state

    rank = hvd.rank()
    model = torch.nn.Sequential(Scaled(2, 2), torch.nn.Linear(2, 2), Scaled(2, 2))
    torch.nn.init.constant_(model[1].weight, rank)
    model[0].scale, model[2].scale = {"amax": [rank, 2.5]}, torch.ones(rank + 1)  # a tensor of another shape, too
    hvd.broadcast_parameters(model, 1)
    assert model[1].weight.tolist() == [[1.0, 1.0]] * 2
    assert model[0].scale == {"amax": [1, 2.5]}
    assert model[2].scale.tolist() == [1.0, 1.0]

    model[0].scale, model[2].scale = {"amax": rank}, torch.full((2,), float(rank))
    state = model.state_dict()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hvd.broadcast_parameters(state, 0)
    assert state["0._extra_state"] == {"amax": 0}
    assert model[2].scale.tolist() == [0.0, 0.0]
    assert [str(each.message)[:43] for each in told] == ["broadcast_parameters: '0._extra_state' was "] * rank
    assert all(each.filename == __file__ for each in told)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "stateless": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on("ranks")
def test_optimizer_state_becomes_the_roots_and_parameters_stay(name: str, wrapped: bool) -> None:
    r, root = hvd.rank(), hvd.size() - 1
    model = _model(0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer: Any = OPTIMIZERS[name](model.parameters())
    steps = 2 if r == root else r  # rank 0 has no state, others another one
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((2, 2, 5, 5), 1.0 + r)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    if r == root:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    model(torch.ones(2, 2, 5, 5)).square().mean().backward()  # and the state can be used
    if wrapped:
        optimizer.synchronize()
    elif not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()
    assert all(_same(state, other) for other in hvd.allgather_object(state))
    assert float(state["param_groups"][0]["lr"]) == pytest.approx(0.05)
    # SGD of torch 2.1 and 2.2 notes that it has no momentum.
    values = [value for entries in state["state"].values() for value in entries.values() if value is not None]
    assert bool(values) == (name != "stateless")


@pytest.mark.parametrize("wrapped", [False, True])
@on("ranks")
def test_a_fresh_optimizer_has_zero_gradients_then(wrapped: bool) -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "other": torch.nn.Embedding(3, 2, sparse=True)})
    model.used.bias.requires_grad_(False)
    parameters = [model.used.weight, model.used.bias, model.other.weight]
    for given in (None, model):
        optimizer: Any = torch.optim.Adam(parameters)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
        optimizer.zero_grad()
        hvd.broadcast_optimizer_state(optimizer, 0, given)
        dense, none, either = (parameter.grad for parameter in parameters)
        assert none is None
        assert torch.equal(dense, torch.zeros(1, 2))
        assert torch.equal(either.to_dense(), torch.zeros(3, 2))
        assert either.is_sparse == (given is model)
    model.used.weight.grad = torch.ones(1, 2)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert torch.equal(model.used.weight.grad, torch.ones(1, 2))  # one that is there stays
    sparse = torch.optim.SparseAdam([model.other.weight])
    sparse.zero_grad()
    hvd.broadcast_optimizer_state(sparse, 0)
    model.other(torch.tensor([1])).sum().backward()  # without zero_grad()
    sparse.step()
    trained = torch.optim.SGD([model.used.weight], lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        trained.step()
    trained.zero_grad()
    hvd.broadcast_optimizer_state(trained, 0)
    assert model.used.weight.grad is None


@on("ranks2")
def test_other_groups_are_refused_and_state_that_the_root_cannot_send_fails_everywhere() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2 + hvd.rank())]
    with pytest.raises(MismatchError, match="rank 0, group 0 parameter 2 float32 \\[2\\] on rank 1"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), 0)
    optimizer = torch.optim.SGD(parameters[:1], lr=0.1)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["odd"] = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert hvd.broadcast_object(hvd.rank(), 1) == 1


@on("ranks")
def test_objects_travel_whole() -> None:
    n, r = hvd.size(), hvd.rank()
    own = {"rank": r, "list": list(range(r * 1000)), "function": (lambda x: x + r), "tensor": torch.full((3,), r)}
    for root in range(n):
        got = hvd.broadcast_object(own if r == root else None, root_rank=root, name="object")
        assert got["rank"] == root
        assert len(got["list"]) == root * 1000
        assert got["function"](1) == root + 1
        assert (got is own) == (r == root)
    assert hvd.allgather_object(None) == [None] * n
    assert [item["rank"] for item in hvd.allgather_object(own, name="all")] == list(range(n))
    assert hvd.allgather_object("x" * r) == ["x" * k for k in range(n)]


@on("ranks2")
def test_an_object_that_cannot_be_pickled_leaves_nobody_waiting() -> None:
    odd = threading.Lock() if hvd.rank() == 0 else 5
    wanted, text = (TypeError, "pickle") if hvd.rank() == 0 else (ValueError, "rank 0 could not")
    with pytest.raises(wanted, match=text):
        hvd.broadcast_object(odd, 0)
    with pytest.raises(wanted, match=text):
        hvd.allgather_object(odd)
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


@pytest.mark.parametrize("operation", ["broadcast", "allgather"])
@on_own(2)
def test_a_call_that_was_left_between_its_halves_refuses_no_later_one(operation: str) -> None:
    """Rank 0 leaves before it sends its object, rank 1 when it has sent its part, as by signal handlers that raise."""

    def run() -> Any:
        return hvd.broadcast_object(8) if operation == "broadcast" else hvd.allgather_object(8)

    real, calls = objects.start_allgather, []

    def leave(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if operation == "allgather" and len(calls) == 1:
            return real(*arguments, **options)
        if hvd.rank() == 1:
            (start_broadcast if operation == "broadcast" else real)(*arguments, **options)
        raise LeftError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "run_broadcast" if operation == "broadcast" else "start_allgather", leave)
        with pytest.raises(LeftError):
            run()
    for _ in range(3):
        assert run() == (8 if operation == "broadcast" else [8, 8])


@pytest.mark.parametrize("name", [None, "settings"])
@on("ranks2")
def test_different_roots_of_an_object_are_named(name: str | None) -> None:
    r = hvd.rank()
    for own in ("x", "x" * (r + 1)):
        with pytest.raises(MismatchError) as caught:
            hvd.broadcast_object(own, root_rank=r, name=name)
        assert str(caught.value) == (
            "broadcast_object: root_rank is 0 on rank 0, but 1 on rank 1; give the same one on all ranks"
        )
    assert hvd.broadcast_object(r, 1, name) == 1


@on("ranks2")
def test_a_name_that_is_too_long_is_refused_in_the_words_of_the_call() -> None:
    for call in (hvd.broadcast_object, hvd.allgather_object):
        for name in ("x" * 2000, "\u00e9" * 505):
            with pytest.raises(UsageError) as caught:
                call(1, name=name)
            size = len(name.encode())
            assert str(caught.value) == f"{call.__name__}: the name has {size} bytes; at most 999 are allowed"
        assert call(1, name="\u00e9" * 498) in (1, [1, 1])
        with pytest.raises(UsageError, match=f"{call.__name__}: name must be a string without NUL"):
            call(1, name="a\0b")


@on("ranks")
def test_buffers_become_the_mean_over_the_ranks() -> None:
    n, r = hvd.size(), hvd.rank()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(2, track_running_stats=False))
    model.register_buffer("scratch", torch.full((2,), float(r)), persistent=False)
    model[0](torch.full((4, 3), 10.0 * r))
    if r:
        model[0](torch.zeros(4, 3))
    means = [0.0] + [0.9 * k for k in range(1, n)]
    hvd.average_buffers(model)
    assert model[0].running_mean is not None
    torch.testing.assert_close(model[0].running_mean, torch.full((3,), sum(means) / n))
    assert int(model[0].num_batches_tracked) == 1
    assert model.scratch.tolist() == [r, r]
    hvd.average_buffers(torch.nn.Linear(2, 2))
