"""An optimizer lives longer than a job: ``shutdown()``, ``init()``, more or fewer ranks; names meet across ranks."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from small_model import assert_close, gradients_of, made, make_loss, make_model, mean_gradients, sgd, take_step, train

import horo.torch as hvd


@pytest.fixture(scope="module", params=["backward", "step"])
def idle2(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks that are in no job: each test calls ``init()``, and ends with ``shutdown()``."""
    with RankPool(2, init=False, environment={"HORO_GRADIENTS_READY": request.param, "HORO_OVERLAP": "always"}) as pool:
        yield pool


def again() -> None:
    hvd.barrier()  # a rank that has left already would abort what others still do
    hvd.shutdown()
    hvd.init()


@on("idle2")
def test_a_call_that_came_again_in_a_job_comes_again_in_the_next_one() -> None:
    def call() -> None:
        for _ in range(3):
            assert hvd.allreduce_(torch.ones(2), op=hvd.Sum, name="again").tolist() == [2.0, 2.0]

    hvd.init()
    call()
    again()
    call()
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError):
        call()


@on("idle2")
def test_an_optimizer_goes_on_after_shutdown_and_init_beside_a_new_one() -> None:
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 0)
    for _round in range(2):
        again()
        other = make_model(7)
        newer = sgd(other)
        for step in range(3):
            make_loss(other, hvd.rank(), step).backward()
            wanted = mean_gradients(other, 2, step)
            train(model, optimizer, step)
            newer.step()
            assert_close(gradients_of(other), wanted)
            newer.zero_grad()
    hvd.shutdown()


@on("idle2")
def test_a_rank_that_goes_on_meets_one_that_begins() -> None:
    """What an elastic job does: survivors keep their optimizers, and new ranks make theirs."""
    hvd.init()
    rank = hvd.rank()
    models = [make_model(1), make_model(2)]
    optimizers: list[Any] = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 0)
    hvd.barrier()
    hvd.shutdown()
    if rank == 0:
        hvd.init(comm=[0])
        assert hvd.size() == 1
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 1)
        hvd.shutdown()
        hvd.init()
    else:
        del optimizers, optimizer
        models = [make_model(1), make_model(2)]
        hvd.init()
        optimizers = [sgd(model) for model in models]
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(2, 4):
        for model, optimizer in list(zip(models, optimizers, strict=True))[::-1]:
            train(model, optimizer, step)
    hvd.shutdown()


@pytest.mark.parametrize("op", ["average", "sum"])
@on("idle2")
def test_gradients_of_an_earlier_job_are_reduced_anew(op: str) -> None:
    hvd.init()
    model, optimizer = made(op=hvd.Sum if op == "sum" else hvd.Average)
    make_loss(model, hvd.rank()).backward()
    optimizer.synchronize()
    found = [g.clone() for g in gradients_of(model) if g is not None]
    again()
    optimizer.step()
    if op == "average":
        assert_close(gradients_of(model), found)
    optimizer.zero_grad()
    again()
    optimizer.synchronize()
    hvd.shutdown()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("clears", [True, False])
@on("idle2")
def test_a_backward_between_two_jobs_says_so_and_the_next_job_goes_on(clears: bool) -> None:
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 0)
    rank = hvd.rank()
    hvd.barrier()
    hvd.shutdown()
    for _ in range(2):
        with pytest.raises(hvd.HoroError, match=r"not initialized; call hvd\.init\(\)"):
            make_loss(model, rank).backward()
    with pytest.raises(hvd.HoroError, match=r"not initialized; call hvd\.init\(\)"):
        optimizer.step()
    if clears:
        optimizer.zero_grad()
        hvd.init()
    else:
        hvd.init()
        model.zero_grad()
    for step in range(1, 3):
        train(model, optimizer, step)
    hvd.shutdown()


@on("idle2")
def test_parameters_are_compared_again_in_a_new_job() -> None:
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 0)
    again()
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].weight += 1
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is not equal on all ranks"):
        take_step(model, optimizer)
    hvd.shutdown()


@on("ranks2_in_each_order")
def test_an_optimizer_more_on_one_rank_shifts_no_names() -> None:
    if hvd.rank() == 0:
        tried = make_model(9)
        finder: Any = sgd(tried)
        with finder.no_sync(), finder.skip_synchronize():
            make_loss(tried, 0).backward()
            before = tried[0].weight.detach().clone()
            finder.step()
            assert not torch.equal(before, tried[0].weight)
            finder.zero_grad()
    model, optimizer = made()
    train(model, optimizer, 0)
    if hvd.rank() == 1:
        unused = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
        assert unused.param_groups
    second = make_model(4)
    optimizer2 = sgd(second)
    for step in range(1, 3):
        train(model, optimizer, step)
        train(second, optimizer2, step)


@pytest.mark.parametrize("is_model_first", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
@on("ranks2_in_each_order")
def test_a_deep_copy_of_model_and_optimizer_trains_like_the_original(is_model_first: bool, groups: int | None) -> None:
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model, groups=groups)
    train(model, optimizer, 0)
    if is_model_first:
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
def test_a_copy_keeps_the_options_and_goes_with_its_last_reference() -> None:
    model, optimizer = made(op=hvd.Sum, backward_passes_per_step=2)
    gc.disable()  # no cycle may keep the hooks of a copy alive
    try:
        copied: Any
        model2, copied = copy.deepcopy((model, optimizer))
        assert (copied.op, copied.backward_passes_per_step) == (hvd.Sum, 2)
        copied.set_backward_passes_per_step(1)
        assert optimizer.backward_passes_per_step == 2
        wanted = [hvd.size() * g for g in mean_gradients(model2, hvd.size())]
        take_step(model2, copied)
        assert_close(gradients_of(model2), wanted)
        watched = weakref.ref(copied)
        del copied
        assert watched() is None
        assert all(not p._post_accumulate_grad_hooks for p in model2.parameters())
    finally:
        gc.enable()


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
    train(model, optimizer, 1)
