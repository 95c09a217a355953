"""How a typed script uses ``horo.torch``; ``make types`` checks it, nothing runs it."""

from __future__ import annotations

from contextlib import AbstractContextManager

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
