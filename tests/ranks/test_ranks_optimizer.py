"""``DistributedOptimizer`` between real processes, rule by rule."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool

import horo.torch as hvd


@pytest.fixture(params=["ranks2_always", "ranks2_never"])
def ranks2(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks that reduce gradients while backward runs, then two that do it afterwards."""
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


@pytest.fixture(params=["ranks2_always", "ranks2_never", "ranks4_always", "ranks4_never"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks and four, each both ways."""
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
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


def _model(seed: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def _loss(model: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return model(_batch(rank, step)).square().mean()


def _mean_gradients(model: torch.nn.Module, ranks: int, step: int = 0) -> list[torch.Tensor]:
    """What averaging over the ranks must give, computed alone."""
    alone = copy.deepcopy(model)
    for parameter in alone.parameters():
        parameter.grad = None
    (sum(_loss(alone, rank, step) for rank in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]


def _gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def _assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _sgd(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_steps_as_alone_and_keeps_its_class(ranks2: RankPool, name: str) -> None:
    def check(name: str, make: Any) -> None:
        n, r = hvd.size(), hvd.rank()
        model, alone = _model(), _model()
        plain = make(alone.parameters())
        cls = getattr(torch.optim, name)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        assert type(optimizer) is cls
        for step in range(6):
            optimizer.zero_grad()
            _loss(model, r, step).backward()
            optimizer.step()
            for parameter, gradient in zip(alone.parameters(), _mean_gradients(alone, n, step), strict=True):
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

    ranks2.run(check, name, OPTIMIZERS[name])


def test_lbfgs_takes_the_same_path_on_all_ranks(ranks: RankPool) -> None:
    def check() -> list[torch.Tensor]:
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

        model, alone = _model(), _model()
        train(model, hvd.DistributedOptimizer(make(model), model.named_parameters()), lambda: _loss(model, r))
        train(alone, make(alone), lambda: sum(_loss(alone, k) for k in range(n)) / n)  # type: ignore[return-value]
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        return [p.detach() for p in model.parameters()]

    results = ranks.run(check)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_sees_averaged_gradients_and_gives_the_mean_loss(ranks2: RankPool, keyword: bool) -> None:
    def check(keyword: bool) -> None:
        n, r = hvd.size(), hvd.rank()
        model = _model()
        optimizer = _sgd(model)
        wanted = _mean_gradients(model, n)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, r)
            loss.backward()
            return loss

        mean = sum(_loss(model, k) for k in range(n)) / n
        result = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        torch.testing.assert_close(result, mean.detach())  # type: ignore[union-attr]
        _assert_close(_gradients(model), wanted)

    ranks2.run(check, keyword)


def test_schedulers_made_before_or_after_work_without_a_warning(ranks2: RankPool) -> None:
    def check() -> None:
        for before in (True, False):
            model = _model()
            plain = torch.optim.SGD(model.parameters(), lr=1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if before:
                    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
                optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
                if not before:
                    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
                for step in range(3):
                    start = [p.detach().clone() for p in model.parameters()]
                    wanted = _mean_gradients(model, hvd.size(), step)
                    optimizer.zero_grad()
                    _loss(model, hvd.rank(), step).backward()
                    optimizer.step()
                    _assert_close(model.parameters(), [s - 0.5**step * g for s, g in zip(start, wanted, strict=True)])
                    scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 0.125

    ranks2.run(check)


def test_a_gradient_scaler_agrees_on_overflow_and_steps_as_alone(ranks2: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        model = _model()
        optimizer = _sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(4):
            start = [p.detach().clone() for p in model.parameters()]
            wanted = _mean_gradients(model, n, step)
            optimizer.zero_grad()
            loss = _loss(model, r, step)
            if step == 2 and r == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            change = 0.0 if step == 2 else 0.1
            _assert_close(
                model.parameters(),
                start if change == 0 else [s - change * g for s, g in zip(start, wanted, strict=True)],
            )
        assert scaler.get_scale() == 4.0

    ranks2.run(check)


def test_unscaling_gradients_under_way_is_an_error_not_a_wrong_step(ranks2: RankPool) -> None:
    def check() -> None:
        for fused in (False, True):
            model = _model()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(_loss(model, hvd.rank())).backward()
            start = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match=r"a gradient scaler looked at gradients before they were reduced"):
                scaler.step(optimizer)
            assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
            optimizer.synchronize()
            with pytest.warns(UserWarning, match="skip_synchronize"):
                scaler.step(optimizer)

    ranks2.run(check)


def test_clipping_gradients_under_way_is_an_error_not_a_wrong_step(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = _sgd(model)
        start = [p.detach().clone() for p in model.parameters()]
        _loss(model, hvd.rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with pytest.raises(ValueError, match=r"gradient of '0\.weight' was changed while it was being reduced"):
            optimizer.step()
        assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
        optimizer.zero_grad()
        _loss(model, hvd.rank()).backward()
        model.zero_grad()
        with pytest.raises(ValueError, match=r"gradient of '0\.weight' was changed while it was being reduced"):
            optimizer.step()
        _loss(model, hvd.rank()).backward()
        optimizer.step()

    ranks2.run(check)


def test_clipping_after_synchronize_sees_averaged_gradients(ranks: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = _sgd(model)
        wanted = _mean_gradients(model, hvd.size())
        _loss(model, hvd.rank()).backward()
        optimizer.synchronize()
        _assert_close(_gradients(model), wanted)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in wanted]).norm())
        clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(_gradients(model), clipped, strict=True))

    ranks.run(check)


def test_a_step_after_synchronize_without_skip_warns_once_and_reduces_nothing_twice(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = _sgd(model, op=hvd.Sum)
        wanted = [2 * g for g in _mean_gradients(model, 2)]
        _loss(model, hvd.rank()).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize") as seen:
            optimizer.step()
        assert len(seen) == 1
        _assert_close(_gradients(model), wanted)
        optimizer.zero_grad()
        _loss(model, hvd.rank(), 1).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()

    ranks2.run(check)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_its_argument_and_refuses_while_gradients_are_under_way(
    ranks2: RankPool, set_to_none: bool
) -> None:
    def check(set_to_none: bool) -> None:
        model = _model()
        optimizer = _sgd(model)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            wanted = _mean_gradients(model, hvd.size(), step)
            _loss(model, hvd.rank(), step).backward()
            with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after backward"):
                optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            _assert_close(_gradients(model), wanted)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((g is None) == set_to_none for g in _gradients(model))

    ranks2.run(check, set_to_none)


def test_several_backward_passes_add_up_before_one_reduction(ranks: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        model = _model()
        optimizer = _sgd(model, backward_passes_per_step=3)
        assert optimizer.backward_passes_per_step == 3
        for _ in range(2):
            optimizer.zero_grad()
            wanted = [sum(g) for g in zip(*(_mean_gradients(model, n, step) for step in range(3)), strict=True)]
            for step in range(3):
                assert not optimizer._handles
                _loss(model, r, step).backward()
            assert len(optimizer._handles) == 4
            optimizer.step()
            _assert_close(_gradients(model), wanted)
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        wanted = _mean_gradients(model, n)
        _loss(model, r).backward()
        assert len(optimizer._handles) == 4
        optimizer.step()
        _assert_close(_gradients(model), wanted)

    ranks.run(check)


def test_one_backward_too_many_is_refused(ranks2: RankPool) -> None:
    def check() -> None:
        for passes, groups in ((1, None), (2, None), (1, 1)):
            model = _model()
            optimizer = _sgd(model, backward_passes_per_step=passes, groups=groups)
            for _ in range(passes):
                _loss(model, hvd.rank()).backward()
            with pytest.raises(AssertionError, match=f"more often than backward_passes_per_step={passes}"):
                _loss(model, hvd.rank()).backward()
            with pytest.raises(ValueError, match="was changed while it was being reduced"):
                optimizer.synchronize()
            optimizer.zero_grad()

    ranks2.run(check)


def test_fewer_passes_than_expected_are_reduced_at_the_step(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = _sgd(model, backward_passes_per_step=4)
        for step in range(3):
            optimizer.zero_grad()
            wanted = _mean_gradients(model, hvd.size(), step)
            _loss(model, hvd.rank(), step).backward()
            optimizer.step()
            _assert_close(_gradients(model), wanted)

    ranks2.run(check)


def test_no_sync_accumulates_locally(ranks: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        model = _model()
        optimizer = _sgd(model)
        wanted = [sum(g) for g in zip(*(_mean_gradients(model, n, step) for step in range(3)), strict=True)]
        with optimizer.no_sync():
            _loss(model, r, 0).backward()
            _loss(model, r, 1).backward()
            assert not optimizer._handles
        _loss(model, r, 2).backward()
        with optimizer.no_sync(), pytest.raises(AssertionError, match="no_sync"):
            _loss(model, r, 2).backward()
        with pytest.raises(ValueError, match="was changed"):
            optimizer.step()
        optimizer.zero_grad()
        with optimizer.no_sync():
            _loss(model, r, 0).backward()
            _loss(model, r, 1).backward()
        _loss(model, r, 2).backward()
        optimizer.step()
        _assert_close(_gradients(model), wanted)

    ranks.run(check)


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_parameters_unused_on_some_ranks_take_part_with_zeros(ranks: RankPool, groups: int | None) -> None:
    def check(groups: int | None) -> None:
        n, r = hvd.size(), hvd.rank()
        torch.manual_seed(0)
        parts = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(n + 1)).double()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parts.parameters(), lr=0.1), parts.named_parameters(), groups=groups
        )
        for _ in range(3):
            optimizer.zero_grad()
            data = torch.ones(1, 2, dtype=torch.float64)
            (parts[r](data) * (r + 1)).sum().backward()  # each rank its own part, the last part nobody
            optimizer.step()
            for index, part in enumerate(parts):
                value = 0.0 if index == n else (index + 1) / n
                assert part.weight.grad is not None
                torch.testing.assert_close(part.weight.grad, torch.full((1, 2), value, dtype=torch.float64))

    ranks.run(check, groups)


@pytest.mark.parametrize("groups", [None, 1])
def test_parameters_frozen_and_thawed_later_are_detected(ranks2: RankPool, groups: int | None) -> None:
    def check(groups: int | None) -> None:
        n, r = hvd.size(), hvd.rank()
        model = _model()
        model[0].requires_grad_(False)
        optimizer = _sgd(model, groups=groups)

        def step(number: int) -> None:
            optimizer.zero_grad()
            wanted = _mean_gradients(model, n, number)
            _loss(model, r, number).backward()
            optimizer.step()
            for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                if parameter.requires_grad:
                    torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
                else:
                    assert parameter.grad is None

        step(0)
        model[0].requires_grad_(True)
        step(1)
        step(2)
        model[2].requires_grad_(False)
        step(3)
        model[0].weight.requires_grad_(False)
        step(4)
        model.requires_grad_(True)
        step(5)

    ranks2.run(check, groups)


def test_parameter_groups_added_later_are_reduced(ranks2: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        model = _model()
        names = dict(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), names.items())
        _loss(model, r).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
        wanted = _mean_gradients(model, n, 1)
        _loss(model, r, 1).backward()
        assert len(optimizer._handles) == 4
        optimizer.step()
        _assert_close(_gradients(model), wanted)

    ranks2.run(check)


def test_gradients_set_by_hand_are_reduced_at_the_step(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = _sgd(model)
        gradients = torch.autograd.grad(_loss(model, hvd.rank()), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        wanted = _mean_gradients(model, hvd.size())
        optimizer.step()
        _assert_close(_gradients(model), wanted)

    ranks2.run(check)


def test_compressed_gradients_keep_dtype_and_agree(ranks2: RankPool) -> None:
    def check(compression: Any) -> list[torch.Tensor]:
        model = _model()
        optimizer = _sgd(model, compression=compression)
        wanted = _mean_gradients(model, hvd.size())
        _loss(model, hvd.rank()).backward()
        optimizer.step()
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float64
            torch.testing.assert_close(parameter.grad, gradient, rtol=0.02, atol=1e-3)
        return [p.detach() for p in model.parameters()]

    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        first, second = ranks2.run(check, compression)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_gradients_are_summed_row_by_row(ranks: RankPool, as_dense: bool, op: int) -> None:
    def check(as_dense: bool, op: int) -> None:
        n, r = hvd.size(), hvd.rank()
        table = torch.nn.Embedding(9, 3, sparse=True).double()
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), op=op, sparse_as_dense=as_dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([r, r, 8])).sum().backward()
            optimizer.step()
        gradient = torch.zeros(9, 3, dtype=torch.float64)
        gradient[:n] = 2.0
        gradient[8] = n
        gradient /= n if op == hvd.Average else 1
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        torch.testing.assert_close(table.weight.grad.to_dense(), gradient)
        torch.testing.assert_close(table.weight.detach(), 1 - 2 * gradient)

    ranks.run(check, as_dense, op)


def test_a_sparse_gradient_works_with_ranks_that_did_not_use_the_parameter(ranks: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        table = torch.nn.Embedding(5, 2, sparse=True).double()
        other = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        names = [("table", table.weight), ("other", other)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, other], lr=1.0), names)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (other * (r + 1)).sum()
            if r == n - 1:
                loss = loss + table(torch.tensor([3])).sum()
            loss.backward()
            optimizer.step()
            assert table.weight.grad is not None
            wanted = torch.zeros(5, 2, dtype=torch.float64)
            wanted[3] = 1 / n
            torch.testing.assert_close(table.weight.grad.to_dense(), wanted)
            torch.testing.assert_close(other.grad, torch.full((2,), (n + 1) / 2, dtype=torch.float64))

    ranks.run(check)


def test_sparse_adam_works_with_gathered_rows(ranks2: RankPool) -> None:
    def check() -> torch.Tensor:
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()), table.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), step])).square().sum().backward()
            optimizer.step()
        return table.weight.detach()

    first, second = ranks2.run(check)
    assert torch.equal(first, second)


def test_a_sparse_gradient_in_a_group_is_refused(ranks2: RankPool) -> None:
    def check() -> None:
        table = torch.nn.Embedding(6, 2, sparse=True)
        plain = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, table.named_parameters(), groups=1)
        assert optimizer is plain
        with pytest.raises(ValueError, match="gradient of 'weight' is sparse: leave the parameter out of groups"):
            table(torch.tensor([1])).sum().backward()

    ranks2.run(check)


def test_two_models_with_equal_names_stay_separate(ranks2: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        models = [_model(1), _model(2)]
        optimizers = [_sgd(model) for model in models]
        wanted = [_mean_gradients(model, n) for model in models]
        for model in models if r == 0 else models[::-1]:
            _loss(model, r).backward()
        for model, optimizer, gradients in zip(models, optimizers, wanted, strict=True):
            optimizer.step()
            _assert_close(_gradients(model), gradients)

    ranks2.run(check)


def test_a_second_optimizer_takes_over_when_the_first_is_gone(ranks2: RankPool) -> None:
    def check() -> None:
        gc.disable()  # no cycle may keep the old hooks alive
        try:
            model = _model()
            optimizer = _sgd(model)
            _loss(model, hvd.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
            assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())  # type: ignore[attr-defined]
            _loss(model, hvd.rank()).backward()
            optimizer.step()
        finally:
            gc.enable()

    ranks2.run(check)


def test_loading_a_state_waits_for_gradients_under_way(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        _loss(model, hvd.rank()).backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        _loss(model, hvd.rank(), 1).backward()
        optimizer.load_state_dict(state)
        assert not optimizer._handles
        optimizer.zero_grad()
        _loss(model, hvd.rank(), 2).backward()
        optimizer.step()

    ranks2.run(check)


def test_an_optimizer_whose_step_calls_its_base_reduces_once(ranks2: RankPool) -> None:
    def check() -> None:
        class Counting(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        model = _model()
        torch.optim.SGD(model.parameters(), lr=0.1)  # the base class has torch's step hooks now
        plain = Counting(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Sum)
        wanted = [hvd.size() * g for g in _mean_gradients(model, hvd.size())]
        _loss(model, hvd.rank()).backward()
        optimizer.step()
        _assert_close(_gradients(model), wanted)

    ranks2.run(check)


def test_a_gradient_that_is_not_contiguous_is_reduced(ranks2: RankPool) -> None:
    def check() -> None:
        layer = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())
        data = torch.randn(2, 1, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        twin = copy.deepcopy(layer)
        (sum(twin(data[k]).square().sum() for k in range(2)) / 2).backward()  # type: ignore[union-attr]
        layer(data[hvd.rank()]).square().sum().backward()
        optimizer.step()
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad)

    ranks2.run(check)
