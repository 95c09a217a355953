"""``join``: ranks with different numbers of batches train together, and what the others can do without the joined."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupt
from rank_pool import on
from small_model import assert_close, make_loss, make_model, take_step

import horo.torch as hvd
from horo.torch.engine import runtime

EPOCHS = 3


def batches(rank: int, size: int, epoch: int) -> int:
    """Each rank has another number, in another order in each epoch; one has none."""
    return (rank + epoch) % size * 2


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(model: torch.nn.Module, size: int, loss: Callable[..., torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The arithmetic in one process: gradients of ranks that have joined are zeros in the average over all ranks.

    Gives the parameters after each epoch, of the rank that has joined last.
    """
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        for step in range(max(batches(rank, size, epoch) for rank in range(size))):
            optimizer.zero_grad()
            there = [rank for rank in range(size) if batches(rank, size, epoch) > step]
            torch.stack([loss(model, rank, 10 * epoch + step) for rank in there]).sum().div(size).backward()
            optimizer.step()
        yield [parameter.detach().clone() for parameter in model.parameters()]


def together(model: torch.nn.Module, loss: Callable[..., torch.Tensor], **options: Any) -> Iterator[list[torch.Tensor]]:
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    rank, size = hvd.rank(), hvd.size()
    for epoch in range(EPOCHS):
        for step in range(batches(rank, size, epoch)):
            optimizer.zero_grad()
            loss(model, rank, 10 * epoch + step).backward()
            optimizer.step()
        last = hvd.join()
        assert batches(last, size, epoch) == max(batches(rank, size, epoch) for rank in range(size))
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
        yield [parameter.detach().clone() for parameter in model.parameters()]


def compare(model: torch.nn.Module, loss: Callable[..., torch.Tensor], **options: Any) -> None:
    wanted = alone(copy.deepcopy(model), hvd.size(), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found, right in zip(together(model, loss, **options), wanted, strict=True):
            assert_close(found, right)


# ---- Training ----


@on("ranks2_in_each_order")
def test_ranks_with_uneven_data_train_as_the_arithmetic_says() -> None:
    compare(make_model(), make_loss)


@on("ranks4")
def test_gradients_meet_after_a_join_whatever_optimizers_were_there_before_it() -> None:
    """Their names have numbers before it, and others after it, which ranks without a batch before it have alone."""
    for _ in range(2):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        take_step(model, optimizer, 0)
    compare(make_model(), make_loss, groups=1)


class Parts(torch.nn.Module):
    """Parts of which some ranks use some in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 3) for _ in range(4)).double()


def loss_of_parts(model: Any, rank: int, step: int) -> torch.Tensor:
    used = [0, *([1] if step % 2 else []), *([2] if rank == 1 else []), *([3] if step % 3 == rank else [])]
    data = torch.arange(8, dtype=torch.float64).view(2, 4) + rank + step % 7
    loss = torch.zeros((), dtype=torch.float64)
    return loss + sum(model.parts[index](data).square().mean() / 50 for index in used)


@on("ranks4_in_backward")
def test_parameters_that_only_some_ranks_use() -> None:
    compare(Parts(), loss_of_parts)


@on("ranks2_in_backward")
def test_sparse_gradients() -> None:
    """Those of a rank that has joined have no rows."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(9, 3, sparse=True).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    expected = model.weight.detach().clone()
    for step in range(3 if hvd.rank() == 0 else 1):
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank(), 2])).sum().backward()
        optimizer.step()
        for rank in [0, 1] if step == 0 else [0]:
            expected[rank] -= 0.25
            expected[2] -= 0.25
        torch.testing.assert_close(model.weight.detach(), expected)
    assert hvd.join() == 0


@on("ranks2")
def test_adasum_of_steps_goes_on_with_those_that_are_left() -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), op=hvd.Adasum
    )
    for _ in range(3 if hvd.rank() == 1 else 1):
        optimizer.zero_grad()
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()  # parallel steps are averaged, and the last two are those of rank 1 alone
    assert hvd.join() == 1
    steps = 3 if hvd.rank() == 1 else 1
    assert_close([model.weight.detach()], [torch.full((1, 2), 1 - 0.5 * steps, dtype=torch.float64)])


@on("ranks2")
def test_who_goes_on_with_an_older_model_is_warned() -> None:
    """Horovod says nothing of it, so it is no error."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        take_step(model, optimizer, number)

    step(0)
    if hvd.rank() == 0:
        step(1)
    hvd.join()
    with pytest.warns(UserWarning, match=r"is not equal on all ranks after join\(\).*broadcast_parameters"):
        step(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(3)
    hvd.join()


@on("ranks4")
def test_an_optimizer_over_a_process_set() -> None:
    """All sets of a rank are joined: each goes on with those of its members that have not."""
    odd, even = hvd.add_process_set([1, 3]), hvd.add_process_set([0, 2])
    own = odd if odd.included() else even
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=own
    )
    first = hvd.rank() in {0, 1}
    for step in range(1 if first else 3):
        optimizer.zero_grad()
        model(torch.full((1, 1), 2.0, dtype=torch.float64)).sum().backward()
        optimizer.step()
        wanted = -2.0 - (step * 1.0)  # the gradient is 2, its average with that of a joined rank 1
        assert model.weight.item() == wanted, (step, model.weight)
    assert hvd.join() in {2, 3}
    hvd.remove_process_set(odd)
    hvd.remove_process_set(even)


# ---- Single operations ----


@on("ranks4")
def test_the_last_rank_is_told_and_unnamed_operations_meet_again() -> None:
    """Ranks that joined early have counted fewer of them."""
    rank, size = hvd.rank(), hvd.size()
    for epoch in range(3):
        ends = [(r + epoch) % size for r in range(size)]
        for step in range(ends[rank]):
            there = [r for r in range(size) if ends[r] > step]
            assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum).item() == sum(there)
            assert hvd.allgather(torch.tensor([rank])).tolist() == there
        assert hvd.join(device=0) == ends.index(size - 1)
        assert hvd.allreduce(torch.ones(1)).item() == 1.0


@on("ranks4")
def test_everything_that_makes_sense_goes_on_without_a_joined_rank() -> None:
    rank = hvd.rank()
    if rank != 0:
        three = [1, 2, 3]
        hvd.barrier()
        assert hvd.allgather_object(f"rank {rank}") == [f"rank {r}" for r in three]
        assert hvd.broadcast_object(rank, root_rank=2) == 2
        assert hvd.broadcast(torch.tensor(rank), root_rank=3).item() == 3
        assert hvd.allreduce(torch.tensor([-rank]), op=hvd.Max).item() == -1
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Min).item() == 1
        assert hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Product).item() == 6.0
        assert hvd.allreduce(torch.tensor([4.0])).item() == 3.0
        sums = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
        assert [each.tolist() for each in sums] == [[3.0] * 2, [3] * 3]
        row = torch.sparse_coo_tensor([[rank]], [1.0], (4,))
        total = hvd.sparse_allreduce_async(row, name="rows", op=hvd.Sum)()
        assert total.to_dense().tolist() == [0.0, 1.0, 1.0, 1.0]
        layer = hvd.SyncBatchNorm(1, momentum=1.0)
        layer(torch.tensor([[float(rank)], [float(rank)]]))
        assert layer.running_mean is not None
        assert layer.running_mean.item() == pytest.approx(2.0)
        hvd.average_buffers(layer)
        assert layer.running_mean.item() == pytest.approx(2.0)
        x = torch.tensor([float(rank)], requires_grad=True)
        hvd.allreduce(x, op=hvd.Min).sum().backward()
        assert x.grad.item() == (3.0 if rank == 1 else 0.0)
        model = torch.nn.Linear(2, 2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert hvd.join() in {1, 2, 3}
    assert hvd.allgather_object(rank) == [0, 1, 2, 3]


@on("ranks4")
def test_what_no_rank_can_do_for_another_is_an_error_and_the_job_goes_on() -> None:
    pair = hvd.add_process_set([1, 2])
    calls: dict[str, Callable[[], Any]] = {
        "reducescatter .*rank 0 has joined": lambda: hvd.reducescatter(torch.ones(4)),
        "alltoall .*rank 0 has joined": lambda: hvd.alltoall(torch.ones(4)),
        "broadcast .*rank 0, has joined": lambda: hvd.broadcast(torch.ones(4), root_rank=0),
        "broadcast_object.*rank 0, has joined": lambda: hvd.broadcast_object(1, root_rank=0),
        "min.* prescale": lambda: hvd.allreduce(torch.ones(1), op=hvd.Min, prescale_factor=0.5),
        "add_process_set: rank 0 has joined": lambda: hvd.add_process_set([0, 3]),
        "remove_process_set: rank 0 has joined": lambda: hvd.remove_process_set(pair),
    }
    if hvd.rank() != 0:
        for pattern, call in calls.items():
            with pytest.raises(hvd.MismatchError, match=pattern):
                call()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
    hvd.join()
    hvd.remove_process_set(pair)
    again = hvd.add_process_set([0, 3])
    hvd.remove_process_set(again)


# ---- Waiting ----


@on("ranks2")
def test_an_interrupted_join_goes_on_when_it_is_called_again(tmp_path: Path) -> None:
    done = tmp_path / "done"

    class StopError(Exception):
        pass

    if hvd.rank() == 0:
        joining = runtime.current().joining
        for _ in range(3):
            interrupt(hvd.join, StopError, lambda: joining._round is not None and bool(joining._round.handles))
            with pytest.raises(hvd.UsageError, match=r"rank 0 has joined"):
                hvd.allreduce(torch.ones(1), name="refused")
        done.touch()
    else:
        await_file(done, lambda: hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum))
    assert hvd.join() == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


def await_file(path: Path, meanwhile: Callable[[], Any]) -> None:
    """Until another rank, which cannot communicate, has made it."""
    end = time.monotonic() + 50
    while not path.exists():
        meanwhile()
        assert time.monotonic() < end


@on("ranks2")
def test_threads_of_a_rank_wait_for_one_round(tmp_path: Path) -> None:
    folder = tmp_path
    for turn in range(10):
        found: list[int] = []
        if hvd.rank() == 0:
            threads = [threading.Thread(target=lambda: found.append(hvd.join())) for _ in range(3)]  # noqa: B023
            for thread in threads:
                thread.start()
            joining = runtime.current().joining
            while joining._round is None or len(joining._round.callers) < len(threads):
                time.sleep(0.001)
            (folder / str(turn)).touch()
            for thread in threads:
                thread.join(30)
            assert found == [1, 1, 1]
        else:
            await_file(folder / str(turn), lambda: hvd.allreduce(torch.ones(1), name="x"))
            assert hvd.join() == 1


@on("ranks2")
def test_another_job_begins_without_those_who_had_joined() -> None:
    if hvd.rank() == 0:
        with pytest.raises(hvd.AbortedError, match=r"rank 1 .*has shut horo down"):
            hvd.join()
        with pytest.raises(hvd.AbortedError):
            hvd.join()
    else:
        hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    assert hvd.join() in {0, 1}
