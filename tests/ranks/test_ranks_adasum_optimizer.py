"""``DistributedOptimizer(op=hvd.Adasum)``: each rank steps by itself, and Adasum combines the steps."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adasum_oracle import adasum
from interrupts import interrupt
from jobs import wait_until
from rank_pool import RankPool
from small_model import FailingSgd, needs_cpu_scaler

import horo.torch as hvd
from horo.errors import DeadlockError, GroupError, HoroError, UnsupportedError, UsageError
from horo.torch.optimizer import adasum as _delta_reducer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def _model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def _batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def _step(model: torch.nn.Module, optimizer: Any, rank: int, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(_batch(rank, step)).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _expected(make: Callable[[Any], torch.optim.Optimizer], ranks: list[int], steps: int) -> list[torch.Tensor]:
    """One process plays all ranks: copies of the model step apart, and the oracle combines their steps."""
    models = [_model() for _ in ranks]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(steps):
        starts = [parameter.detach().clone() for parameter in models[0].parameters()]
        for model, optimizer, rank in zip(models, optimizers, ranks, strict=True):
            _step(model, optimizer, rank, step)
        with torch.no_grad():
            for start, *moved in zip(starts, *(model.parameters() for model in models), strict=True):
                # Lists: torch before 2.3 knows no array of numpy 2.
                deltas = [np.array((parameter - start).flatten().tolist()) for parameter in moved]
                result = start + torch.tensor(adasum(deltas).tolist(), dtype=torch.float64).view_as(start)
                for parameter in moved:
                    parameter.copy_(result)
    return [parameter.detach() for parameter in models[0].parameters()]


def _assert_equal_on_all(model: torch.nn.Module) -> None:
    told = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
    assert all(each == told[0] for each in told)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_the_oracle_of_the_steps_of_all_ranks(ranks: RankPool, kind: str) -> None:
    def check(kind: str) -> None:
        model = _model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[kind](model.parameters()), named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        for step in range(4):
            _step(model, optimizer, hvd.rank(), step)
            _assert_equal_on_all(model)
        for parameter, wanted in zip(
            model.parameters(), _expected(OPTIMIZERS[kind], list(range(hvd.size())), 4), strict=True
        ):
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-12)

    ranks.run(check, kind)


def test_several_passes_scheduler_state_and_a_deep_copy(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum, backward_passes_per_step=2
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                with optimizer.no_sync():
                    model(_batch(hvd.rank(), 10 * step + part)).square().mean().backward()
            optimizer.synchronize()
            assert model[0].weight.grad.tolist() != hvd.broadcast(model[0].weight.grad, 1).tolist() or hvd.rank() == 1
            optimizer.step()
            scheduler.step()
            _assert_equal_on_all(model)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        twin, its_optimizer = copy.deepcopy((model, optimizer))
        for trained, using in ((model, optimizer), (twin, its_optimizer)):
            _step(trained, using, hvd.rank(), 7)
            _assert_equal_on_all(trained)
        for own, others in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(own, others)
        optimizer.set_backward_passes_per_step(3)
        assert optimizer.backward_passes_per_step == 3
        with pytest.raises(AssertionError, match=r"Skipping synchronization is not supported when using Adasum"):
            optimizer.skip_synchronize()

    ranks2.run(check)


def test_frozen_unused_new_and_sparse_parameters(ranks2: RankPool) -> None:
    def check() -> None:
        torch.manual_seed(1)
        model = torch.nn.ModuleDict(
            {
                "table": torch.nn.Embedding(6, 3, sparse=True),
                "used": torch.nn.Linear(3, 2),
                "rarely": torch.nn.Linear(3, 2),
                "never": torch.nn.Linear(3, 2),
                "frozen": torch.nn.Linear(3, 2).requires_grad_(False),
                "later": torch.nn.Linear(2, 2),
            }
        )
        later = list(model["later"].parameters())
        first = [p for name, p in model.named_parameters() if not name.startswith("later")]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(first, lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
        )
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": later})
            rows = model["table"](torch.tensor([hvd.rank(), 2]))
            out = model["used"](rows) + model["frozen"](rows)
            if step >= 2:
                out = model["later"](out)
            if hvd.rank() == 0:
                out = out + model["rarely"](rows)
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            _assert_equal_on_all(model)
        moved = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert moved == {"table", "used", "rarely", "later"}
        assert model["never"].weight.grad is None

    ranks2.run(check)


def test_it_travels_compressed_and_by_a_compressor_of_ones_own(ranks2: RankPool) -> None:
    def check() -> None:
        class Halved(hvd.Compression.none):  # type: ignore[name-defined, misc]
            @staticmethod
            def compress(tensor: torch.Tensor) -> Any:
                return tensor / 2, 2

            @staticmethod
            def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
                return tensor * ctx

        results = []
        for compression in (hvd.Compression.none, hvd.Compression.bf16, hvd.Compression.fp16, Halved):
            model = _model()
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS["sgd"](model.parameters()), compression=compression, op=hvd.Adasum
            )
            _step(model, optimizer, hvd.rank(), 0)
            _assert_equal_on_all(model)
            results.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
        plain, bf16, fp16, halved = results
        start = torch.nn.utils.parameters_to_vector(_model().parameters()).detach()
        most = (plain - start).abs().max().item()
        assert 0 < (bf16 - plain).abs().max().item() < most / 64
        assert 0 < (fp16 - plain).abs().max().item() < most / 500
        torch.testing.assert_close(halved, plain, rtol=1e-12, atol=1e-14)

    ranks2.run(check)


def test_the_members_of_a_process_set_step_together_and_others_alone(ranks: RankPool) -> None:
    def check() -> None:
        members = [0, 3] if hvd.size() > 2 else [0]  # a set of all ranks is there already
        part = hvd.add_process_set(members)
        model = _model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum, process_set=part)
        for step in range(3):
            _step(model, optimizer, hvd.rank(), step)
        together = members if hvd.rank() in members else [hvd.rank()]
        for parameter, wanted in zip(model.parameters(), _expected(OPTIMIZERS["sgd"], together, 3), strict=True):
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-12)
        hvd.remove_process_set(part)
        with pytest.raises(UsageError, match="has not been registered"):
            _step(model, optimizer, hvd.rank(), 9)

    ranks.run(check)


def test_two_optimizers_over_models_with_equal_names(ranks2: RankPool) -> None:
    def check() -> None:
        models = [_model(seed) for seed in range(2)]
        optimizers = [
            hvd.DistributedOptimizer(OPTIMIZERS["sgd"](m.parameters()), named_parameters=m, op=op)
            for m, op in zip(models, (hvd.Adasum, hvd.Average), strict=True)
        ]
        for step, (model, optimizer) in itertools.product(range(2), zip(models, optimizers, strict=True)):
            _step(model, optimizer, hvd.rank(), step)
            _assert_equal_on_all(model)

    ranks2.run(check)


def test_ranks_that_begin_apart_are_told(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model(hvd.rank())
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), named_parameters=model, op=hvd.Adasum
        )
        before = model[0].weight.detach().clone()
        with pytest.raises(
            UsageError, match=r"parameter '0\.(weight|bias)' is not equal on all ranks before the first"
        ):
            _step(model, optimizer, hvd.rank(), 0)
        assert torch.equal(model[0].weight, before)
        hvd.broadcast_parameters(model.state_dict(), 0)
        _step(model, optimizer, hvd.rank(), 0)
        _assert_equal_on_all(model)

    ranks2.run(check)


@needs_cpu_scaler
def test_a_grad_scaler_is_refused(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model().float()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(_batch(0, 0).float()).square().mean()).backward()
        with pytest.raises(UnsupportedError, match="a GradScaler skips the steps of one rank alone"):
            scaler.step(optimizer)

    ranks2.run(check)


def test_a_step_that_one_rank_leaves_out_is_an_error_and_parameters_stand_where_they_were() -> None:
    def check() -> None:
        model = _model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), named_parameters=model, op=hvd.Adasum
        )
        _step(model, optimizer, hvd.rank(), 0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises((DeadlockError, GroupError)):
            if hvd.rank() == 0:
                _step(model, optimizer, 0, 1)
            else:
                hvd.allreduce(torch.ones(1), name="loss")
        for parameter, start in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, start)
        with pytest.raises(GroupError):  # the group has ended: the next call says why, and changes nothing either
            _step(model, optimizer, hvd.rank(), 1)
        for parameter, start in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, start)

    pool = RankPool(2, environment={"HORO_DEADLOCK_TIME_SECONDS": "1"})
    try:
        pool.run(check)
    finally:
        pool.close()


class _Around(torch.optim.SGD):
    """Moves parameters before and after the step of its base class, by other amounts on each rank."""

    def step(self, closure: Any = None) -> Any:
        for amount in (0.01, 0.02):
            if amount == 0.02:
                super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(amount * (1 + hvd.rank()) * parameter.grad)


def test_the_step_of_a_base_class_is_a_part_of_that_of_its_subclass(ranks2: RankPool) -> None:
    def check() -> None:
        model = _model()
        torch.optim.SGD(_model().parameters(), lr=0.1)  # torch has hooks around a step from its first optimizer on
        optimizer = hvd.DistributedOptimizer(_Around(model.parameters(), lr=0.1), model, op=hvd.Adasum)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()  # by 0.13 and 0.16, in the same direction: their mean
        _assert_equal_on_all(model)
        _assert_equal(model.parameters(), [parameter - 0.145 for parameter in start])
        _step(model, optimizer, hvd.rank(), 1)
        _assert_equal_on_all(model)

    ranks2.run(check)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _assert_equal(parameters: Any, expected: list[torch.Tensor]) -> None:
    for parameter, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_a_step_whose_optimizer_raises_is_done_when_it_is_called_again(ranks2: RankPool) -> None:
    def check() -> None:
        model, rank = _model(), hvd.rank()
        inner = FailingSgd(model.parameters(), at=2 if rank == 0 else 0)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=model, op=hvd.Adasum)
        _step(model, optimizer, rank, 0)
        if rank == 0:
            with pytest.raises(RuntimeError, match="in the middle of a step"):
                _step(model, optimizer, rank, 1)
            optimizer.step()
        else:
            _step(model, optimizer, rank, 1)
        _step(model, optimizer, rank, 2)
        _assert_equal_on_all(model)
        _assert_equal(model.parameters(), _expected(_sgd, [0, 1], 3))

    ranks2.run(check)


def test_a_closure_that_raises_leaves_parameters_where_they_were(ranks2: RankPool) -> None:
    def check() -> None:
        model, rank = _model(), hvd.rank()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), named_parameters=model, op=hvd.Adasum
        )
        _step(model, optimizer, rank, 0)
        if rank == 0:
            before, calls = [parameter.detach().clone() for parameter in model.parameters()], []

            def closure() -> torch.Tensor:
                calls.append(1)
                if len(calls) == 2:
                    moved = [not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
                    assert any(moved)
                    raise KeyError("no such batch")
                optimizer.zero_grad()
                loss = model(_batch(rank, 1)).square().mean()
                loss.backward()
                return loss

            with pytest.raises(KeyError, match="no such batch"):
                optimizer.step(closure)
            _assert_equal(model.parameters(), before)
        _step(model, optimizer, rank, 1)
        _assert_equal_on_all(model)
        _step(model, optimizer, rank, 2)
        _assert_equal_on_all(model)

    ranks2.run(check)


def test_what_is_loaded_after_a_step_that_has_raised_is_not_undone(ranks2: RankPool) -> None:
    def check() -> None:
        model, rank = _model(), hvd.rank()
        inner = FailingSgd(model.parameters(), at=1)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=model, op=hvd.Adasum)
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            _step(model, optimizer, rank, 0)
        model.load_state_dict(_model(seed=1).state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        start = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()  # equal steps of all ranks: their mean
        _assert_equal(model.parameters(), [parameter - 0.1 for parameter in start])

    ranks2.run(check)


class _Stop(HoroError):
    """So that it is told apart from errors of the exchange."""


def test_a_step_that_is_interrupted_is_ended_by_the_next_call(ranks2: RankPool, tmp_path: Path) -> None:
    def check(flag: Path) -> None:
        model, rank = _model(), hvd.rank()
        optimizer: Any = hvd.DistributedOptimizer(_sgd(model.parameters()), named_parameters=model, op=hvd.Adasum)
        _step(model, optimizer, rank, 0)
        reducer = optimizer._reducer

        def is_sent() -> bool:
            return 0 < len(reducer._requests) == len(reducer._starts)

        if rank == 0:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            interrupt(lambda: _step(model, optimizer, rank, 1), _Stop, is_sent)
            _assert_equal(model.parameters(), before)
            flag.touch()
            _step(model, optimizer, rank, 1)
        else:
            wait_until(flag.exists, "rank 0 is interrupted", deadline_s=60)
            _step(model, optimizer, rank, 1)
        _assert_equal_on_all(model)
        _assert_equal(model.parameters(), _expected(_sgd, [0, 1], 2))
        _step(model, optimizer, rank, 2)
        _assert_equal_on_all(model)
        _assert_equal(model.parameters(), _expected(_sgd, [0, 1], 3))

    ranks2.run(check, tmp_path / "interrupted")


@pytest.mark.parametrize("error", [HoroError, UsageError])
def test_an_error_of_a_signal_handler_before_the_submission_is_no_refusal(
    ranks2: RankPool, error: type[HoroError]
) -> None:
    def check(error: type[HoroError]) -> None:
        model, rank = _model(), hvd.rank()
        optimizer: Any = hvd.DistributedOptimizer(_sgd(model.parameters()), named_parameters=model, op=hvd.Adasum)
        if rank == 0:
            numbers, start = itertools.count(), _delta_reducer.start_allreduce

            def interrupted(*args: Any, **named: Any) -> Any:
                if next(numbers) == 2:
                    raise error
                return start(*args, **named)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_delta_reducer, "start_allreduce", interrupted)
                with pytest.raises(error):
                    _step(model, optimizer, rank, 0)
        for step in range(2):
            _step(model, optimizer, rank, step)
        _assert_equal_on_all(model)

    ranks2.run(check, error)


def test_what_is_loaded_after_an_interrupted_exchange_is_not_undone(ranks2: RankPool, tmp_path: Path) -> None:
    def check(flag: Path) -> None:
        model, rank = _model(), hvd.rank()
        optimizer: Any = hvd.DistributedOptimizer(_sgd(model.parameters()), named_parameters=model, op=hvd.Adasum)
        reducer = optimizer._reducer
        _step(model, optimizer, rank, 1)
        if rank == 0:
            interrupt(
                lambda: _step(model, optimizer, rank, 2),
                _Stop,
                lambda: 0 < len(reducer._requests) == len(reducer._starts),
            )
            flag.touch()
        else:
            wait_until(flag.exists, "rank 0 is interrupted", deadline_s=60)
            _step(model, optimizer, rank, 2)
        model.load_state_dict(_model().state_dict())
        for step in range(2):
            _step(model, optimizer, rank, step)
        _assert_equal_on_all(model)
        _assert_equal(model.parameters(), _expected(_sgd, [0, 1], 2))

    ranks2.run(check, tmp_path / "loaded")


def test_a_later_job_goes_on_with_the_same_optimizer() -> None:
    def check() -> None:
        model = _model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=hvd.Adasum)
        _step(model, optimizer, hvd.rank(), 0)
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
        _step(model, optimizer, hvd.rank(), 1)
        _assert_equal_on_all(model)

    pool = RankPool(2)
    try:
        pool.run(check)
    finally:
        pool.close()
