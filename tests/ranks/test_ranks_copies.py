"""What becomes of a distributed optimizer that is copied or saved: the copy averages gradients too, or is refused."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from rank_pool import on
from small_model import assert_close, gradients_of, made, make_model, mean_gradients, sgd, take_step, train

import horo.torch as hvd


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("groups", [None, 2])
@on("ranks2_in_each_order")
def test_a_deep_copy_of_model_and_optimizer_trains_like_the_original(order: str, groups: int | None) -> None:
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), groups=groups
    )
    train(model, optimizer, 0)
    if order == "model first":
        model2, optimizer2 = copy.deepcopy((model, optimizer))
    else:
        optimizer2, model2 = copy.deepcopy((optimizer, model))
    for step in range(1, 4):
        train(model2, optimizer2, step)
        train(model, optimizer, step)
    assert_close(model2.parameters(), model.parameters())
    assert type(optimizer2) is torch.optim.Adam
    model3, optimizer3 = copy.deepcopy((model2, optimizer2))
    del model2, optimizer2
    train(model3, optimizer3, 4)


@on("ranks2_in_each_order")
def test_a_copy_on_one_rank_only_disturbs_nobody() -> None:
    model, optimizer = made()
    best: Any = None
    for step in range(3):
        train(model, optimizer, step)
        if hvd.rank() == 1:
            best = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3)
    other = make_model(5)
    train(other, sgd(other), 4)
    assert (best is not None) == (hvd.rank() == 1)


@on("ranks2_in_each_order")
def test_a_copy_keeps_the_options() -> None:
    model, optimizer = made(op=hvd.Sum, backward_passes_per_step=2)
    copied: Any
    model2, copied = copy.deepcopy((model, optimizer))
    assert copied.op == hvd.Sum
    assert copied.backward_passes_per_step == 2
    copied.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 2
    wanted = [hvd.size() * g for g in mean_gradients(model2, hvd.size())]
    take_step(model2, copied)
    assert_close(gradients_of(model2), wanted)


@on("ranks2_in_each_order")
def test_an_optimizer_is_not_saved_whole_and_the_sentence_names_its_state() -> None:
    model, optimizer = made()
    train(model, optimizer, 0)
    for attempt in (
        lambda: pickle.dumps(optimizer),
        lambda: pickle.dumps((model, optimizer)),
        lambda: torch.save(optimizer, io.BytesIO()),
        lambda: copy.copy(optimizer),
    ):
        with pytest.raises(ValueError, match=r"SGD.*(pickled|copied).*optimizer\.state_dict\(\)"):
            attempt()
    memory = io.BytesIO()
    torch.save(optimizer.state_dict(), memory)
    memory.seek(0)
    optimizer.load_state_dict(torch.load(memory))
    train(model, optimizer, 1)


@on("ranks2_in_each_order")
def test_a_copy_goes_with_its_last_reference() -> None:
    import gc  # noqa: PLC0415
    import weakref  # noqa: PLC0415

    model, optimizer = made()
    gc.disable()  # no cycle may keep the hooks of a copy alive
    try:
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        watched = weakref.ref(optimizer2)
        del optimizer2
        assert watched() is None
        assert all(not p._post_accumulate_grad_hooks for p in model2.parameters())
    finally:
        gc.enable()
