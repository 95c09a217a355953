"""How a typed script uses ``horo.torch``; ``make types`` checks it, nothing runs it."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import assert_type

import horo.torch as hvd


def wrap_again_by_the_same_name(model: torch.nn.Module) -> torch.optim.Adam:
    """As Horovod's scripts do it."""
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.synchronize()
    optimizer.step()
    return optimizer


def train(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """One step."""
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_type(optimizer.no_sync(), AbstractContextManager[None])
    with optimizer.no_sync():
        model(batch).sum().backward()
    assert_type(optimizer.synchronize(), None)
    assert_type(optimizer.skip_synchronize(), AbstractContextManager[None])
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_type(optimizer.set_backward_passes_per_step(2), None)
    assert_type(optimizer.backward_passes_per_step, int)
    assert_type(optimizer.op, int)
    scheduler.step()
    own: torch.optim.Optimizer = optimizer
    own.zero_grad()
    return hvd.allreduce(batch, op=hvd.Sum, compression=hvd.Compression.fp16)


def train_with_few_changes(model: torch.nn.Linear, loader: torch.utils.data.DataLoader[torch.Tensor]) -> None:
    """The model keeps its type, and the loader that of its batches."""
    assert_type(hvd.distribute(model, op=hvd.Sum), torch.nn.Linear)
    part = hvd.shard(loader, tail="exact")
    own: torch.utils.data.DataLoader[torch.Tensor] = part
    part.load_state_dict(part.state_dict())
    part.set_epoch(part.epoch + len(own))
    with hvd.no_sync(model):
        for batch in part:
            model(batch).sum().backward()


def share(epoch: int, state: dict[str, int] | None) -> None:
    """Objects are of the type that the root's has."""
    assert_type(hvd.broadcast_object(epoch, root_rank=0), int)
    assert_type(hvd.broadcast_object(state, root_rank=0), dict[str, int])
    assert_type(hvd.allgather_object(epoch), list[int])


def overlap(batch: torch.Tensor) -> None:
    """Handles have the types of their results."""
    assert_type(hvd.allreduce_async(batch).wait(), torch.Tensor)
    assert_type(hvd.synchronize(hvd.broadcast_async_(batch, root_rank=0)), torch.Tensor)
    assert_type(hvd.grouped_allgather_async([batch]).wait(), tuple[torch.Tensor, ...])
    assert_type(hvd.alltoall_async(batch).wait(), tuple[torch.Tensor, torch.Tensor])
    handle: int = hvd.reducescatter_async(batch)
    assert_type(hvd.synchronize(handle), Any)
    assert_type(hvd.Handle.done(hvd.reducescatter_async(batch)), bool)


def start(chosen: dict[str, Any]) -> None:
    """Settings by their names, of their types."""
    hvd.init(cycle_time_ms=1, log_level="info", autotune=None)
    hvd.init([0, 1], process_sets=[[0]], **chosen)


def mistakes(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Each is an error to a type checker; mypy refuses an ``ignore`` of what is none."""
    hvd.init(cycle_time=3)  # type: ignore[call-arg]
    hvd.init(cycle_time_ms="3")  # type: ignore[arg-type]
    hvd.allreduce(batch, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.allreduce(batch.tolist, op=hvd.Sum)  # type: ignore[arg-type]
    hvd.synchronize(batch)  # type: ignore[call-overload]
    hvd.allreduce_async(batch).result()  # type: ignore[attr-defined]
    hvd.synchronize(hvd.grouped_allreduce_async([batch])).sum()  # type: ignore[attr-defined]
    kept: hvd.Handle[torch.Tensor] = hvd.alltoall_async(batch)  # type: ignore[assignment]
    hvd.poll(kept.wait())  # type: ignore[arg-type]
    hvd.broadcast_object("3", root_rank=0) + 1  # type: ignore[operator]
    hvd.broadcast_parameters(model, root_rank="0")  # type: ignore[arg-type]
    hvd.distribute(torch.optim.SGD)  # type: ignore[type-var]
    hvd.shard([batch])  # type: ignore[arg-type]
    hvd.DistributedOptimizer(model, model.named_parameters())  # type: ignore[arg-type]
    hvd.no_such_function()  # type: ignore[attr-defined]
