"""Under torchrun: one rank ends at its fifth step, once. Arguments: folder, victim, this host's name."""

import os
import sys
from pathlib import Path

import torch

import horo.torch as hvd

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
host = sys.argv[3] if len(sys.argv) > 3 else os.environ["RANK"]
os.environ["HORO_ELASTIC_DIR"] = str(folder / f"host {host}")

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@hvd.elastic.run
def train(state):
    sys.stdout.write(f"rank {hvd.rank()} begins at step {state.step} {resets}\n")  # in one piece
    sys.stdout.flush()
    while state.step < 10:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == 5 and hvd.rank() == victim and not (folder / "failed").exists():
            (folder / "failed").touch()
            os._exit(3)


resets = []
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())])
train(state)
