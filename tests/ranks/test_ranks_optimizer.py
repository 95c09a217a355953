"""``DistributedOptimizer`` between real processes, rule by rule, whenever gradients are due."""

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
from rank_pool import RankPool, one_of
from small_model import assert_close, gradients_of, make_loss, make_model, mean_gradients, needs_cpu_scaler, sgd

import horo.torch as hvd

ranks2 = one_of("ranks2_always", "ranks2_never", "ranks2_step")
"""Two ranks that reduce while backward runs, two that do it at its end, two in Horovod's order of calls."""


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
def test_every_optimizer_of_torch_steps_as_alone_and_keeps_its_class(ranks2: RankPool, name: str) -> None:
    def check(name: str, make: Any) -> None:
        n, r = hvd.size(), hvd.rank()
        model, alone = make_model(), make_model()
        plain = make(alone.parameters())
        cls = getattr(torch.optim, name)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        assert type(optimizer) is cls
        for step in range(6):
            optimizer.zero_grad()
            make_loss(model, r, step).backward()
            optimizer.step()
            for parameter, gradient in zip(alone.parameters(), mean_gradients(alone, n, step), strict=True):
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

        model, alone = make_model(), make_model()
        train(model, hvd.DistributedOptimizer(make(model), model.named_parameters()), lambda: make_loss(model, r))
        train(alone, make(alone), lambda: sum(make_loss(alone, k) for k in range(n)) / n)  # type: ignore[return-value]
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
        model = make_model()
        optimizer = sgd(model)
        wanted = mean_gradients(model, n)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = make_loss(model, r)
            loss.backward()
            return loss

        mean = sum(make_loss(model, k) for k in range(n)) / n
        result = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        torch.testing.assert_close(result, mean.detach())  # type: ignore[union-attr]
        assert_close(gradients_of(model), wanted)

    ranks2.run(check, keyword)


def test_schedulers_made_before_or_after_work_without_a_warning(ranks2: RankPool) -> None:
    def check() -> None:
        for before in (True, False):
            model = make_model()
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
                    wanted = mean_gradients(model, hvd.size(), step)
                    optimizer.zero_grad()
                    make_loss(model, hvd.rank(), step).backward()
                    optimizer.step()
                    assert_close(model.parameters(), [s - 0.5**step * g for s, g in zip(start, wanted, strict=True)])
                    scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 0.125

    ranks2.run(check)


@needs_cpu_scaler
def test_a_gradient_scaler_agrees_on_overflow_and_steps_as_alone(ranks2: RankPool) -> None:
    def check() -> None:
        n, r = hvd.size(), hvd.rank()
        model = make_model()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        for step in range(4):
            start = [p.detach().clone() for p in model.parameters()]
            wanted = mean_gradients(model, n, step)
            optimizer.zero_grad()
            loss = make_loss(model, r, step)
            if step == 2 and r == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            change = 0.0 if step == 2 else 0.1
            assert_close(
                model.parameters(),
                start if change == 0 else [s - change * g for s, g in zip(start, wanted, strict=True)],
            )
        assert scaler.get_scale() == 4.0

    ranks2.run(check)


def test_clipping_after_synchronize_sees_averaged_gradients(ranks: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        wanted = mean_gradients(model, hvd.size())
        make_loss(model, hvd.rank()).backward()
        optimizer.synchronize()
        assert_close(gradients_of(model), wanted)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in wanted]).norm())
        clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(model), clipped, strict=True))

    ranks.run(check)


def test_fewer_passes_than_expected_are_reduced_at_the_step(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model, backward_passes_per_step=4)
        for step in range(3):
            optimizer.zero_grad()
            wanted = mean_gradients(model, hvd.size(), step)
            make_loss(model, hvd.rank(), step).backward()
            optimizer.step()
            assert_close(gradients_of(model), wanted)

    ranks2.run(check)


@pytest.mark.parametrize("groups", [None, 1, 2])
def test_parameters_unused_on_some_ranks_count_as_zeros_there(ranks: RankPool, groups: int | None) -> None:
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
            for index, part in enumerate(parts[:n]):
                assert part.weight.grad is not None
                torch.testing.assert_close(part.weight.grad, torch.full((1, 2), (index + 1) / n, dtype=torch.float64))
            left = parts[n].weight.grad
            assert left is None or not left.any()  # Horovod's order of calls gives zeros

    ranks.run(check, groups)


@pytest.mark.parametrize("groups", [None, 1])
def test_parameters_frozen_and_thawed_later_are_detected(ranks2: RankPool, groups: int | None) -> None:
    def check(groups: int | None) -> None:
        n, r = hvd.size(), hvd.rank()
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = sgd(model, groups=groups)

        def step(number: int) -> None:
            optimizer.zero_grad()
            wanted = mean_gradients(model, n, number)
            make_loss(model, r, number).backward()
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


def test_gradients_set_by_hand_are_reduced_at_the_step(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        gradients = torch.autograd.grad(make_loss(model, hvd.rank()), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        wanted = mean_gradients(model, hvd.size())
        optimizer.step()
        assert_close(gradients_of(model), wanted)

    ranks2.run(check)


def test_compressed_gradients_keep_dtype_and_agree(ranks2: RankPool) -> None:
    def check(compression: Any) -> list[torch.Tensor]:
        model = make_model()
        optimizer = sgd(model, compression=compression)
        wanted = mean_gradients(model, hvd.size())
        make_loss(model, hvd.rank()).backward()
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
        models = [make_model(1), make_model(2)]
        optimizers = [sgd(model) for model in models]
        wanted = [mean_gradients(model, n) for model in models]
        for model in models:
            make_loss(model, r).backward()
        for model, optimizer, gradients in zip(models, optimizers, wanted, strict=True):
            optimizer.step()
            assert_close(gradients_of(model), gradients)

    ranks2.run(check)


def test_a_second_optimizer_takes_over_when_the_first_is_gone(ranks2: RankPool) -> None:
    def check() -> None:
        gc.disable()  # no cycle may keep the old hooks alive
        try:
            model = make_model()
            optimizer = sgd(model)
            make_loss(model, hvd.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
            assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())  # type: ignore[attr-defined]
            make_loss(model, hvd.rank()).backward()
            optimizer.step()
        finally:
            gc.enable()

    ranks2.run(check)


def test_an_optimizer_whose_step_calls_its_base_reduces_once(ranks2: RankPool) -> None:
    def check() -> None:
        class Counting(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        model = make_model()
        torch.optim.SGD(model.parameters(), lr=0.1)  # the base class has torch's step hooks now
        plain = Counting(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Sum)
        wanted = [hvd.size() * g for g in mean_gradients(model, hvd.size())]
        make_loss(model, hvd.rank()).backward()
        optimizer.step()
        assert_close(gradients_of(model), wanted)

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
