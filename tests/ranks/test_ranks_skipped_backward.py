"""A rank that skips ``backward()``, or has one more than others: parameters do not part without an error."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool, one_of
from small_model import assert_close, gradients_of, make_loss, make_model, mean_gradients, sgd

import horo.torch as hvd
from horo.torch.engine import runtime
from horo.torch.optimizer.at_backward import BackwardReducer

ranks2 = one_of("ranks2_always", "ranks2_never")
"""Two ranks that reduce gradients while backward runs, then two that do it at its end."""


@pytest.fixture(params=["ranks2_always", "ranks2_never", "ranks2_step", "ranks2_step_never"])
def ranks2_in_each_order(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks in each order of calls, which reduce gradients during backward or after it."""
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


def copies(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def parts_of_rank_0(model: torch.nn.Module, step: int = 0) -> list[torch.Tensor]:
    """The gradients if rank 0 alone, of two, has a loss."""
    return [g / 2 for g in torch.autograd.grad(make_loss(model, 0, step), list(model.parameters()))]


@pytest.mark.parametrize("groups", [None, 1])
def test_gradients_clipped_where_another_rank_skipped_backward_are_an_error_on_all(
    ranks2: RankPool, groups: int | None
) -> None:
    def check(groups: int | None) -> None:
        model = make_model()
        optimizer = sgd(model, groups=groups)
        for step in range(2):
            optimizer.zero_grad()
            make_loss(model, hvd.rank(), step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        optimizer.zero_grad()
        before = copies(model)
        if hvd.rank() == 0:
            make_loss(model, 0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(
            ValueError,
            match=r"rank 1 took part in the reduction.*the gradient of '0\.bias' is not equal.*"
            r"optimizer\.synchronize\(\) on every rank",
        ):
            optimizer.step()
        assert_close(model.parameters(), before)

    ranks2.run(check, groups)


def test_synchronize_on_every_rank_makes_clipping_right_where_one_skipped_backward(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            wanted = parts_of_rank_0(model, step)
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted]))
            if hvd.rank() == 0:
                make_loss(model, 0, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 4)
            optimizer.step()
            for found, gradient in zip(gradients_of(model), wanted, strict=True):
                torch.testing.assert_close(found, gradient / 4, rtol=1e-4, atol=1e-12)

    ranks2.run(check)


@pytest.mark.parametrize("groups", [None, 1])
def test_a_skipped_backward_is_no_error_where_gradients_stay_as_they_are(
    ranks2_in_each_order: RankPool, groups: int | None
) -> None:
    def check(groups: int | None) -> None:
        model = make_model()
        optimizer = sgd(model, groups=groups)
        for step in range(6):
            optimizer.zero_grad()
            if step % 2:
                wanted = parts_of_rank_0(model, step)
                if hvd.rank() == 0:
                    make_loss(model, 0, step).backward()
            else:
                wanted = mean_gradients(model, 2, step)
                make_loss(model, hvd.rank(), step).backward()
            optimizer.step()
            assert_close(gradients_of(model), wanted)

    ranks2_in_each_order.run(check, groups)


def test_a_skipped_backward_inside_a_closure_is_told_too(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = make_loss(model, hvd.rank())
            if hvd.rank() == 0:
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            return loss

        before = copies(model)
        with pytest.raises(ValueError, match=r"rank 1 took part in the reduction.*is not equal"):
            optimizer.step(closure)
        assert_close(model.parameters(), before)

    ranks2.run(check)


def test_a_learning_rate_chosen_by_gradients_that_one_rank_lacked_is_an_error(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        if hvd.rank() == 0:
            make_loss(model, 0).backward()
            optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(ValueError, match=r"rank 1 took part.*the options of parameter group 0 are not equal"):
            optimizer.step()

    ranks2.run(check)


def test_a_sparse_gradient_clipped_where_another_rank_skipped_backward_is_an_error(ranks2: RankPool) -> None:
    def check(clip: bool) -> None:
        table = torch.nn.Embedding(6, 2, sparse=True).double()
        hvd.broadcast_parameters(table.state_dict(), 0)
        before = copies(table)
        optimizer = sgd(table)
        if hvd.rank() == 0:
            table(torch.tensor([1, 4])).sum().backward()
            assert table.weight.grad is not None
            if clip:
                table.weight.grad.mul_(0.5)
        if clip:
            with pytest.raises(ValueError, match="the gradient of 'weight' is not equal on all ranks"):
                optimizer.step()
            assert_close(table.parameters(), before)
        else:
            optimizer.step()
            moved = torch.zeros(6, 2, dtype=torch.float64)
            moved[[1, 4]] = 0.1 / 2
            assert_close(table.parameters(), [before[0] - moved])

    ranks2.run(check, True)
    ranks2.run(check, False)


def test_a_backward_more_on_one_rank_does_not_meet_that_of_the_next_step(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        make_loss(model, hvd.rank()).backward()
        if hvd.rank() == 1:
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(
            ValueError, match=r"rank 0 has called backward\(\) once more since its last optimizer\.step\(\).*rank 1"
        ):
            make_loss(model, hvd.rank(), 1).backward()

    ranks2.run(check)


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_a_second_backward_after_one_that_another_rank_has_joined_from_its_step_is_an_error(overlap: str) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        if hvd.rank() == 0:
            make_loss(model, 0).backward()
            with pytest.raises(ValueError, match=r"rank 1 .* waits in optimizer\.step\(\)"):
                make_loss(model, 0).backward()
            hvd.shutdown()
        else:
            with pytest.raises(hvd.HorovodInternalError):
                optimizer.step()

    pool = RankPool(2, environment={"HORO_OVERLAP": overlap, "HORO_GRADIENTS_READY": "backward"})
    try:
        pool.run(check)
    finally:
        pool.close()


def test_who_comes_late_costs_one_request_in_later_steps(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = sgd(model)
        assert isinstance(optimizer._reducer, BackwardReducer)
        optimizer.step()  # the first reduction has one request more
        counts = []
        for step in range(6):
            optimizer.zero_grad()
            before = runtime.current().core.counters()["requests"]
            if step % 3 == 0 or (step % 3 == 1 and hvd.rank() == 0):
                make_loss(model, hvd.rank(), step).backward()
            optimizer.step()
            counts.append(runtime.current().core.counters()["requests"] - before)
        # First, all four gradients again, what each rank has sent for them, and the comparison; besides that of the
        # first three reductions. From then on, which of them each rank has used; and the second time the same for the
        # first gradient only.
        assert counts == [4, 14, 5, 5, 8, 5]

    ranks2.run(check)


def test_a_rank_that_uses_sparse_rows_again_after_a_step_without_them_is_known_to_use_them(ranks2: RankPool) -> None:
    def check() -> None:
        table, other = torch.nn.Embedding(6, 2, sparse=True).double(), torch.nn.Linear(2, 2).double()
        hvd.broadcast_parameters(table.state_dict(), 0)
        hvd.broadcast_parameters(other.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*table.parameters(), *other.parameters()], lr=0.1))
        wanted = table.weight.detach().clone()
        for step in range(4):
            optimizer.zero_grad()
            row = torch.tensor([step])
            x = table(row) if hvd.rank() == step % 2 else torch.ones(1, 2, dtype=torch.float64)
            (x.sum() + other(torch.ones(1, 2, dtype=torch.float64)).sum()).backward()
            optimizer.step()
            wanted[step] -= 0.1 / 2
            assert_close([table.weight.detach()], [wanted])

    ranks2.run(check)


def test_ranks_whose_optimizers_have_other_orders_accumulate(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        parameters = list(model.parameters())
        order = parameters if hvd.rank() == 0 else parameters[::-1]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(order, lr=0.1), model)
        for step in range(2):
            optimizer.zero_grad()
            wanted = [a + b for a, b in zip(*(mean_gradients(model, 2, 2 * step + k) for k in range(2)), strict=True)]
            for number in range(2):
                make_loss(model, hvd.rank(), 2 * step + number).backward()
            assert_close(gradients_of(model), wanted)
            optimizer.step()

    ranks2.run(check)


@pytest.mark.parametrize("pool", ["ranks2_always", "ranks2_never", "ranks2_step", "ranks2_step_never"])
def test_sparse_gradients_that_a_rank_lacks_are_averaged_where_ranks_have_other_orders(
    request: pytest.FixtureRequest, pool: str
) -> None:
    """Ranks ask each other about two gradients of one optimizer, and about those of two optimizers of one loss."""

    def check() -> None:
        def make(seed: int) -> torch.nn.ModuleDict:
            torch.manual_seed(seed)
            names = [f"t{seed}{k}" for k in range(2)]
            return torch.nn.ModuleDict({name: torch.nn.Embedding(6, 2, sparse=True) for name in names}).double()

        models = [make(1), make(2)]
        rank = hvd.rank()
        optimizers = []
        for model in models if rank == 0 else models[::-1]:
            parameters = list(model.parameters())
            order = parameters if rank == 0 else parameters[::-1]
            optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(order, lr=0.1), model))
        extra = torch.ones(1, requires_grad=True)
        tables = [table for model in models for table in model.values()]
        wanted = [table.weight.detach().clone() for table in tables]
        for step in range(3):
            rows = torch.tensor([step])
            used = tables if rank == step % 2 else tables[1::2]  # a backward with no parameter of a model joins later
            (sum(table(rows).sum() for table in used) + extra.sum()).backward()
            for optimizer in sorted(optimizers, key=lambda item: item._reducer.membership.label):
                optimizer.step()
                optimizer.zero_grad()
            for number, value in enumerate(wanted):
                value[step] -= 0.1 if number % 2 else 0.1 / 2
            assert_close([table.weight.detach() for table in tables], wanted)

    ranks: RankPool = request.getfixturevalue(pool)
    ranks.run(check)
