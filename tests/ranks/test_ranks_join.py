"""``join``: ranks with different numbers of batches train together, and what the others can do without the joined."""

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import LeftError, interrupt
from jobs import wait_until
from rank_pool import on
from small_model import assert_close, batches, make_loss, make_model, take_step

import horo.torch as hvd
from horo.torch.engine import runtime

EPOCHS = 3


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
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, op=hvd.Adasum)
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
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, process_set=own)
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


def await_file(path: Path) -> None:
    """Until another rank, which cannot communicate, has made it; this one does so meanwhile."""

    def is_there() -> bool:
        hvd.allreduce(torch.ones(1), name="meanwhile")
        return path.exists()

    wait_until(is_there, f"{path}", 0.0)


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
            wait_until(lambda: joining._round and len(joining._round.callers) == 3, "all threads wait")  # noqa: B023
            (folder / str(turn)).touch()
            for thread in threads:
                thread.join(30)
            assert found == [1, 1, 1]
        else:
            await_file(folder / str(turn))
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


def interrupted_join() -> None:
    """A join whose wait an exception of a signal handler ends; this rank counts as joined in all its process sets."""
    joining: Any = runtime.current().joining

    def has_joined() -> bool:
        current = joining._round
        return current is not None and len(current.handles) == len(current.teams)

    interrupt(hvd.join, LeftError, has_joined)


@contextmanager
def settling_late(left: Path) -> Iterator[None]:
    """This rank, which has left a join, finds that it still waits; then all have joined, and only then it goes on."""
    current: Any = runtime.current()
    settle = current.joining.settle

    def settle_late() -> bool:
        waits: bool = settle()
        left.touch()
        for handle in current.joining._round.handles if waits else []:
            current.core.wait(handle)
        return waits

    current.joining.settle = settle_late
    try:
        yield
    finally:
        current.joining.settle = settle


def is_taken(call: Any) -> bool:
    """Whether an operation is not refused, as it is as long as others have not joined."""
    try:
        call()
    except hvd.UsageError as error:
        assert "has joined" in str(error)
        return False
    return True


@on("ranks4")
def test_no_rank_leaves_before_all_have_ended_their_joins() -> None:
    """Rank 0, which is in no set, would take its leave while rank 1 is not done with its sets."""
    for members in ([1, 2], [1, 3], [2, 3], [1, 2, 3]):
        hvd.add_process_set(members)
    core: Any = runtime.current().core
    if hvd.rank() == 1:
        start = core.start_join

        def slow(team: int, buffer: Any) -> int:
            if team:
                time.sleep(0.1)
            handle: int = start(team, buffer)
            return handle

        core.start_join = slow
    if hvd.rank():
        for _ in range(5):
            hvd.allreduce(torch.ones(1), name="x")
    assert hvd.join() > 0
    hvd.shutdown()
    hvd.init()


@pytest.mark.parametrize("kind", ["named", "unnamed", "optimizer", "process set"])
@on("ranks4")
def test_a_join_that_was_left_ends_with_the_next_operation(tmp_path: Path, kind: str) -> None:
    """What comes then counts anew on all ranks, and the next join is another one."""
    left = tmp_path
    optimizers = []

    def operate() -> None:
        if kind == "named":
            hvd.allreduce(torch.ones(1), name="n")
        elif kind == "unnamed":
            hvd.allreduce(torch.ones(1))
        elif kind == "process set":
            hvd.remove_process_set(hvd.add_process_set([0, 1]))
        else:
            model = make_model()
            optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
            make_loss(model, hvd.rank(), 0).backward()

    beside = hvd.add_process_set([1, 2]) if kind == "unnamed" else None
    for epoch in range(3):
        if hvd.rank() == 0:
            interrupted_join()
            (left / str(epoch)).touch()
            wait_until(lambda: is_taken(operate), "the others have joined", 0.0)
        else:
            for _ in range(3):
                hvd.allreduce(torch.ones(1))
            await_file(left / str(epoch))
            hvd.join()
            operate()
        assert hvd.allgather_object(epoch) == [epoch] * 4
        if hvd.rank() != 0:
            for _ in range(5):
                hvd.allreduce(torch.ones(1), name="g")
        assert hvd.join() in (1, 2, 3)
    if beside is not None:
        hvd.remove_process_set(beside)


@on("ranks4")
def test_nothing_is_submitted_between_the_joins_of_all_and_the_end_of_the_round(tmp_path: Path) -> None:
    """Rank 0 finds that it still waits, and then all have joined before it submits. The others wait for its end."""
    left = tmp_path / "left"
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        interrupted_join()
        with settling_late(left), pytest.raises(hvd.UsageError, match=r"'allreduce.x': rank 0 has joined"):
            hvd.allreduce(torch.ones(1), name="x")
    else:
        await_file(left)
        hvd.join()
    assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == 4
    hvd.remove_process_set(pair)


@on("ranks2_in_each_order")
def test_a_backward_in_which_all_have_joined_is_one_after_the_round(tmp_path: Path) -> None:
    """Rank 0 finds that it still waits when its backward begins, and then all have joined before it submits."""
    left = tmp_path / "left"
    models = [make_model() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    make_loss(models[0], hvd.rank(), 0).backward()
    optimizers[0].step()  # the gradients of one have names, which count anew after the round
    if hvd.rank() == 0:
        interrupted_join()
    else:
        await_file(left)
        hvd.join()
    with settling_late(left) if hvd.rank() == 0 else nullcontext():
        make_loss(models[1], hvd.rank(), 0).backward()
        optimizers[1].step()
    parameters = [parameter.tolist() for parameter in models[1].parameters()]
    assert hvd.allgather_object(parameters) == [parameters] * 2


@pytest.mark.parametrize("op", ["Average", "Adasum"])
@on("ranks2")
def test_a_rank_that_waits_may_step_alone(tmp_path: Path, op: str) -> None:
    """An optimizer of a process set that this rank is no member of sends nothing."""
    left = tmp_path / "left"
    other = hvd.add_process_set([1])
    if hvd.rank() == 0:
        interrupted_join()
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, op=getattr(hvd, op), process_set=other)
        make_loss(model, 0, 0).backward()
        optimizer.step()
        left.touch()
    else:
        await_file(left)
    hvd.join()
    hvd.remove_process_set(other)


@on("ranks2")
def test_an_exception_at_the_end_of_a_join_leaves_no_round_behind() -> None:
    current: Any = runtime.current()
    if hvd.rank() == 0:
        restart = current.restart_names

        def interrupted() -> None:
            current.restart_names = restart
            raise LeftError

        current.restart_names = interrupted
        with pytest.raises(LeftError):
            hvd.join()
    for _ in range(2):
        assert hvd.join() in (0, 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@on("ranks2")
def test_an_optimizer_made_after_a_join_has_missed_no_step() -> None:
    """So parameters that differ are a forgotten broadcast."""
    hvd.join()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(hvd.UsageError, match=r"is not equal on all ranks before the first step"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
