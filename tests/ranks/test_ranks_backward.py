"""Gradients are averaged when ``backward()`` returns: what it costs, who waits for whom, and what goes wrong how."""

import contextlib
import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import small_model as small
import torch
from interrupts import interrupt
from jobs import wait_until
from rank_pool import on
from torch.utils.checkpoint import checkpoint

import horo.torch as hvd
from horo.errors import UsageError
from horo.torch.engine import runtime
from horo.torch.optimizer import backward_hooks


def _requests() -> int:
    return runtime.current().core.counters()["requests"]


@on("ranks2_in_backward")
def test_gradients_are_averaged_when_backward_returns_and_no_call_averages_them_again() -> None:
    model, optimizer = small.made(op=hvd.Sum)
    for step in range(3):
        wanted = [2 * g for g in small.mean_gradients(model, 2, step)]
        small.make_loss(model, hvd.rank(), step).backward()
        before = _requests()
        small.assert_close(small.gradients_of(model), wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if step:
                optimizer.synchronize()
            if step == 2:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)
        assert _requests() == before
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@on("ranks2_in_backward")
def test_gradients_may_be_cleared_at_any_time(set_to_none: bool) -> None:
    model, optimizer = small.made()
    for step in range(2):
        small.make_loss(model, hvd.rank(), step).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((g is None) == set_to_none for g in small.gradients_of(model))
        small.backward_averages(model, step + 5)
        optimizer.step()
        model.zero_grad(set_to_none=set_to_none)


@on("ranks2_in_backward")
def test_no_sync_and_passes_per_step_save_exchanges() -> None:
    model, optimizer = small.made(backward_passes_per_step=3)
    assert optimizer.backward_passes_per_step == 3
    optimizer.step()  # the first reduction has one request more
    counts = []
    for number in range(6):
        before = _requests()
        small.make_loss(model, hvd.rank(), number).backward()
        counts.append(_requests() - before)
    optimizer.step()
    assert counts == [0, 0, 4, 0, 0, 5]  # the third reduction compares the samples of ranks
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    before = _requests()
    with optimizer.no_sync():
        small.make_loss(model, hvd.rank(), 0).backward()
        assert _requests() == before
    wanted = small.mean_gradients(model, 2)
    optimizer.step()
    assert _requests() == before + 4
    small.assert_close(small.gradients_of(model), wanted)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"op": hvd.Sum}], ids=["alone", "in a group", "summed"])
@pytest.mark.parametrize("used", [[0, 1], [1]], ids=["by all", "by one rank"])
@on("ranks2_in_backward")
def test_what_a_frozen_parameter_has_accumulated_is_averaged(options: dict[str, Any], used: list[int]) -> None:
    model, optimizer = small.made(**options)
    optimizer.step()
    optimizer.zero_grad()
    alone = copy.deepcopy(model)
    for ranks in (used, range(2)):
        torch.stack([small.make_loss(alone, rank) for rank in ranks]).sum().div(2).backward()
        alone[2].requires_grad_(False)
    wanted = [grad * (2 if "op" in options else 1) for grad in small.gradients_of(alone) if grad is not None]
    if hvd.rank() in used:
        with optimizer.no_sync():
            small.make_loss(model, hvd.rank()).backward()
    model[2].requires_grad_(False)
    small.make_loss(model, hvd.rank()).backward()
    small.assert_close(small.gradients_of(model), wanted)
    optimizer.step()
    model[2].requires_grad_(True)
    optimizer.zero_grad()


@on("ranks2_in_backward")
def test_a_nested_backward_exchanges_nothing_before_the_outermost_ends() -> None:
    model, optimizer = small.made()
    for _ in range(3):
        optimizer.step()  # the first three reductions have requests of their own
        optimizer.zero_grad()
    for _ in range(2):
        before = _requests()
        batch = small.make_batch(hvd.rank()).requires_grad_()
        checkpoint(model, batch, use_reentrant=True).square().mean().backward()
        assert _requests() == before + 4
        optimizer.step()
        assert _requests() == before + 4
        optimizer.zero_grad()
    torch.autograd.grad(small.make_loss(model, hvd.rank()), list(model.parameters()), create_graph=True)
    assert _requests() == before + 4


@pytest.mark.parametrize("nested", [False, True])
@on("ranks2_in_backward")
def test_two_threads_in_backward_of_one_optimizer_are_refused(nested: bool) -> None:
    model, optimizer = small.made()
    refused: list[str] = []

    def other() -> None:
        inputs = small.make_batch(hvd.rank(), 1).requires_grad_()
        outputs = checkpoint(model, inputs, use_reentrant=True) if nested else model(inputs)
        with pytest.raises(UsageError) as error:
            outputs.square().mean().backward()
        refused.append(str(error.value))

    def meanwhile(_: torch.Tensor) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hidden = model[:2](small.make_batch(hvd.rank()))
    hidden.register_hook(meanwhile)
    with contextlib.suppress(UsageError):  # where it travels already, the gradient that the other thread has changed
        model[2](hidden).square().mean().backward()
    assert len(refused) == 1
    assert "two threads call backward() at the same time" in refused[0]
    optimizer.zero_grad()
    small.backward_averages(model, 1)
    optimizer.step()


@on("ranks2_in_backward")
def test_threads_may_call_backward_in_turn_also_after_one_whose_error_is_kept() -> None:
    model, optimizer = small.made()
    reduce_together = backward_hooks.reduce_together

    def fail(reducers: Any) -> None:
        reduce_together(reducers)
        raise ZeroDivisionError

    with ThreadPoolExecutor(1) as pool:
        with patch.object(backward_hooks, "reduce_together", fail):
            failed = pool.submit(small.make_loss(model, hvd.rank()).backward)
            assert isinstance(failed.exception(), ZeroDivisionError)
        for step in range(2):
            optimizer.zero_grad()
            small.backward_averages(model, step)
            optimizer.zero_grad()
            pool.submit(small.backward_averages, model, step).result()
    optimizer.step()


@on("ranks2_in_backward")
def test_checkpoints_so_deep_that_autograd_goes_on_in_another_thread_are_not_refused() -> None:
    def outputs(model: torch.nn.Sequential, inputs: torch.Tensor, depth: int = 62) -> torch.Tensor:
        hidden = model[:2](inputs)
        return checkpoint(outputs, model, hidden[:, :4], depth - 1, use_reentrant=True) if depth else hidden

    def loss(model: torch.nn.Sequential, rank: int) -> Any:
        batch = small.make_batch(rank).requires_grad_()
        return model[2](checkpoint(outputs, model, batch, use_reentrant=True)).square().mean()

    (model, _optimizer), alone = small.made(), small.make_model()
    (sum(loss(alone, rank) for rank in range(2)) / 2).backward()
    loss(model, hvd.rank()).backward()
    small.assert_close(small.gradients_of(model), small.gradients_of(alone))


@on("ranks2_in_backward")
def test_a_parameter_inside_and_outside_a_reentrant_checkpoint_is_right_or_refused() -> None:
    always = runtime.current().job.overlap == "always"
    layer = torch.nn.Linear(4, 4).double()
    optimizer = small.sgd(layer)
    batch = small.make_batch(hvd.rank()).requires_grad_()
    loss = layer(checkpoint(layer, batch, use_reentrant=True)).square().mean()
    if not always:
        loss.backward()
        mean = hvd.allreduce(layer.weight.grad, name="weight")
        torch.testing.assert_close(mean, layer.weight.grad, rtol=1e-12, atol=0)
        return
    with pytest.raises(ValueError, match=r"'(weight|bias)' was computed again while it was being reduced.*reentrant"):
        loss.backward()
    with pytest.raises(ValueError, match="was changed while it was being reduced"):
        optimizer.synchronize()


@on("ranks2_in_backward")
def test_a_hook_that_changes_gradients_comes_before_the_reduction_or_is_refused() -> None:
    def halve(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    def hook(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)

    early, late = small.make_model(), small.make_model()
    wanted = [g / 2 for g in small.mean_gradients(early, 2)]
    hook(early)
    optimizers = [small.sgd(early), small.sgd(late)]
    hook(late)
    small.make_loss(early, hvd.rank()).backward()
    small.assert_close(small.gradients_of(early), wanted)
    if runtime.current().job.overlap == "always":
        with pytest.raises(ValueError, match="register hooks that change gradients before DistributedOptimizer"):
            small.make_loss(late, hvd.rank()).backward()
    else:
        small.make_loss(late, hvd.rank()).backward()
        small.assert_close(small.gradients_of(late), wanted)
    assert len(optimizers) == 2


@on("ranks2_in_backward")
def test_optimizers_of_one_loss_whose_order_differs_between_ranks_do_not_wait_in_a_circle() -> None:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4).double() for _ in range(3)]
    optimizers = [small.sgd(layer) for layer in layers]
    order = layers if hvd.rank() == 0 else layers[::-1]
    for step in range(3):
        x = small.make_batch(hvd.rank(), step)
        for layer in order:
            x = torch.tanh(layer(x))
        x.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    sums = [layer.weight.detach().sum() for layer in layers]
    for value in sums:
        torch.testing.assert_close(hvd.allreduce(value), value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clear", ["optimizer", "model", "nobody"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@on("ranks2_in_backward")
def test_training_goes_on_after_an_exception_in_backward_on_all_ranks(op: int, clear: str) -> None:
    model, optimizer = small.made(op=op)
    factor = 1 if op == hvd.Average else 2
    optimizer.step()  # with an older torch, nothing travels in the first backward
    optimizer.zero_grad()
    for step in range(3):
        with pytest.raises(RuntimeError, match="broken in the middle"):
            model[2](small.BrokenBackward.apply(model[0](small.make_batch(hvd.rank(), 7)))).square().mean().backward()
        with pytest.raises(ValueError, match=r"step\(\): the backward\(\) before did not come to its end"):
            optimizer.step()
        partial = [torch.zeros_like(p) for p in model[0].parameters()]
        if clear == "optimizer":
            optimizer.zero_grad()
        elif clear == "model":
            model.zero_grad()
        elif runtime.current().job.overlap == "always":  # autograd has added to what is being reduced
            with pytest.raises(ValueError, match=r"backward\(\): the backward\(\) before did not come.*zero_grad"):
                small.make_loss(model, hvd.rank(), step).backward()
            optimizer.zero_grad()
        else:
            alone = copy.deepcopy(model)
            alone.zero_grad()
            sum(alone[2](alone[0](small.make_batch(rank, 7))).square().mean() / 2 for rank in range(2)).backward()
            partial += [p.grad for p in alone[2].parameters()]
        partial += [torch.zeros_like(p) for p in model.parameters()][len(partial) :]
        wanted = [factor * (g + p) for g, p in zip(small.mean_gradients(model, 2, step), partial, strict=True)]
        small.make_loss(model, hvd.rank(), step).backward()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.step()
        optimizer.zero_grad()


@on("ranks2_in_backward")
def test_an_exception_in_the_backward_of_one_rank_alone_is_an_error_on_all() -> None:
    model, optimizer = small.made()
    optimizer.zero_grad()
    call = small.make_loss(model, hvd.rank()).backward
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="broken in the middle"):
            model[2](small.BrokenBackward.apply(model[0](small.make_batch(0)))).square().mean().backward()
        call = optimizer.zero_grad
    told = r"an exception has ended the backward\(\) of rank 0.*all ranks call optimizer\.zero_grad\(\)"
    with pytest.raises(ValueError, match=told):
        call()
    for step in range(2):
        optimizer.zero_grad()
        small.backward_averages(model, step)
        optimizer.step()


@on("ranks2_in_backward")
def test_a_mismatch_comes_out_of_backward_on_every_rank_and_the_job_goes_on() -> None:
    layer = torch.nn.Linear(2 + hvd.rank(), 3).double()
    optimizer = small.sgd(layer)
    with pytest.raises(hvd.HorovodInternalError, match=r"(?s)'gradient\d*\.weight'.*\[3, 2\].*\[3, 3\]"):
        layer(torch.ones(1, 2 + hvd.rank(), dtype=torch.float64)).sum().backward()
    model, optimizer = small.made()
    small.backward_averages(model)
    optimizer.step()


@on("ranks2_in_backward")
def test_ctrl_c_comes_out_of_a_backward_that_waits() -> None:
    model, optimizer = small.made()

    def are_submitted() -> bool:
        return any(request.label.startswith("gradient") for request in runtime.current().requests.values())

    if hvd.rank() == 0:
        interrupt(lambda: small.make_loss(model, 0).backward(), KeyboardInterrupt, are_submitted, 0.2)
        hvd.barrier()
        for request in list(runtime.current().requests.values()):
            request.wait()
        wait_until(lambda: not are_submitted(), "all have been reduced")
    else:
        hvd.barrier()
        small.make_loss(model, 1).backward()
    optimizer.zero_grad()
    small.backward_averages(model)


@small.needs_cpu_scaler
@on("ranks2_in_backward")
def test_a_scaler_that_looked_at_gradients_of_this_rank_only_is_an_error() -> None:
    model, optimizer = small.made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with optimizer.no_sync():
        scaler.scale(small.make_loss(model, hvd.rank())).backward()
    start = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"a gradient scaler looked at gradients that backward\(\) has not reduced"):
        scaler.step(optimizer)
    assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
    optimizer.synchronize()
    scaler.step(optimizer)


@pytest.mark.parametrize("call", ["step", "zero_grad"])
@on("ranks2_in_backward")
def test_a_hook_that_steps_inside_backward_is_refused(call: str) -> None:
    model, optimizer = small.made()
    before = [p.detach().clone() for p in model.parameters()]
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: getattr(optimizer, call)())
    with pytest.raises(ValueError, match=rf"{call}\(\) was called inside backward\(\), by a hook"):
        small.make_loss(model, hvd.rank()).backward()
    hook.remove()
    small.assert_close(model.parameters(), before)
    optimizer.synchronize()  # takes part in what the other rank waits for
    optimizer.zero_grad()
    small.backward_averages(model)


@on("ranks2_in_backward")
def test_several_passes_are_summed_once_after_the_model_has_another_dtype() -> None:
    model = small.make_model().float()
    optimizer = small.sgd(model, op=hvd.Sum)
    model.double()
    for step in range(2):
        optimizer.zero_grad()
        wanted = [torch.zeros_like(p) for p in model.parameters()]
        for number in range(3):
            wanted = [w + 2 * g for w, g in zip(wanted, small.mean_gradients(model, 2, 3 * step + number), strict=True)]
            small.make_loss(model, hvd.rank(), 3 * step + number).backward()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.step()


@on("ranks2_in_backward")
def test_a_dtype_that_changes_between_two_passes_is_refused() -> None:
    model = small.make_model().float()
    optimizer = small.sgd(model, op=hvd.Sum)
    model(torch.ones(1, 4)).sum().backward()
    model.double()
    with pytest.raises(ValueError, match=r"op=Sum: parameter '.*' has got another dtype \(torch\.float64\)"):
        small.make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    wanted = [2 * g for g in small.mean_gradients(model, 2)]
    small.make_loss(model, hvd.rank()).backward()
    small.assert_close(small.gradients_of(model), wanted)


@on("ranks2_in_backward")
def test_a_backward_that_adds_to_a_gradient_that_was_replaced_is_refused() -> None:
    model, optimizer = small.made(op=hvd.Sum)
    small.make_loss(model, hvd.rank()).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    with pytest.raises(ValueError, match=r"op=Sum: the gradient of '.*' was replaced.*in place"):
        small.make_loss(model, hvd.rank(), 1).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    wanted = [2 * g for g in small.mean_gradients(model, 2)]
    small.make_loss(model, hvd.rank()).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()
    small.assert_close(small.gradients_of(model), [g / 2 for g in wanted])


@pytest.mark.parametrize("by_model", [False, True])
@on("ranks2_in_backward")
def test_a_backward_adds_to_gradients_that_were_set_by_hand_after_older_ones_were_cleared(by_model: bool) -> None:
    model, optimizer = small.made(op=hvd.Sum)
    for step in range(3):
        if by_model:
            model.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + hvd.rank())
        wanted = [2 * g + (0 if by_model else 3) for g in small.mean_gradients(model, 2, step)]
        small.make_loss(model, hvd.rank(), step).backward()
        small.assert_close(small.gradients_of(model), wanted)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
