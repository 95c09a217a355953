"""``gradients_ready="step"``: Horovod's order of calls, and what breaks it is an error."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from rank_pool import on, one_of
from small_model import (
    assert_close,
    gradients_of,
    made,
    make_loss,
    make_model,
    mean_gradients,
    needs_cpu_scaler,
    take_step,
)

import horo.torch as hvd

ranks2 = one_of("ranks1_step", "ranks1_step_never", "ranks2_step", "ranks2_step_never")
"""One rank and two that reduce gradients while backward runs, then others that do it afterwards."""


ranks = one_of("ranks2_step", "ranks2_step_never", "ranks4_step_never")
"""Two ranks both ways, and four."""


@needs_cpu_scaler
@on("ranks2")
def test_unscaling_gradients_under_way_is_an_error_not_a_wrong_step() -> None:
    for fused in (False, True):
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(make_loss(model, hvd.rank())).backward()
        start = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"a gradient scaler looked at gradients before they were reduced"):
            scaler.step(optimizer)
        assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            scaler.step(optimizer)


@on("ranks2")
def test_clipping_gradients_under_way_is_an_error_not_a_wrong_step() -> None:
    model, optimizer = made()
    start = [p.detach().clone() for p in model.parameters()]
    make_loss(model, hvd.rank()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(ValueError, match=r"gradient of '0\.weight' was changed while it was being reduced"):
        optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
    optimizer.zero_grad()
    make_loss(model, hvd.rank()).backward()
    model.zero_grad()
    with pytest.raises(ValueError, match=r"gradient of '0\.weight' was changed while it was being reduced"):
        optimizer.step()
    take_step(model, optimizer)


HOROVODS_WARNING = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
"""Word for word: scripts filter it, and logs are searched for it."""


@on("ranks2")
def test_a_step_after_synchronize_without_skip_warns_once_and_reduces_nothing_twice() -> None:
    model, optimizer = made(op=hvd.Sum)
    wanted = [hvd.size() * g for g in mean_gradients(model, hvd.size())]
    make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize") as seen:
        optimizer.step()
    assert [str(each.message) for each in seen] == [HOROVODS_WARNING]
    assert_close(gradients_of(model), wanted)
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), 1).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@on("ranks2")
def test_zero_grad_takes_its_argument_and_refuses_while_gradients_are_under_way(set_to_none: bool) -> None:
    model, optimizer = made()
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        wanted = mean_gradients(model, hvd.size(), step)
        make_loss(model, hvd.rank(), step).backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after backward"):
            optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        assert_close(gradients_of(model), wanted)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all((g is None) == set_to_none for g in gradients_of(model))


@on("ranks")
def test_several_backward_passes_add_up_before_one_reduction() -> None:
    n, r = hvd.size(), hvd.rank()
    model, optimizer = made(backward_passes_per_step=3)
    assert optimizer.backward_passes_per_step == 3
    for _ in range(2):
        optimizer.zero_grad()
        wanted = [sum(g) for g in zip(*(mean_gradients(model, n, step) for step in range(3)), strict=True)]
        for step in range(3):
            assert not optimizer._handles
            make_loss(model, r, step).backward()
        assert len(optimizer._handles) == 4
        optimizer.step()
        assert_close(gradients_of(model), wanted)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    wanted = mean_gradients(model, n)
    make_loss(model, r).backward()
    assert len(optimizer._handles) == 4
    optimizer.step()
    assert_close(gradients_of(model), wanted)


@on("ranks2")
def test_one_backward_too_many_is_refused() -> None:
    for passes, groups in ((1, None), (2, None), (1, 1)):
        model, optimizer = made(backward_passes_per_step=passes, groups=groups)
        for _ in range(passes):
            make_loss(model, hvd.rank()).backward()
        with pytest.raises(AssertionError, match=f"more often than backward_passes_per_step={passes}"):
            make_loss(model, hvd.rank()).backward()
        with pytest.raises(ValueError, match="was changed while it was being reduced"):
            optimizer.synchronize()
        optimizer.zero_grad()


@on("ranks")
def test_no_sync_accumulates_locally() -> None:
    n, r = hvd.size(), hvd.rank()
    model, optimizer = made()
    wanted = [sum(g) for g in zip(*(mean_gradients(model, n, step) for step in range(3)), strict=True)]
    with optimizer.no_sync():
        make_loss(model, r, 0).backward()
        make_loss(model, r, 1).backward()
        assert not optimizer._handles
    make_loss(model, r, 2).backward()
    with optimizer.no_sync(), pytest.raises(AssertionError, match="no_sync"):
        make_loss(model, r, 2).backward()
    with pytest.raises(ValueError, match="was changed"):
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        make_loss(model, r, 0).backward()
        make_loss(model, r, 1).backward()
    take_step(model, optimizer, 2)
    assert_close(gradients_of(model), wanted)


@on("ranks2")
def test_parameter_groups_added_later_are_reduced() -> None:
    n, r = hvd.size(), hvd.rank()
    model = make_model()
    names = dict(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), names.items())
    take_step(model, optimizer)
    optimizer.zero_grad()
    model.zero_grad()
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    wanted = mean_gradients(model, n, 1)
    make_loss(model, r, 1).backward()
    assert len(optimizer._handles) == 4
    optimizer.step()
    assert_close(gradients_of(model), wanted)


@on("ranks2")
def test_loading_a_state_waits_for_gradients_under_way() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    take_step(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    make_loss(model, hvd.rank(), 1).backward()
    optimizer.load_state_dict(state)
    assert not optimizer._handles
    optimizer.zero_grad()
    take_step(model, optimizer, 2)


@on("ranks2")
def test_a_hook_may_step_as_soon_as_a_gradient_is_there() -> None:
    """An optimizer for each parameter, which steps inside backward, saves the memory of the gradients."""
    model = make_model()
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
        wanted = mean_gradients(alone, hvd.size(), number)
        with torch.no_grad():
            for parameter, gradient in zip(alone.parameters(), wanted, strict=True):
                parameter.sub_(0.1 * gradient)
        make_loss(model, hvd.rank(), number).backward()
        assert_close(model.parameters(), alone.parameters())
