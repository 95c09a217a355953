"""``op=Sum``: what was summed over the ranks is not summed again, whatever happens to a gradient in between."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on
from small_model import assert_close, gradients_of, made, make_loss, make_model, mean_gradients, sgd

import horo.torch as hvd


@on("ranks2_in_backward")
def test_several_passes_are_summed_once_after_the_model_has_another_dtype() -> None:
    model = make_model().float()
    optimizer = sgd(model, op=hvd.Sum)
    model.double()
    for step in range(2):
        optimizer.zero_grad()
        wanted = [torch.zeros_like(p) for p in model.parameters()]
        for number in range(3):
            wanted = [w + 2 * g for w, g in zip(wanted, mean_gradients(model, 2, 3 * step + number), strict=True)]
            make_loss(model, hvd.rank(), 3 * step + number).backward()
        assert_close(gradients_of(model), wanted)
        optimizer.step()


@on("ranks2_in_backward")
def test_a_dtype_that_changes_between_two_passes_is_refused() -> None:
    model = make_model().float()
    optimizer = sgd(model, op=hvd.Sum)
    model(torch.ones(1, 4)).sum().backward()
    model.double()
    with pytest.raises(ValueError, match=r"op=Sum: parameter '.*' has got another dtype \(torch\.float64\)"):
        make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    wanted = [2 * g for g in mean_gradients(model, 2)]
    make_loss(model, hvd.rank()).backward()
    assert_close(gradients_of(model), wanted)


@on("ranks2_in_backward")
def test_a_backward_that_adds_to_a_gradient_that_was_replaced_is_refused() -> None:
    model, optimizer = made(op=hvd.Sum)
    make_loss(model, hvd.rank()).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    with pytest.raises(ValueError, match=r"op=Sum: the gradient of '.*' was replaced.*in place"):
        make_loss(model, hvd.rank(), 1).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    wanted = [2 * g for g in mean_gradients(model, 2)]
    make_loss(model, hvd.rank()).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()
    assert_close(gradients_of(model), [g / 2 for g in wanted])


@pytest.mark.parametrize("by_model", [False, True])
@on("ranks2_in_backward")
def test_a_backward_adds_to_gradients_that_were_set_by_hand_after_older_ones_were_cleared(by_model: bool) -> None:
    model, optimizer = made(op=hvd.Sum)
    for step in range(3):
        if by_model:
            model.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + hvd.rank())
        wanted = [2 * g + (0 if by_model else 3) for g in mean_gradients(model, 2, step)]
        make_loss(model, hvd.rank(), step).backward()
        assert_close(gradients_of(model), wanted)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
