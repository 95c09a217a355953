"""The end of a join: for ranks in several process sets, after an interrupt, and for optimizers made later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupt
from rank_pool import on
from small_model import make_loss, make_model

import horo.torch as hvd
from horo.torch.engine import runtime as _runtime


class _StopError(Exception):
    pass


def interrupted_join() -> None:
    """A join whose wait an exception of a signal handler ends."""
    joining = _runtime.current().joining
    interrupt(hvd.join, _StopError, lambda: has_joined(joining))


def has_joined(joining: Any) -> bool:
    """Whether this rank counts as joined in all its process sets."""
    current = joining._round
    return current is not None and len(current.handles) == len(current.teams)


@contextmanager
def settling_late(left: Path) -> Iterator[None]:
    """This rank, which has left a join, finds that it still waits; then all have joined, and only then it goes on."""
    runtime: Any = _runtime.current()
    settle = runtime.joining.settle

    def settle_late() -> bool:
        waits: bool = settle()
        left.touch()
        for handle in runtime.joining._round.handles if waits else []:
            runtime.core.wait(handle)
        return waits

    runtime.joining.settle = settle_late
    try:
        yield
    finally:
        runtime.joining.settle = settle


def go_on_until(path: Path) -> None:
    """Operations until another rank, which has joined, has made the file."""
    end = time.monotonic() + 50
    while not path.exists():
        hvd.allreduce(torch.ones(1), name="meanwhile")
        assert time.monotonic() < end


def until_taken(call: Any) -> None:
    """Repeats an operation that is refused as long as others have not joined."""
    end = time.monotonic() + 50
    while True:
        try:
            call()
        except hvd.UsageError as error:
            assert "has joined" in str(error)
            assert time.monotonic() < end
        else:
            return


@on("ranks4")
def test_no_rank_leaves_before_all_have_ended_their_joins() -> None:
    """Rank 0, which is in no set, would take its leave while rank 1 is not done with its sets."""
    for members in ([1, 2], [1, 3], [2, 3], [1, 2, 3]):
        hvd.add_process_set(members)
    core: Any = _runtime.current().core
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
            until_taken(operate)
        else:
            for _ in range(3):
                hvd.allreduce(torch.ones(1))
            go_on_until(left / str(epoch))
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
        go_on_until(left)
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
        go_on_until(left)
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
        go_on_until(left)
    hvd.join()
    hvd.remove_process_set(other)


@on("ranks2")
def test_an_exception_at_the_end_of_a_join_leaves_no_round_behind() -> None:
    runtime: Any = _runtime.current()
    if hvd.rank() == 0:
        restart = runtime.restart_names

        def interrupted() -> None:
            runtime.restart_names = restart
            raise _StopError

        runtime.restart_names = interrupted
        with pytest.raises(_StopError):
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
