"""Process sets: some ranks among themselves, several sets at once, optimizers over them; on one host and several."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rank_pool import on, on_own
from small_model import assert_close, make_batch, make_loss, make_model, take_step, take_steps

import horo.torch as hvd
from horo.errors import MismatchError, UsageError

SETS = [[0, 1], [2, 3], [0, 2], [1, 2, 3], [3]]


def ranks_sum(ranks: list[int]) -> float:
    return sum(rank + 1.0 for rank in ranks)


@contextmanager
def members_of(*ranks: int) -> Iterator[hvd.ProcessSet]:
    """A process set that there is inside."""
    members = hvd.add_process_set(list(ranks))
    yield members
    hvd.barrier()
    hvd.remove_process_set(members)


@on("four")
def test_every_operation_concerns_the_members_only() -> None:
    def operations(members: Any, ranks: list[int], shift: int) -> None:
        own, count = float(hvd.rank() + 1), len(ranks)
        for name in (None, "named", "named"):  # twice: as a new request and as a repeated one
            tensor = torch.full((5,), own)
            assert hvd.allreduce(tensor, process_set=members, name=name).tolist() == [ranks_sum(ranks) / count] * 5
            assert hvd.allreduce_(tensor, op=hvd.Sum, process_set=members, name=name).tolist() == [ranks_sum(ranks)] * 5
            handle = hvd.allreduce_async(torch.full((3,), own), op=hvd.Max, process_set=members, name=name)
            assert hvd.synchronize(handle).tolist() == [max(ranks) + 1.0] * 3
            grouped = hvd.grouped_allreduce(
                [torch.full((2,), own), torch.full((2,), int(own))], op=hvd.Min, process_set=members, name=name
            )
            assert [item.tolist() for item in grouped] == [[min(ranks) + 1.0] * 2, [min(ranks) + 1] * 2]
            rows = torch.full((hvd.rank() + 1, 2), own)
            gathered = hvd.allgather(rows, process_set=members, name=name)
            assert gathered[:, 0].tolist() == [rank + 1.0 for rank in ranks for _ in range(rank + 1)]
            rows = torch.full((2 * count + 1, 2), own)
            mine = 3 if ranks[0] == hvd.rank() else 2  # the first member has the row that is left over
            scattered = hvd.reducescatter(rows, op=hvd.Sum, process_set=members, name=name)
            assert scattered.tolist() == [[ranks_sum(ranks)] * 2] * mine
            blocks = torch.tensor([10 * hvd.rank() + other for other in ranks for _ in range(other + 1)])
            got, received = hvd.alltoall(blocks, [other + 1 for other in ranks], name, members)
            assert got.tolist() == [10 * rank + hvd.rank() for rank in ranks for _ in range(hvd.rank() + 1)]
            assert received.tolist() == [hvd.rank() + 1] * count
            for root in ranks:
                sent = hvd.broadcast(torch.full((4,), own), root, process_set=members, name=name)
                assert sent.tolist() == [root + 1.0] * 4
            tensor = torch.full((shift + 70_000,), own)
            hvd.broadcast_(tensor, ranks[-1], process_set=members, name=name)
            assert set(tensor.tolist()) == {ranks[-1] + 1.0}
            hvd.barrier(process_set=members)
            assert hvd.broadcast_object({"of": hvd.rank()}, ranks[-1], name, members) == {"of": ranks[-1]}
            assert hvd.allgather_object("x" * hvd.rank(), name, members) == ["x" * rank for rank in ranks]

    added = [hvd.add_process_set(ranks) for ranks in SETS]
    assert [members.process_set_id for members in added] == list(range(1, len(SETS) + 1))
    for shift, (members, ranks) in enumerate(zip(added, SETS, strict=True)):
        if members.included():
            assert members.rank() == ranks.index(hvd.rank())
            operations(members, ranks, shift)
    operations(hvd.global_process_set, [0, 1, 2, 3], 0)
    for members in reversed(added):
        assert hvd.remove_process_set(members)
        assert members.process_set_id is None
        assert not hvd.remove_process_set(members)


@on("four")
def test_a_set_waits_neither_for_other_ranks_nor_for_other_sets() -> None:
    """Rank 0 is in the barrier of all, rank 1 in an operation of a set whose other member has not come."""
    pair, work = hvd.add_process_set([1, 3]), hvd.add_process_set([2, 3])
    if hvd.rank() == 1:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    if work.included():
        for size in (1, 1000, 300_000):
            for _ in range(20):
                assert hvd.allreduce(torch.ones(size), op=hvd.Sum, process_set=work)[-1].item() == 2
    if hvd.rank() == 3:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    hvd.barrier()
    assert hvd.remove_process_set(pair)
    assert hvd.remove_process_set(work)


@on("four")
def test_gradients_follow_the_operations_of_a_set() -> None:
    def gradient(call: Callable[[torch.Tensor], Any], rows: int = 2) -> list[float]:
        tensor = torch.full((rows, 2), float(hvd.rank()), requires_grad=True)
        (call(tensor) * (hvd.rank() + 1)).sum().backward()  # losses weigh 2 + 3 + 4
        assert tensor.grad is not None
        return tensor.grad[:, 0].tolist()

    with members_of(1, 2, 3) as members:
        if not members.included():
            return
        is_least, is_middle, is_most = (hvd.rank() == rank for rank in (1, 2, 3))
        for op, wanted in (
            (hvd.Sum, 9.0),
            (hvd.Average, 3.0),
            (hvd.Max, 9.0 * is_most),
            (hvd.Min, 9.0 * is_least),
            (hvd.Product, 9.0 * 6 / hvd.rank()),
        ):
            found = gradient(lambda given, op=op: hvd.allreduce(given, op=op, process_set=members))
            assert found == pytest.approx([wanted] * 2)
        for op, factor in ((hvd.Average, 1.0), (hvd.Sum, 3.0), (hvd.Max, 3.0 * is_most)):
            found = gradient(lambda given, op=op: hvd.reducescatter(given, op=op, process_set=members), rows=3)
            assert found == [2.0 * factor, 3.0 * factor, 4.0 * factor]
        assert gradient(lambda given: hvd.broadcast(given, 2, process_set=members)) == [3.0 * is_middle] * 2
        weights = torch.arange(6.0).reshape(6, 1)  # 1 + 2 + 3 rows
        found = gradient(lambda given: hvd.allgather(given, process_set=members) * weights, rows=hvd.rank())
        first = {1: 0, 2: 1, 3: 3}[hvd.rank()]
        assert found == pytest.approx([3.0 * (first + row) for row in range(hvd.rank())])


@on("four")
def test_what_does_not_fit_is_refused_and_the_job_goes_on() -> None:
    members = hvd.add_process_set([2, 1])
    assert members.ranks == [1, 2]
    assert str(members) == "ProcessSet(process_set_id=1, ranks=[1, 2], mpi_comm=None)"
    with pytest.raises(ValueError, match=r"^Attempted to add a duplicate process set: ProcessSet\(.*=\[1, 2\]"):
        hvd.add_process_set([1, 2])
    with pytest.raises(ValueError, match="has a rank that a job of 4 ranks does not have"):
        hvd.add_process_set([1, 4])
    other = hvd.ProcessSet([0, 1])
    calls = [
        lambda given: hvd.allreduce(torch.ones(1), process_set=given),
        lambda given: hvd.allreduce_async_(torch.ones(1), process_set=given),
        lambda given: hvd.grouped_allreduce([torch.ones(1)], process_set=given),
        lambda given: hvd.allgather(torch.ones(1), process_set=given),
        lambda given: hvd.grouped_allgather_async([torch.ones(1)], process_set=given),
        lambda given: hvd.broadcast(torch.ones(1), 1, process_set=given),
        lambda given: hvd.reducescatter(torch.ones(4), process_set=given),
        lambda given: hvd.alltoall(torch.ones(4), process_set=given),
        lambda given: hvd.barrier(process_set=given),
        lambda given: hvd.broadcast_object(1, 1, process_set=given),
        lambda given: hvd.allgather_object(1, process_set=given),
    ]
    for call in calls:
        unknown = "Process set provided does not exist, or has not been registered."
        with pytest.raises(ValueError, match=rf"{unknown} ProcessSet\(process_set_id=None, "):
            call(other)
        if not members.included():
            with pytest.raises(ValueError, match=f"Rank {hvd.rank()} is not a member of the provided process set"):
                call(members)
    if members.included():
        with pytest.raises(ValueError, match=r"^broadcast received invalid root rank 0 for provided process set"):
            hvd.broadcast(torch.ones(1), 0, process_set=members)
        with pytest.raises(ValueError, match="received invalid root rank 3 for provided process set"):
            hvd.broadcast_object(1, 3, process_set=members)
    else:
        with pytest.raises(ValueError, match=r"^Process is not part of provided process set\."):
            members.rank()
    assert (members.size(), members.included()) == (2, hvd.rank() in {1, 2})
    assert (other.size(), other.rank(), other.included()) == (None, None, hvd.rank() < 2)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(other)
    with pytest.raises(MismatchError, match="all ranks must add the same process sets"):
        hvd.add_process_set([0, hvd.rank()] if hvd.rank() else [0, 3])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 4
    assert hvd.remove_process_set(members)


@on("four")
def test_a_number_is_used_again_and_nothing_of_the_old_set_is() -> None:
    """Automatic names, repeated requests and counters of the removed set must not meet those of the next."""
    for turn, ranks in enumerate(([0, 1], [1, 2], [0, 3], [2, 3], [0, 1])):
        members = hvd.add_process_set(ranks)
        assert members.process_set_id == 1
        if members.included():
            for _ in range(turn + 1):
                total = hvd.allreduce(torch.full((2,), hvd.rank() + 1.0), op=hvd.Sum, process_set=members)
                assert total.tolist() == [ranks_sum(ranks)] * 2
                hvd.barrier(process_set=members)
                assert hvd.allgather_object(hvd.rank(), process_set=members) == ranks
        hvd.remove_process_set(members)
    again = hvd.ProcessSet([0, 1])
    for _ in range(3):
        assert hvd.add_process_set(again) is again
        assert again.process_set_id == 1
        assert hvd.remove_process_set(again)


@on("four")
def test_a_set_with_an_operation_in_progress_is_not_removed() -> None:
    members = hvd.add_process_set([0, 1])
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), process_set=members, name="pending")
        with pytest.raises(ValueError, match="operations are not done on rank 0; wait for them"):
            hvd.remove_process_set(members)
        assert members.process_set_id == 1
    hvd.barrier()
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(torch.ones(2), process_set=members, name="pending")
    if handle is not None:
        assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.remove_process_set(members)


@pytest.mark.parametrize("form", ["sets", "lists", "dynamic"])
@on_own(3, init=False)
def test_init_registers_sets_each_time(form: str) -> None:
    members = [hvd.ProcessSet([0]), hvd.ProcessSet([1, 2])]
    assert [item.process_set_id for item in members] == [None, None]
    for _ in range(3):
        hvd.init(process_sets={"sets": members, "lists": [[0], (2, 1)], "dynamic": "dynamic"}[form])
        if form == "sets":
            assert [item.process_set_id for item in members] == [1, 2]
            for item in members:
                if item.included():
                    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=item)
                    assert total.item() == len(item.ranks or [])
        elif form == "lists":
            with pytest.raises(ValueError, match="a duplicate process set"):
                hvd.add_process_set([1, 2])
        assert hvd.add_process_set([0, 2]).process_set_id == (1 if form == "dynamic" else 3)
        hvd.shutdown()
        assert [(item.process_set_id, item.size()) for item in members] == [(None, None)] * 2


forms = pytest.mark.parametrize("form", ["backward", "step"])


def train_alone(
    model: torch.nn.Module, ranks: list[int], steps: Iterable[int], factor: float = 1.0
) -> list[torch.Tensor]:
    """What the ranks come to together: one process takes the mean of their gradients, times ``factor``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            (make_loss(model, rank, step) * factor / len(ranks)).backward()
        optimizer.step()
    return list(model.parameters())


@forms
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("sets", [[[0, 1], [2, 3]], [[0, 3]], [[1, 2, 3]], [[2]]], ids=str)
@on("four")
def test_members_train_together_and_others_alone(form: str, op: str, sets: list[list[int]]) -> None:
    added = [hvd.add_process_set(ranks) for ranks in sets]
    mine = next((members for members in added if members.included()), added[0])
    ranks = (mine.ranks or []) if mine.included() else [hvd.rank()]
    model = make_model(sets.index(mine.ranks))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: Any = {"op": getattr(hvd, op), "gradients_ready": form}
    optimizer = hvd.DistributedOptimizer(plain, model, process_set=mine, **options)
    assert optimizer.process_set is mine
    take_steps(model, optimizer, range(3))
    factor = len(ranks) if op == "Sum" else 1
    assert_close(model.parameters(), train_alone(make_model(sets.index(mine.ranks)), ranks, range(3), factor))
    hvd.barrier()
    for members in added:
        hvd.remove_process_set(members)


@forms
@on("four")
def test_model_parallel_and_data_parallel_in_one_process(form: str) -> None:
    """Rank 2 * d + m has half m of the hidden layer, and the data d: sets of rows share activations, columns
    gradients, and all ranks the last bias. The optimizers have overlapping sets and are reduced in one backward."""

    def whole() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 4), (4, 2), (2,)))
        first, second, bias = tensors
        return first, second, bias

    def alone() -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(tensor) for tensor in whole()]
        first, second, bias = parameters
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            for data in range(2):
                hidden = torch.tanh(make_batch(data, step) @ first)
                ((hidden @ second + bias).square().mean() / 2).backward()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    rows = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
    data, part = divmod(hvd.rank(), 2)
    half = slice(2 * part, 2 * part + 2)
    first, second, bias = (
        torch.nn.Parameter(tensor.clone()) for tensor in (whole()[0][:, half], whole()[1][half], whole()[2])
    )
    distributed = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(owned, lr=rate),
            [(f"w{index}", parameter) for index, parameter in enumerate(owned)],  # the names of both are alike
            process_set=members,
            gradients_ready=form,
        )
        # each member of a row has half of the loss: the mean over all is half of the mean over the data
        for owned, rate, members in (([first, second], 0.1, columns[part]), ([bias], 0.2, hvd.global_process_set))
    ]
    for step in range(4):
        for optimizer in distributed:
            optimizer.zero_grad()
        own = torch.tanh(make_batch(data, step) @ first) @ second
        output = hvd.allreduce(own, op=hvd.Sum, process_set=rows[data]) + bias
        (output.square().mean() / 2).backward()
        for optimizer in distributed if hvd.rank() % 2 else distributed[::-1]:
            optimizer.step()
    wanted = alone()
    torch.testing.assert_close(first.detach(), wanted[0][:, half])
    torch.testing.assert_close(second.detach(), wanted[1][half])
    torch.testing.assert_close(bias.detach(), wanted[2])
    hvd.barrier()
    for members in rows + columns:
        hvd.remove_process_set(members)


@forms
@on("four")
def test_an_optimizer_outlives_its_registration(form: str) -> None:
    """While the set is removed, it is refused; in the set as it is added again, it goes on, and so does a copy."""
    members = hvd.ProcessSet([1, 3])
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match=r"^DistributedOptimizer: Process set .* has not been registered"):
        hvd.DistributedOptimizer(plain, model, process_set=members)
    hvd.add_process_set(members)
    optimizer: Any = hvd.DistributedOptimizer(plain, model, process_set=members, gradients_ready=form)
    for turn in range(3):
        if turn == 1:
            hvd.remove_process_set(members)
            with pytest.raises(UsageError, match=r"^DistributedOptimizer: Process set .* has not been registered"):
                take_step(model, optimizer)
            optimizer.zero_grad()
            between = hvd.add_process_set([0, 1])
            hvd.add_process_set(members)
            assert members.process_set_id == 2
            hvd.remove_process_set(between)
        elif turn == 2:
            model, optimizer = copy.deepcopy((model, optimizer))
            assert optimizer.process_set is members
        take_steps(model, optimizer, range(2))
    ranks = [1, 3] if members.included() else [hvd.rank()]
    assert_close(model.parameters(), train_alone(make_model(), ranks, (0, 1) * 3))
    hvd.barrier()
    hvd.remove_process_set(members)


@on("four")
def test_members_that_differ_or_skip_a_backward_are_told_by_their_ranks() -> None:
    with members_of(1, 3) as members:
        if not members.included():
            return
        model = make_model(hvd.rank())
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model, process_set=members, gradients_ready="backward")
        with pytest.raises(UsageError, match=r"model.state_dict\(\), root_rank=1, process_set=...\)"):
            take_step(model, optimizer)
        with pytest.raises(MismatchError, match=r"on rank 1, .* on rank 3"):
            hvd.broadcast_parameters([torch.ones(hvd.rank())], 1, process_set=members)
        hvd.broadcast_parameters(model.state_dict(), 1, process_set=members)
        take_steps(model, optimizer, range(1))
        optimizer.zero_grad()
        if hvd.rank() == 1:
            make_loss(model, 1, 1).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        with pytest.raises(UsageError, match=r"^rank 3 took part in the reduction from optimizer.step"):
            optimizer.step()


@on("four")
def test_members_are_given_equal_parameters_state_and_buffers() -> None:
    members = hvd.add_process_set([1, 2, 3])
    if members.included():
        model = torch.nn.Sequential(make_model(hvd.rank()), torch.nn.BatchNorm1d(3).double())
        hvd.broadcast_parameters(model.state_dict(), 2, process_set=members)
        assert_close(model[0].parameters(), make_model(2).parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.rank(), momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, hvd.rank())}
        hvd.broadcast_optimizer_state(optimizer, 3, process_set=members)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
        buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        assert all((buffer == 3).all() for buffer in buffers)
        model[1].running_mean.fill_(hvd.rank())
        model[1].num_batches_tracked.fill_(hvd.rank())
        hvd.average_buffers(model, process_set=members)
        assert model[1].running_mean.tolist() == [2.0] * 3
        assert model[1].num_batches_tracked.item() == 1
        with pytest.raises(UsageError, match="invalid root rank 0 for provided process set"):
            hvd.broadcast_parameters(model.state_dict(), 0, process_set=members)
    else:
        for call in (
            lambda: hvd.broadcast_parameters([], 1, process_set=members),
            lambda: hvd.average_buffers(torch.nn.Linear(1, 1), process_set=members),
            lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([torch.ones(1)], 0.1), 1, process_set=members),
        ):
            with pytest.raises(UsageError, match="Rank 0 is not a member of"):
                call()
    hvd.barrier()
    hvd.remove_process_set(members)
