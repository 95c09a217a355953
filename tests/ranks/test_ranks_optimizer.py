"""``DistributedOptimizer``, rule by rule, whenever gradients are due; and Horovod's order of calls."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import small_model as small
import torch
from rank_pool import on, one_of

import horo.torch as hvd

ranks = one_of("ranks2_always", "ranks2_never", "ranks2_step", "ranks4_always", "ranks4_step_never")
"""Two ranks and four, in several ways."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
if hasattr(torch.optim, "Adafactor"):  # from torch 2.5
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on("ranks2_in_most_orders")
def test_every_optimizer_of_torch_steps_as_alone_and_keeps_its_class(name: str) -> None:
    make = OPTIMIZERS[name]
    n = hvd.size()
    model, alone = small.make_model(), small.make_model()
    plain = make(alone.parameters())
    cls = getattr(torch.optim, name)
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    assert type(optimizer) is cls
    for step in range(6):
        optimizer.zero_grad()
        small.take_step(model, optimizer, step)
        for parameter, gradient in zip(alone.parameters(), small.mean_gradients(alone, n, step), strict=True):
            parameter.grad = gradient
        plain.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        if step == 2:  # the state goes through a file
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            assert pickle.loads(pickle.dumps(optimizer.state_dict())).keys() == optimizer.state_dict().keys()
            optimizer.load_state_dict(torch.load(file))


@on("ranks")
def test_lbfgs_takes_the_same_path_on_all_ranks() -> None:
    n, r = hvd.size(), hvd.rank()

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return float(value)

        for _ in range(3):
            optimizer.step(closure)

    def make(model: torch.nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    model, alone = small.make_model(), small.make_model()
    train(model, hvd.DistributedOptimizer(make(model), model.named_parameters()), lambda: small.make_loss(model, r))
    train(alone, make(alone), lambda: sum(small.make_loss(alone, k) for k in range(n)) / n)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
    assert hvd.allgather_object(small.bits_of(model)) == [small.bits_of(model)] * n


@pytest.mark.parametrize("is_before", [True, False])
@on("ranks2_in_most_orders")
def test_schedulers_made_before_or_after_work_without_a_warning(is_before: bool) -> None:
    model = small.make_model()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)] if is_before else []
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        schedulers = schedulers or [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        for step in range(3):
            means = small.mean_gradients(model, hvd.size(), step)
            wanted = [p - 0.5**step * g for p, g in zip(model.parameters(), means, strict=True)]
            small.train(model, optimizer, step)
            small.assert_close(model.parameters(), wanted)
            schedulers[0].step()
    assert optimizer.param_groups[0]["lr"] == 0.125


@on("ranks")
def test_clipping_after_synchronize_sees_averaged_gradients() -> None:
    model, optimizer = small.made()
    wanted = small.mean_gradients(model, hvd.size())
    small.make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    small.assert_close(small.gradients_of(model), wanted)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in wanted]).norm())
    clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(small.gradients_of(model), clipped, strict=True))


@pytest.mark.parametrize("groups", [None, 1])
@on("ranks2_in_most_orders")
def test_parameters_frozen_and_thawed_later_are_detected(groups: int | None) -> None:
    model = small.make_model()
    model[0].requires_grad_(False)
    optimizer = small.sgd(model, groups=groups)
    small.train(model, optimizer, 0)
    model[0].requires_grad_(True)
    small.train(model, optimizer, 1)
    small.train(model, optimizer, 2)
    model[2].requires_grad_(False)
    small.train(model, optimizer, 3)
    model[0].weight.requires_grad_(False)
    small.train(model, optimizer, 4)
    model.requires_grad_(True)
    small.train(model, optimizer, 5)


@on("ranks2_in_most_orders")
def test_gradients_set_by_hand_are_reduced_at_the_step() -> None:
    model, optimizer = small.made()
    gradients = torch.autograd.grad(small.make_loss(model, hvd.rank()), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    wanted = small.mean_gradients(model, hvd.size())
    optimizer.step()
    small.assert_close(small.gradients_of(model), wanted)


@pytest.mark.parametrize("groups", [None, 2])
@on("ranks2")
def test_one_optimizer_may_compress_gradients_of_several_dtypes_in_groups_and_alone(groups: int | None) -> None:
    """float32 and float64 travel as float16, which cannot hold 2^-12 beside 1; bfloat16 travels as it is."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    parameters = [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for dtype in dtypes for count in (3, 5000)]
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), named, compression=hvd.Compression.fp16, groups=groups
    )
    sum((p * (1 + 2.0**-12) * (hvd.rank() + 1)).sum().double() for p in parameters).backward()
    memory = [p.grad.data_ptr() for p in parameters if p.grad is not None]
    optimizer.step()
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == memory
    for parameter in parameters:
        assert (parameter.grad == 1.5).all()


@on("ranks2")
def test_predividing_keeps_a_sum_of_float16_in_range() -> None:
    """A gradient beyond float16 is divided before it is rounded, and a result beyond it is infinite."""
    for value, wanted in ((40000.0, 40000.0), (1e6, float("inf"))):
        parameter = torch.nn.Parameter(torch.zeros(3000))
        options: Any = {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 64.0}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], **options)
        (parameter * value).sum().backward()
        optimizer.step()
        torch.testing.assert_close(parameter.grad, torch.full((3000,), wanted), rtol=2**-9, atol=0.0)


in_step = one_of("ranks1_step", "ranks1_step_never", "ranks2_step", "ranks2_step_never")
"""One rank and two that reduce gradients while backward runs, then others that do it afterwards."""


more_in_step = one_of("ranks2_step", "ranks2_step_never", "ranks4_step_never")
"""Two ranks both ways, and four."""


@small.needs_cpu_scaler
@on("in_step")
def test_unscaling_gradients_under_way_is_an_error_not_a_wrong_step() -> None:
    for fused in (False, True):
        model = small.make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(small.make_loss(model, hvd.rank())).backward()
        start = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"a gradient scaler looked at gradients before they were reduced"):
            scaler.step(optimizer)
        assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            scaler.step(optimizer)


@on("in_step")
def test_clipping_gradients_under_way_is_an_error_not_a_wrong_step() -> None:
    model, optimizer = small.made()
    start = [p.detach().clone() for p in model.parameters()]
    small.make_loss(model, hvd.rank()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(ValueError, match=r"gradient of '0\.weight' was changed while it was being reduced"):
        optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
    optimizer.zero_grad()
    small.make_loss(model, hvd.rank()).backward()
    model.zero_grad()
    with pytest.raises(ValueError, match=r"gradient of '0\.weight' was changed while it was being reduced"):
        optimizer.step()
    small.take_step(model, optimizer)


HOROVODS_WARNING = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
"""Word for word: scripts filter it, and logs are searched for it."""


@on("in_step")
def test_a_step_after_synchronize_without_skip_warns_once_and_reduces_nothing_twice() -> None:
    model, optimizer = small.made(op=hvd.Sum)
    wanted = [hvd.size() * g for g in small.mean_gradients(model, hvd.size())]
    small.make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize") as seen:
        optimizer.step()
    assert [str(each.message) for each in seen] == [HOROVODS_WARNING]
    small.assert_close(small.gradients_of(model), wanted)
    optimizer.zero_grad()
    small.make_loss(model, hvd.rank(), 1).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@on("in_step")
def test_zero_grad_takes_its_argument_and_refuses_while_gradients_are_under_way(set_to_none: bool) -> None:
    model, optimizer = small.made()
    for step in range(3):
        wanted = small.mean_gradients(model, hvd.size(), step)
        small.make_loss(model, hvd.rank(), step).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after backward"):
            optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((g is None) == set_to_none for g in small.gradients_of(model))


@on("more_in_step")
def test_several_backward_passes_add_up_before_one_reduction() -> None:
    n, r = hvd.size(), hvd.rank()
    model, optimizer = small.made(backward_passes_per_step=3)
    assert optimizer.backward_passes_per_step == 3
    for _ in range(2):
        wanted = [sum(g) for g in zip(*(small.mean_gradients(model, n, step) for step in range(3)), strict=True)]
        for step in range(3):
            assert not optimizer._handles
            small.make_loss(model, r, step).backward()
        assert len(optimizer._handles) == 4
        optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    small.train(model, optimizer, 0)


@on("in_step")
def test_one_backward_too_many_is_refused() -> None:
    for passes, groups in ((1, None), (2, None), (1, 1)):
        model, optimizer = small.made(backward_passes_per_step=passes, groups=groups)
        for _ in range(passes):
            small.make_loss(model, hvd.rank()).backward()
        with pytest.raises(AssertionError, match=f"more often than backward_passes_per_step={passes}"):
            small.make_loss(model, hvd.rank()).backward()
        with pytest.raises(ValueError, match="was changed while it was being reduced"):
            optimizer.synchronize()
        optimizer.zero_grad()


@on("more_in_step")
def test_no_sync_accumulates_locally() -> None:
    n, r = hvd.size(), hvd.rank()
    model, optimizer = small.made()
    wanted = [sum(g) for g in zip(*(small.mean_gradients(model, n, step) for step in range(3)), strict=True)]
    with optimizer.no_sync():
        small.make_loss(model, r, 0).backward()
        small.make_loss(model, r, 1).backward()
        assert not optimizer._handles
    small.make_loss(model, r, 2).backward()
    with optimizer.no_sync(), pytest.raises(AssertionError, match="no_sync"):
        small.make_loss(model, r, 2).backward()
    with pytest.raises(ValueError, match="was changed"):
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        small.make_loss(model, r, 0).backward()
        small.make_loss(model, r, 1).backward()
    small.take_step(model, optimizer, 2)
    small.assert_close(small.gradients_of(model), wanted)


@on("in_step")
def test_parameter_groups_added_later_are_reduced() -> None:
    model = small.make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model.named_parameters())
    small.take_step(model, optimizer)
    model.zero_grad()
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    small.train(model, optimizer, 1)


@on("in_step")
def test_loading_a_state_waits_for_gradients_under_way() -> None:
    model = small.make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    small.take_step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    small.make_loss(model, hvd.rank(), 1).backward()
    optimizer.load_state_dict(state)
    assert not optimizer._handles
    optimizer.zero_grad()
    small.take_step(model, optimizer, 2)


@on("in_step")
def test_a_hook_may_step_as_soon_as_a_gradient_is_there() -> None:
    """An optimizer for each parameter, which steps inside backward, saves the memory of the gradients."""
    model = small.make_model()
    alone = copy.deepcopy(model)
    optimizers = {
        parameter: hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [(name, parameter)])
        for name, parameter in model.named_parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        wanted = small.mean_gradients(alone, hvd.size(), number)
        with torch.no_grad():
            for parameter, gradient in zip(alone.parameters(), wanted, strict=True):
                parameter.sub_(0.1 * gradient)
        small.make_loss(model, hvd.rank(), number).backward()
        small.assert_close(model.parameters(), alone.parameters())
