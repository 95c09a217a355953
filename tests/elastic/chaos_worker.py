"""A worker of an elastic job whose weight is minus the number of its steps, until the file ``stop`` is in its folder.

It writes the number of its steps to ``steps.PID``, and raises an exception on SIGUSR1. Arguments: the folder, and what
of the optimizer is sharded, if anything is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import horo.torch as hvd

folder = Path(sys.argv[1])


def fail(number: int, frame: object) -> None:
    raise ValueError("a fault of this rank")


signal.signal(signal.SIGUSR1, fail)
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(1, 300, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
sharding: Any = sys.argv[2] or None
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), sharding=sharding)


@hvd.elastic.run
def train(state: Any) -> None:
    is_over = False
    while not is_over:
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        state.step += 1
        assert torch.all(model.weight == -state.step), (state.step, model.weight[0])
        if state.step % 3 == 0:
            state.commit()
        seen = torch.tensor([(folder / "stop").exists()], dtype=torch.int64)
        is_over = bool(hvd.allreduce(seen, op=hvd.Max, name="stop"))
        (folder / f"steps.{os.getpid()}").write_text(str(state.step))


state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
print(f"end {state.step}", flush=True)
