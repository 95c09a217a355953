"""A rank of elastic_kills.py: trains for ever, and notes the time of its first step in each generation.

Arguments: ``horo`` or ``torchrun``, and the folder of the notes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

EVERY = 10
"""A commit comes after so many steps."""


def note(generation: int, rank: int, size: int) -> None:
    """Writes a line at once; the file has the number of this process."""
    with (Path(sys.argv[2]) / str(os.getpid())).open("a") as file:
        file.write(f"{generation} {rank} {size} {time.monotonic()}\n")


def batch() -> torch.Tensor:
    return torch.ones(32, 256)


def by_horo(model: torch.nn.Module) -> None:
    import horo.torch as hvd  # noqa: PLC0415 - torchrun's ranks do without
    from horo.bootstrap.elastic import membership  # noqa: PLC0415

    hvd.init()
    member = membership()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        noted = 0
        while member is not None:
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
            if noted != member.generation:
                noted = member.generation
                note(noted, hvd.rank(), hvd.size())
            state.step += 1
            if state.step % EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0))


def by_torchrun(model: torch.nn.Module) -> None:
    from torch import distributed  # noqa: PLC0415 - and horo's without this

    distributed.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    is_noted = False
    while True:
        optimizer.zero_grad()
        wrapped(batch()).sum().backward()
        optimizer.step()
        if not is_noted:
            is_noted = True
            restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            note(restarts + 1, distributed.get_rank(), distributed.get_world_size())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"horo": by_horo, "torchrun": by_torchrun}[sys.argv[1]](torch.nn.Linear(256, 256))
