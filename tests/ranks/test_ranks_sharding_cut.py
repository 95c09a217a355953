"""``sharding="optimizer"`` with parameters of which each rank steps a part, and with what torch and scripts change."""

from __future__ import annotations  # ranks get functions without what classes in them are annotated by

import copy
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import small_model as small
import torch
from jobs import in_child
from rank_pool import RankPool, on, on_own

import horo.torch as hvd
from horo.errors import AbortedError, ResourceError, UsageError
from horo.torch.optimizer.sharding import memory


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).double()


def _pair(steps: int = 2) -> small.Pair:
    pair = _made(_model)
    small.train_pair(pair, range(steps))
    return pair


def _shapes(model: torch.nn.Module, optimizer: Any) -> list[Any]:
    return [
        (p.shape, p.grad.shape, p.data_ptr(), [value.shape for value in optimizer.state.get(p, {}).values()])
        for p in model.parameters()
        if p.grad is not None
    ]


@pytest.mark.parametrize("is_cut", [False, True])
@on("ranks2")
def test_an_elastic_state_commits_and_restores(is_cut: bool) -> None:
    with small.cutting(is_cut):
        pair = _pair()
        states = [hvd.elastic.TorchState(model=model, optimizer=optimizer) for model, optimizer in pair]
        for (model, optimizer), state in zip(pair, states, strict=True):
            state.save()
            small.take_steps(model, optimizer, range(2, 4))
            state.restore()
        small.assert_same_bits(pair[0][0], pair[1][0])
        small.go_on(pair, range(5, 8))


@on("ranks")
def test_parameters_that_are_large_are_cut_and_no_others() -> None:
    torch.manual_seed(1)
    table, layer = torch.nn.Embedding(1000, 200), torch.nn.Linear(200, 2)
    short = torch.nn.Parameter(torch.ones(200_000, dtype=torch.bfloat16))
    model = torch.nn.ModuleList([table, layer])
    named = [*model.named_parameters(), ("short", short)]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([p for _, p in named]), named, sharding="optimizer")
    rows = torch.arange(3) + hvd.rank()
    (layer(table(rows)).sum() + short.float().sum()).backward()
    optimizer.step()
    cut = {
        state.name: [(share.owner, share.start % 1024, share.end) for share in there.block.shares]
        for state, there in optimizer._sharded_step._placement.placed.items()
        if there.block.shares
    }
    assert list(cut) == ["0.weight"]
    assert [owner for owner, _, _ in cut["0.weight"]] == list(range(hvd.size()))
    assert all(start == 0 for _, start, _ in cut["0.weight"]) and cut["0.weight"][-1][2] == 200_000


@pytest.mark.parametrize("steps", [0, 2])
@on("ranks")
def test_a_step_that_raises_leaves_them_whole(steps: int) -> None:
    with small.cutting():
        (model, optimizer), (plain, its) = pair = _pair(steps)
        optimizer.zero_grad()
        small.make_loss(model, hvd.rank(), 7).backward()
        before = _shapes(model, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        if is_last := hvd.rank() == hvd.size() - 1:
            optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(Exception if is_last else AbortedError, match=r".") as caught:
            optimizer.step()
        assert not is_last or not isinstance(caught.value, AbortedError)
        optimizer.param_groups[0]["lr"] = rate
        if steps:
            assert _shapes(model, optimizer) == before
        assert [shapes[:2] for shapes in _shapes(model, optimizer)] == [shapes[:2] for shapes in before]
        with pytest.raises(UsageError, match=r"may be of two steps"):
            optimizer.state_dict()
        model.load_state_dict(copy.deepcopy(plain.state_dict()))
        optimizer.load_state_dict(copy.deepcopy(its.state_dict()))
        small.go_on(pair, range(3, 6))


@on("ranks2")
def test_a_script_that_writes_state_and_reads_it_before_the_next_step() -> None:
    with small.cutting():
        pair = _pair()
        for _, optimizer in pair:
            for rank in range(hvd.size()):  # one after the other: a later one would see what an earlier one wrote
                for entries in optimizer.state.values() if rank == hvd.rank() else ():
                    entries["exp_avg"].mul_(0.5)
                    entries["step"].add_(5.0)
                hvd.barrier()
            found = optimizer.state_dict()["state"]
            assert all(entries["step"] == 7.0 for entries in found.values())
        small.assert_pair_is_alike(pair)
        small.go_on(pair, range(3, 6))


@pytest.mark.parametrize("is_cut", [False, True])
@on("ranks2")
def test_a_later_job_and_a_child_have_their_own(is_cut: bool) -> None:
    with small.cutting(is_cut):
        (model, optimizer), (plain, _) = pair = _pair()
        whole = small.bits_of(model)

        def clear() -> list[Any]:
            for parameter in model.parameters():
                parameter.data.zero_()
                for value in optimizer.state[parameter].values():
                    value.zero_()
            return small.bits_of(model)

        assert not any(map(any, in_child(clear)))
        assert small.bits_of(model) == whole
        small.assert_pair_is_alike(pair)
        hvd.shutdown()
        assert small.bits_of(model) == small.bits_of(plain)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1)
        hvd.init()
        small.go_on(pair, range(4, 7))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
@on("ranks2")
def test_a_parameter_whose_gradient_is_sparse_later_is_no_longer_cut(kind: str) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.ModuleList([torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 2)])

    def take(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        rows = model[0](torch.arange(3) + hvd.rank() + step) if step else torch.ones(3, 8)
        model[1](rows).square().sum().backward()
        optimizer.step()

    with small.cutting():
        pair = small.make_pair(lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.1), make)
        for model, optimizer in pair:
            take(model, optimizer, 0)
        assert any(there.block.shares for there in pair[0][1]._sharded_step._placement.placed.values())
        for model, optimizer in pair:
            if kind == "Adam":
                with pytest.raises((AbortedError, RuntimeError), match=r"Adam does not support sparse gradients"):
                    take(model, optimizer, 1)
            else:
                for step in range(1, 4):
                    take(model, optimizer, step)
    if kind != "Adam":
        small.assert_pair_is_alike(pair)


# -- compiled, parametrized and fused ones ---------------------------------------------------------------------------

Make = Callable[[], torch.nn.Module]


def _made(make: Make = small.make_model, **options: Any) -> small.Pair:
    return small.make_pair(lambda parameters: torch.optim.Adam(parameters, **{"lr": 0.01, **options}), make)


@on("ranks2")
def test_compiled_models_and_steps() -> None:
    pair = _made(foreach=True)
    compiled = [torch.compile(model, backend="eager") for model, _ in pair]
    for step in range(3):
        for model, (_, optimizer) in zip(compiled, pair, strict=True):
            small.take_steps(model, optimizer, range(step, step + 1))
    small.assert_pair_is_alike(pair)
    steps = [torch.compile(optimizer.step, backend="eager") for _, optimizer in pair]
    for step in range(3, 6):
        for (model, optimizer), call in zip(pair, steps, strict=True):
            optimizer.zero_grad()
            small.make_loss(model, hvd.rank(), step).backward()
            call()
    small.assert_pair_is_alike(pair)
    small.go_on(pair, range(6, 8))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
@on("ranks2")
def test_a_learning_rate_that_is_a_tensor_and_a_scheduler_changes(options: dict[str, Any]) -> None:
    pair = _made(lr=torch.tensor(0.1), **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pair]
    for step in range(4):
        small.go_on(pair, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()


def _parametrized() -> torch.nn.Module:
    model = small.make_model()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    torch.nn.utils.parametrizations.orthogonal(model[2])
    return model


def _hooked() -> torch.nn.Module:
    model = small.make_model()
    torch.nn.utils.weight_norm(model[0])  # of older scripts
    torch.nn.utils.spectral_norm(model[2])
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("make", [_parametrized, _hooked])
@on("ranks2")
def test_weights_that_are_computed_from_parameters(make: Make) -> None:
    """And become parameters, and then those that a state has."""

    def become_parameters(model: Any) -> None:
        if make is _parametrized:
            torch.nn.utils.parametrize.remove_parametrizations(model[2], "weight")
        else:
            torch.nn.utils.remove_weight_norm(model[0])

    def take_from_state(model: Any) -> None:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)

    pair = _made(make)
    small.go_on(pair, range(3))
    for first, change in ((3, become_parameters), (6, take_from_state)):
        for model, optimizer in pair:
            change(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.state.clear()
        small.go_on(pair, range(first, first + 3))


@small.needs_cpu_scaler
@pytest.mark.parametrize("fused", [False, True])
@on("ranks2")
def test_a_step_under_a_gradient_scaler(fused: bool) -> None:
    pair = _made(fused=fused)
    for model, optimizer in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(small.make_loss(model, hvd.rank(), step)).backward()
            if step == 2:
                next(iter(model.parameters())).grad.fill_(float("inf"))
            if step == 4:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 8.0
    small.assert_pair_is_alike(pair)


# -- other numbers of ranks ------------------------------------------------------------------------------------------


def test_a_later_job_of_other_ranks_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    def train(sharding: str | None, steps: range, source: str, target: str) -> list[Any]:
        model = small.make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model, sharding=sharding)
        if source:
            found = torch.load(source, weights_only=True)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
        for step in steps:
            optimizer.zero_grad()
            small.make_loss(model, 0, step).backward()  # has equal gradients in all jobs
            optimizer.step()
        if hvd.rank() == 0 and target:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target)
        return small.bits_of(model)

    results = []
    for sharding in ("optimizer", None):
        file, path = "", str(tmp_path / "saved")
        for number, size in enumerate((4, 2, 1)):
            with RankPool(size) as pool:
                found = pool.run(train, sharding, range(3 * number, 3 * number + 3), file, path)
            assert all(each == found[0] for each in found)
            file = path
        results.append(found[0])
    assert results[0] == results[1]


class _Clipped(torch.optim.SGD):
    """Clips all parameters behind each step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)
        return loss


class _Decaying(small.OwnOptimizer):
    """Lets all weights decay, also of parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)
            self.move(group["lr"])


class _Reassigning(small.OwnOptimizer):
    """Gives parameters new memory, also those that have no gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = torch.zeros(()) if parameter.grad is None else parameter.grad
                parameter.data = parameter.data * 0.9 - group["lr"] * gradient


class _LookingAhead(torch.optim.Adam):
    """Goes half way back to slow weights, which are its state, in every second step."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.detach().clone())
                if self.steps % 2 == 0:
                    parameter.copy_(slow.lerp_(parameter, 0.5))
        return loss


def _with_unused() -> torch.nn.Module:
    model = small.make_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return model


def _scripts_pair(kind: Any, **options: Any) -> small.Pair:
    return small.make_pair(lambda parameters: kind(parameters, **options), _with_unused)


@pytest.mark.parametrize("kind", [_Clipped, _Decaying, _Reassigning, _LookingAhead])
@on("ranks")
def test_an_optimizer_that_writes_all_parameters_in_its_step(kind: Any) -> None:
    pair = _scripts_pair(kind, lr=0.05)
    for step in range(5):
        small.train_pair(pair, range(step, step + 1))
        small.assert_pair_is_alike(pair, in_order=False)


@on("ranks2")
def test_a_model_that_is_shared_with_other_processes_before_each_step_takes_no_more_memory() -> None:
    pair = _scripts_pair(torch.optim.Adam, lr=0.01)
    sizes = set()
    for step in range(5):
        for model, optimizer in pair:
            small.take_steps(model, optimizer, range(step, step + 1))
            if step != 3 or hvd.rank() == 1:
                model.share_memory()
        sizes.add(os.fstat(pair[0][1]._sharded_step._placement.memory.descriptor).st_size)
    small.assert_pair_is_alike(pair)
    assert len(sizes) == 1


@on_own(2)
def test_a_rank_without_memory_for_more_parameters_and_another_try() -> None:
    pair = _scripts_pair(torch.optim.SGD, lr=0.1, momentum=0.9)
    for model, optimizer in pair:
        small.take_steps(model, optimizer, range(1))
        model.register_parameter("more", torch.nn.Parameter(torch.ones(3)))
        optimizer.add_param_group({"params": [model.more]})
    pages, fail = memory.Pages, Mock(side_effect=ResourceError("no memory"))
    for step in range(1, 4):
        for model, optimizer in pair:
            optimizer.zero_grad()
            (model(small.make_batch(hvd.rank(), step)) * model.more).square().mean().backward()
            if step == 1 and model is pair[0][0]:
                memory.Pages = fail if hvd.rank() == 1 else pages  # type: ignore[misc]
                with pytest.raises(ResourceError, match="no memory"):
                    optimizer.step()
                memory.Pages = pages  # type: ignore[misc]
            optimizer.step()
    small.assert_pair_is_alike(pair)


@on_own(2)
def test_a_rank_without_memory_for_state_leaves_no_half_of_it() -> None:
    model, optimizer = _scripts_pair(torch.optim.Adam)[0]
    pages, made = memory.Pages, []

    def fail(*args: Any) -> Any:
        made.append(args)
        if len(made) == 2 and hvd.rank() == 1:
            raise ResourceError("no memory")
        return pages(*args)

    memory.Pages = fail  # type: ignore[assignment,misc]
    with pytest.raises(ResourceError, match="no memory"):
        small.take_steps(model, optimizer, range(1))
    with pytest.raises(UsageError, match=r"parameters may be of two steps, since .*no memory"):
        optimizer.state_dict()


@on_own(2)
def test_a_forked_child_that_drops_the_optimizer_keeps_its_own_memory() -> None:
    size = 1 << 22
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(1000, size // 4000)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sharding="optimizer")
    model(torch.ones(1000) * (1 + hvd.rank())).sum().backward()
    optimizer.step()
    held = [model, optimizer]
    del model, optimizer

    def drop() -> None:
        own = [mmap.mmap(-1, size) for _ in range(4)]
        for each in own:
            each[:] = b"x" * size
        held.clear()
        assert all(each[size - 1] == ord("x") for each in own)

    in_child(drop)
