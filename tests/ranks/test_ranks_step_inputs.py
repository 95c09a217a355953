"""The inputs of a step besides gradients, loss scale and learning rate: they stay equal, or ranks get an error."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import functools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import small_model as small
import torch
from rank_pool import RankPool, on

import horo.torch as hvd
from horo.errors import UsageError

EPOCHS = 4
OVERFLOW = 1, 2
"""The epoch and step in which a loss overflows, on all ranks that still have batches."""


def make_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)


def scaled_loss(model: torch.nn.Module, rank: int, epoch: int, step: int) -> torch.Tensor:
    loss = small.make_loss(model, rank, 10 * epoch + step)
    return loss * math.inf if (epoch, step) == OVERFLOW else loss


def step_scaled(scaler: Any, optimizer: Any, loss: torch.Tensor) -> None:
    """In an order of calls that all reducers take."""
    scaler.scale(loss).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@small.needs_cpu_scaler
def test_uneven_batches_with_a_scaler_are_the_steps_of_one_process(ranks: RankPool) -> None:
    def train() -> tuple[float, list[torch.Tensor]]:
        model, scaler = small.make_model(), make_scaler()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for epoch in range(EPOCHS):
            for step in range(small.batches(hvd.rank(), hvd.size(), epoch)):
                step_scaled(scaler, optimizer, scaled_loss(model, hvd.rank(), epoch, step))
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), last)
            hvd.broadcast_optimizer_state(optimizer, last)
            scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=last))
        return scaler.get_scale(), list(model.parameters())

    model, scaler, size = small.make_model(), make_scaler(), ranks.size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for step in range(max(small.batches(rank, size, epoch) for rank in range(size))):
            there = [rank for rank in range(size) if small.batches(rank, size, epoch) > step]
            losses = [scaled_loss(model, rank, epoch, step) for rank in there]
            scaler.scale(torch.stack(losses).sum() / size).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for scale, parameters in ranks.run(train):
        assert scale == scaler.get_scale()
        small.assert_close(parameters, list(model.parameters()))


@small.needs_cpu_scaler
@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ((16.0, 4.0), r"is 16\.0 on rank 0 and 4\.0 on rank 1, so parameters part; .*scaler\.load_state_dict\("),
        ((None, 4.0), r"is not there on rank 0 and 4\.0 on rank 1, so parameters part; "),
    ],
    ids=["two scales", "one scaler"],
)
@on("ranks2_in_most_orders")
def test_scales_that_differ_are_an_error_with_both(scales: tuple[float | None, float], words: str) -> None:
    model, optimizer = small.made()
    scale = scales[hvd.rank()]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with pytest.raises(ValueError, match=f"the loss scale {words}"):
        for step in range(9):
            step_scaled(scaler, optimizer, small.make_loss(model, hvd.rank(), step))
    optimizer.zero_grad()


@small.needs_cpu_scaler
@on("ranks2_in_most_orders")
def test_scalers_that_have_counted_other_numbers_of_steps_are_an_error_after_a_join() -> None:
    model, scaler = small.make_model(), make_scaler()
    optimizer = small.sgd(model)
    for step in range(1 + hvd.rank()):
        step_scaled(scaler, optimizer, small.make_loss(model, hvd.rank(), step))
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), last)
    hvd.broadcast_optimizer_state(optimizer, last)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    told = "the GradScaler's growth tracker is 1 on rank 0 and 2 on rank 1, so parameters"
    with pytest.raises(ValueError, match=told):
        step_scaled(scaler, optimizer, small.make_loss(model, hvd.rank()))
    small.assert_close(before, list(model.parameters()))
    optimizer.zero_grad()


@on("ranks2_in_most_orders")
def test_learning_rates_that_part_are_an_error_with_both() -> None:
    model, optimizer = small.made()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    words = r"optimizer\.step\(\): the 'lr' of parameter group 0 is \S+ on rank 0 and \S+ on rank 1, "
    with pytest.raises(ValueError, match=words):
        for step in range(9):
            small.take_step(model, optimizer, step)
            optimizer.zero_grad()
            scheduler.step(float(step if hvd.rank() else -step))  # of this rank alone
    optimizer.zero_grad()


class OwnScaler:
    """A scaler with the methods that a loop calls, and no others."""

    scale = 4.0

    def get_scale(self) -> float:
        return self.scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(self.scale)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscale_(optimizer)
        optimizer.step()


@on("ranks2_in_most_orders")
def test_a_scaler_of_the_users_own_may_step() -> None:
    model, scaler = small.make_model(), OwnScaler()
    optimizer = small.sgd(model)
    for step in range(10):
        optimizer.zero_grad()
        (small.make_loss(model, hvd.rank(), step) * scaler.scale).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    wanted = hvd.allreduce(torch.cat([p.detach().flatten() for p in model.parameters()]))
    small.assert_close(wanted, torch.cat([p.detach().flatten() for p in model.parameters()]))


@small.needs_cpu_scaler
@on("ranks2_in_most_orders")
def test_a_scaler_whose_state_has_another_form_is_compared_by_its_scale() -> None:
    class Wrapping(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict()}

    model, optimizer = small.made()
    scaler = Wrapping("cpu", init_scale=4.0)
    for step in range(8):
        step_scaled(scaler, optimizer, small.make_loss(model, hvd.rank(), step))
    scaler.update(4.0 + hvd.rank())
    with pytest.raises(ValueError, match=r"the loss scale is 4\.0 on rank 0 and 5\.0 on rank 1, "):
        for step in range(8, 17):
            step_scaled(scaler, optimizer, small.make_loss(model, hvd.rank(), step))
    optimizer.zero_grad()


class _Scaled(small.OwnOptimizer):
    """SGD with the learning rate as the argument of each step."""

    def step(self, rate: float) -> None:  # type: ignore[override]
        self.move(rate)


@pytest.mark.parametrize(("op", "ready"), [("Average", "backward"), ("Average", "step"), ("Adasum", None)])
@on("ranks2")
def test_an_argument_that_is_no_closure_is_passed_on(op: str, ready: str | None) -> None:
    model = small.make_model()
    optimizer: Any = hvd.DistributedOptimizer(_Scaled(model.parameters()), op=getattr(hvd, op), gradients_ready=ready)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step(0.5)  # equal steps of all ranks: their mean
    small.assert_close(model.parameters(), [value - 0.5 for value in start])


def _moved(model: torch.nn.Module, step: int, amount: float) -> list[torch.Tensor]:
    """The parameters that a step of SGD by the mean gradients must give."""
    means = small.mean_gradients(model, hvd.size(), step)
    return [value.detach() - amount * mean for value, mean in zip(model.parameters(), means, strict=True)]


class _Half(small.OwnOptimizer):
    """SGD, half of whose step does; torch has hooks around this step where one of this class was made."""

    fails = False

    def step(self) -> None:  # type: ignore[override]
        self.move(0.05)
        if self.fails:
            raise RuntimeError("a half fails")


class _Halves(_Half):
    catches = False

    def step(self) -> None:
        for _ in range(2):
            try:
                super().step()
            except RuntimeError:
                if not self.catches:
                    raise


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("ready", ["backward", "step"])
@on("ranks2")
def test_the_step_of_a_base_class_is_a_part_on_every_rank_also_if_it_raises(op: str, ready: str) -> None:
    if hvd.rank() == 1:
        _Half([torch.zeros(1)])
    model = small.make_model()
    optimizer: Any = hvd.DistributedOptimizer(_Halves(model.parameters()), op=getattr(hvd, op), gradients_ready=ready)
    scale = 0.05 * (hvd.size() if op == "Sum" else 1)
    for step in range(12):
        _Half.fails, _Halves.catches = step in {2, 3, 9}, step in {3, 9}
        moves = 1 if step == 2 else 2
        wanted = _moved(model, step, moves * scale)
        optimizer.zero_grad()
        small.make_loss(model, hvd.rank(), step).backward()
        with pytest.raises(RuntimeError, match="a half fails") if moves == 1 else nullcontext():
            optimizer.step()
        small.assert_close(model.parameters(), wanted)
    assert hvd.allgather_object(small.bits_of(model)) == [small.bits_of(model)] * hvd.size()


@pytest.mark.parametrize("options", [{}, {"op": "Adasum"}, {"sharding": "optimizer"}], ids=str)
@on("ranks2")
def test_a_step_that_a_post_hook_calls_is_one_of_its_own(options: dict[str, Any]) -> None:
    def train(is_hooked: bool) -> torch.nn.Module:
        model = small.make_model()
        given: Any = options | ({"op": hvd.Adasum} if "op" in options else {})
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **given)

        def step(number: int) -> None:
            optimizer.zero_grad()
            small.make_loss(model, hvd.rank(), number).backward()
            optimizer.step()

        again: list[int] = []
        optimizer.register_step_post_hook(lambda *_: step(again.pop()) if again else None)
        for number in range(3):
            again += [10 + number] * is_hooked
            step(number)
            if not is_hooked:
                step(10 + number)
        return model

    model, wanted = train(is_hooked=True), train(is_hooked=False)
    small.assert_close(model.parameters(), [value.detach() for value in wanted.parameters()])
    assert hvd.allgather_object(small.bits_of(model)) == [small.bits_of(model)] * hvd.size()


class _NeverMade(small.OwnOptimizer):
    """So torch has no hooks around its step."""

    def step(self) -> None:  # type: ignore[override]
        self.move(0.1)


class _Computes(_NeverMade):
    loss: Any = None

    def step(self) -> None:
        self.zero_grad()
        self.loss().backward()
        super().step()


@pytest.mark.parametrize("ready", ["backward", "step"])
@on("ranks2")
def test_gradients_that_a_step_computes_are_averaged_or_an_error(ready: str) -> None:
    model = small.make_model()
    optimizer: Any = hvd.DistributedOptimizer(_Computes(model.parameters()), gradients_ready=ready)
    for step in range(6):
        wanted = _moved(model, step, 0.1)
        optimizer.loss = functools.partial(small.make_loss, model, hvd.rank(), step)
        if ready == "step":
            with pytest.raises(UsageError, match="used gradients of this rank alone, so ranks have parted"):
                optimizer.step()
            optimizer.zero_grad()
            return
        optimizer.step()
        small.assert_close(model.parameters(), wanted)
