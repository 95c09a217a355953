"""``DistributedOptimizer(op=hvd.Adasum)``: each rank steps by itself, and Adasum combines the steps."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from known_answers import adasum, tolerance
from rank_pool import on, on_own
from small_model import FailingSgd, bits_of, compressor, make_loss, make_model, needs_cpu_scaler

import horo.torch as hvd
from horo.errors import DeadlockError, GroupError, HoroError, UnsupportedError, UsageError
from horo.torch.engine.request import Request
from horo.torch.optimizer import adasum as delta_reducer

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def _made(kind: str = "plain", seed: int = 3, **options: Any) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer; ``kind`` is a name of ``OPTIMIZERS``."""
    model = make_model(seed)
    return model, _wrapped(model, OPTIMIZERS[kind](model.parameters()), **options)


def _wrapped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, model, op=hvd.Adasum, **options)


def _step(model: torch.nn.Module, optimizer: Any, step: int, rank: int | None = None) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = make_loss(model, hvd.rank() if rank is None else rank, step)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _step_alike(model: torch.nn.Module, optimizer: Any) -> None:
    """All ranks have the same gradient, ones: what comes of it is the mean of their steps."""
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()


def _values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _expected(kind: str, ranks: list[int], steps: int) -> list[torch.Tensor]:
    """One process plays all ranks: copies of the model step apart, and the oracle combines their steps."""
    models = [make_model() for _ in ranks]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    for step in range(steps):
        starts = _values(models[0])
        for model, optimizer, rank in zip(models, optimizers, ranks, strict=True):
            _step(model, optimizer, step, rank)
        with torch.no_grad():
            for start, *moved in zip(starts, *(model.parameters() for model in models), strict=True):
                # Lists: torch before 2.3 knows no array of numpy 2.
                deltas = [np.array((parameter - start).flatten().tolist()) for parameter in moved]
                result = start + torch.tensor(adasum(deltas).tolist(), dtype=torch.float64).view_as(start)
                for parameter in moved:
                    parameter.copy_(result)
    return _values(models[0])


def _assert_is(model: torch.nn.Module, wanted: list[torch.Tensor] | None = None) -> None:
    """The parameters are equal on all ranks, and those that are wanted."""
    told = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
    assert all(each == told[0] for each in told)
    for value, expected in zip(_values(model), wanted or _values(model), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lbfgs"])
@on("ranks")
def test_it_is_the_oracle_of_the_steps_of_all_ranks(kind: str) -> None:
    model, optimizer = _made(kind)
    for step in range(4):
        _step(model, optimizer, step)
    _assert_is(model, _expected(kind, list(range(hvd.size())), 4))


@on("ranks2")
def test_several_passes_scheduler_state_and_a_deep_copy() -> None:
    model, optimizer = _made("sgd", backward_passes_per_step=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            with optimizer.no_sync():
                make_loss(model, hvd.rank(), 10 * step + part).backward()
        optimizer.synchronize()
        assert model[0].weight.grad.tolist() != hvd.broadcast(model[0].weight.grad, 1).tolist() or hvd.rank() == 1
        optimizer.step()
        scheduler.step()
        _assert_is(model)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    for trained, using in ((model, optimizer), (twin, its_optimizer)):
        _step(trained, using, 7)
    _assert_is(twin, _values(model))
    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3
    with pytest.raises(AssertionError, match=r"Skipping synchronization is not supported when using Adasum"):
        optimizer.skip_synchronize()


@on("ranks2")
def test_frozen_unused_new_and_sparse_parameters() -> None:
    torch.manual_seed(1)
    layers = {name: torch.nn.Linear(3, 2) for name in ("used", "rarely", "never", "frozen")}
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(6, 3, sparse=True), **layers})
    model["later"] = torch.nn.Linear(2, 2)
    model["frozen"].requires_grad_(False)
    later = list(model["later"].parameters())
    first = [p for name, p in model.named_parameters() if not name.startswith("later")]
    optimizer = _wrapped(model, torch.optim.SGD(first, lr=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": later})
        rows = model["table"](torch.tensor([hvd.rank(), 2]))
        out = model["used"](rows) + model["frozen"](rows)
        if step >= 2:
            out = model["later"](out)
        if hvd.rank() == 0:
            out = out + model["rarely"](rows)
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        _assert_is(model)
    moved = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"table", "used", "rarely", "later"}
    assert model["never"].weight.grad is None


@on("ranks2")
def test_it_travels_compressed_and_by_a_compressor_of_ones_own() -> None:
    halves = compressor(lambda t: t / 2, lambda t, _: t * 2)
    results = []
    for compression in (hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.fp16, halves):
        model, optimizer = _made("sgd", compression=compression)
        _step(model, optimizer, 0)
        _assert_is(model)
        results.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    plain, bf16, fp16, halved = results
    start = torch.nn.utils.parameters_to_vector(make_model().parameters()).detach()
    most = (plain - start).abs().max().item()
    assert 0 < (bf16 - plain).abs().max().item() < most / 64
    assert 0 < (fp16 - plain).abs().max().item() < most / 500
    torch.testing.assert_close(halved, plain, rtol=1e-12, atol=1e-14)


@on("ranks")
def test_the_members_of_a_process_set_step_together_and_others_alone() -> None:
    members = [0, 3] if hvd.size() > 2 else [0]  # a set of all ranks is there already
    part = hvd.add_process_set(members)
    model, optimizer = _made("sgd", process_set=part)
    for step in range(3):
        _step(model, optimizer, step)
    together = members if hvd.rank() in members else [hvd.rank()]
    for value, wanted in zip(_values(model), _expected("sgd", together, 3), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)
    hvd.remove_process_set(part)
    with pytest.raises(UsageError, match="has not been registered"):
        _step(model, optimizer, 9)


@on("ranks2")
def test_ranks_that_begin_apart_are_told() -> None:
    model, optimizer = _made(seed=hvd.rank())
    before = bits_of(model)
    with pytest.raises(UsageError, match=r"parameter '\d\.(weight|bias)' is not equal on all ranks before the first"):
        _step(model, optimizer, 0)
    assert bits_of(model) == before
    hvd.broadcast_parameters(model.state_dict(), 0)
    _step(model, optimizer, 0)
    _assert_is(model)


@needs_cpu_scaler
@on("ranks2")
def test_a_grad_scaler_is_refused() -> None:
    model, optimizer = _made()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(make_loss(model, 0)).backward()
    with pytest.raises(UnsupportedError, match="a GradScaler skips the steps of one rank alone"):
        scaler.step(optimizer)


@on_own(2, HORO_DEADLOCK_TIME_SECONDS="1")
def test_a_step_that_one_rank_leaves_out_is_an_error_and_parameters_stand_where_they_were() -> None:
    model, optimizer = _made("sgd")
    _step(model, optimizer, 0)
    before = bits_of(model)
    with pytest.raises((DeadlockError, GroupError)):
        _step(model, optimizer, 1) if hvd.rank() == 0 else hvd.allreduce(torch.ones(1), name="loss")
    assert bits_of(model) == before
    with pytest.raises(GroupError):  # the group has ended: the next call says why, and changes nothing either
        _step(model, optimizer, 1)
    assert bits_of(model) == before


class _Around(torch.optim.SGD):
    """Moves parameters before and after the step of its base class, by other amounts on each rank."""

    def step(self, closure: Any = None) -> Any:
        for amount in (0.01, 0.02):
            if amount == 0.02:
                super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(amount * (1 + hvd.rank()) * parameter.grad)


@on("ranks2")
def test_the_step_of_a_base_class_is_a_part_of_that_of_its_subclass_also_in_a_later_job() -> None:
    model = make_model()
    torch.optim.SGD(make_model().parameters(), lr=0.1)  # torch has hooks around a step from its first optimizer on
    optimizer = _wrapped(model, _Around(model.parameters(), lr=0.1))
    for step in range(2):
        start = _values(model)
        _step_alike(model, optimizer)  # by 0.13 and 0.16, in the same direction: their mean
        _assert_is(model, [value - 0.145 for value in start])
        if step == 0:
            hvd.barrier()
            hvd.shutdown()
            hvd.init()


@on("ranks2")
def test_a_step_whose_optimizer_raises_is_done_when_it_is_called_again() -> None:
    model = make_model()
    optimizer = _wrapped(model, FailingSgd(model.parameters(), at=2 if hvd.rank() == 0 else 0))
    _step(model, optimizer, 0)
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            _step(model, optimizer, 1)
        optimizer.step()
    else:
        _step(model, optimizer, 1)
    _step(model, optimizer, 2)
    _assert_is(model, _expected("plain", [0, 1], 3))


@pytest.mark.parametrize("has_scheduler", [False, True])
@on("ranks2")
def test_parameters_are_back_when_a_step_has_raised(has_scheduler: bool) -> None:
    """And what is loaded then is where the next step begins."""
    model = make_model()
    plain = FailingSgd(model.parameters(), at=2)
    scheduled = [torch.optim.lr_scheduler.StepLR(plain, 9)] if has_scheduler else []
    optimizer = _wrapped(model, plain)
    scheduled += [torch.optim.lr_scheduler.StepLR(optimizer, 9)] if has_scheduler else []
    _step(model, optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that step() was overridden
        for scheduler in scheduled:
            scheduler.step()
    before = bits_of(model)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        _step(model, optimizer, 1)
    assert bits_of(model) == before
    assert "closure" in inspect.signature(optimizer.step).parameters
    model.load_state_dict(make_model(seed=5).state_dict())
    start = _values(model)
    _step_alike(model, optimizer)
    _assert_is(model, [begun - 0.1 for begun in start])
    gone = weakref.ref(optimizer)
    del optimizer, plain, scheduled
    assert (gone() is None) or has_scheduler  # nothing refers to itself


class _Stop(HoroError):
    """So that it is told apart from errors of the exchange."""


@pytest.mark.parametrize("place", ["before", "submitted", "done"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, _Stop, UsageError])
@on("ranks2")
def test_what_a_signal_handler_loses_of_an_exchange_is_found(place: str, error: Any) -> None:
    """It raises before a delta is submitted, or when a function has returned and before its result is stored."""
    expected = _expected("plain", [0, 1], 4)
    model, optimizer = _made()
    _step(model, optimizer, 0)
    if hvd.rank() == 0:
        owner, name = (Request, "wait") if place == "done" else (delta_reducer, "start_allreduce")
        real, numbers = getattr(owner, name), itertools.count(1)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            is_now = next(numbers) == 2
            result = None if is_now and place == "before" else real(*args, **kwargs)
            if is_now:
                raise error
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(error):
                _step(model, optimizer, 1)
    for step in (1, 2, 3):
        _step(model, optimizer, step)
    _assert_is(model, expected)


@on("ranks2")
def test_a_delta_that_one_rank_cannot_send_fails_the_step_of_all() -> None:
    """Those behind it are sent, too: else the others would wait for them, and get those of the next step."""
    expected, calls = _expected("plain", [0, 1], 2), itertools.count(1)

    def compress(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.int64) if next(calls) == 6 and hvd.rank() == 0 else tensor

    model, optimizer = _made(compression=compressor(compress, lambda t, _: t))
    _step(model, optimizer, 0)
    before = bits_of(model)
    with pytest.raises(UnsupportedError, match="not offered for int64"):
        _step(model, optimizer, 1)
    assert bits_of(model) == before
    _step(model, optimizer, 1)
    _assert_is(model, expected)


DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 52}


def _vectors(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each rank, with a part in common."""
    made = [torch.Generator().manual_seed(number) for number in (999, *range(hvd.size()))]
    common, *own = (torch.randn(count, generator=generator, dtype=torch.float64) for generator in made)
    return [(common + each).to(dtype) for each in own]


def _check_vectors(result: torch.Tensor, vectors: list[torch.Tensor], scale: float = 1.0) -> None:
    arrays = [np.array(vector.tolist()) for vector in vectors]  # lists: torch before 2.3 knows no array of numpy 2
    wanted = torch.tensor(adasum(arrays).tolist(), dtype=torch.float64) * scale
    assert result.dtype == vectors[0].dtype
    allowed = tolerance(arrays, DIGITS[result.dtype]) * abs(scale)
    torch.testing.assert_close(result.double().flatten(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", DIGITS, ids=str)
@on("ranks")
def test_all_forms_agree_with_the_reference(dtype: torch.dtype) -> None:
    for count in (0, 1, 7, 5000):
        vectors = _vectors(count, dtype)
        mine = vectors[hvd.rank()]
        before = mine.clone()
        results = [
            *(hvd.allreduce(mine, op=hvd.Adasum, name=f"named{count}") for _ in range(2)),
            hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum)),
            hvd.allreduce_(mine.clone(), op=hvd.Adasum),
            hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Adasum)),
        ]
        for each in (results[0], *hvd.grouped_allreduce([mine, mine], op=hvd.Adasum)):  # each tensor by itself
            _check_vectors(each, vectors)
        assert torch.equal(mine, before)
        assert all(torch.equal(result, results[0]) for result in results)
        assert hvd.allgather_object(results[0].tolist()) == [results[0].tolist()] * hvd.size()
        scaled = hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=-4.0)
        _check_vectors(scaled, vectors, scale=-2.0)


@on("ranks2")
def test_what_it_is_not_for_is_said() -> None:
    with pytest.raises(UnsupportedError, match=r"this op is not offered for int64"):
        hvd.allreduce(torch.ones(3, dtype=torch.int64), op=hvd.Adasum)
    with pytest.raises(UnsupportedError, match=r"allreduce 'x': op=Adasum has no gradient; call it on"):
        hvd.allreduce(torch.ones(3, requires_grad=True), op=hvd.Adasum, name="x")
    assert hvd.allreduce(torch.ones(3), op=hvd.Adasum).tolist() == [1, 1, 1]
