"""A script for Horovod, with the calls of its own elastic tests and examples.

Arguments: the file of the log, and a JSON object: ``batches`` of an epoch, ``changes``: epochs behind which hosts
change, ``exits``: by the rank that a worker began with, the epoch and batch at which it fails.

Rank 0 writes a line to the log at the end of each epoch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from jobs import wait_until

EPOCHS = 3
RATE = 0.001
log, plan = sys.argv[1], json.loads(sys.argv[2])
started_as = os.environ["HOROVOD_RANK"]

hvd.init()
torch.set_num_threads(1)
inputs, targets = torch.randn(8, 2), torch.randint(2, (8,))
model = torch.nn.Linear(2, 2)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def write_line(state: Any) -> None:
    line = {
        "epoch": state.epoch,
        "commits": state.commits,
        "begins": state.begins,
        "host": os.environ["HOROVOD_HOSTNAME"],
        "started_as": int(started_as),
        "size": hvd.size(),
        "rates": {group["lr"] / RATE for group in optimizer.param_groups}.pop(),
    }
    with Path(log).open("a") as file:
        file.write(json.dumps(line) + "\n")


def scale_rate() -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATE * hvd.size()


@hvd.elastic.run
def train(state: Any) -> None:
    state.begins += 1
    while state.epoch < EPOCHS:
        while state.batch < plan["batches"]:
            if plan["exits"].get(started_as) == [state.epoch, state.batch]:
                raise RuntimeError("a fault of this rank")
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            state.batch += 1
            state.commits += 1
            state.commit()
        if hvd.rank() == 0:
            write_line(state)
            if state.epoch in plan["changes"]:
                wait_until(lambda: not state._host_messages.empty(), "a change of the hosts", deadline_s=100)
        state.epoch, state.batch = state.epoch + 1, 0
        state.commits += 1
        state.commit()


state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0, commits=0, begins=0)
state.register_reset_callbacks([scale_rate])
train(state)
