"""A rank of elastic_kills.py: trains for ever, and notes the time of its first step in each generation.

Arguments: ``horo`` or ``torchrun``, and the folder of the notes. A rank of horo kills itself at the next moment of its
life (``step``, ``commit``, ``sync``, ``init``) that stands in the file ``kill.PID`` there, and notes when.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EVERY = 10
"""A commit comes after so many steps."""
INIT_S = 0.015
"""A rank that dies in ``init()`` does so within this time."""
FULL = 4
"""The number of ranks with which steps follow each other without a pause."""
PAUSE_S = 0.01
FOLDER = Path(sys.argv[2])


def note(generation: int, rank: int, size: int, host: int, gap_s: float) -> None:
    """Writes a line at once; the file has the number of this process. ``gap_s``: since its last step before."""
    with (FOLDER / str(os.getpid())).open("a") as file:
        file.write(f"{generation} {rank} {size} {host} {gap_s} {time.monotonic()}\n")


def die_at(moment: str) -> None:
    """Kills this process, if it is to die at that moment of its life; in ``init()``, a little later."""
    order = FOLDER / f"kill.{os.getpid()}"
    if order.exists() and order.read_text() == moment:
        if moment == "init":
            threading.Timer(random.uniform(0, INIT_S), die).start()
        else:
            die()


def die() -> None:
    (FOLDER / f"died.{os.getpid()}").write_text(f"{time.monotonic()}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in(owner: Any, name: str, moment: str) -> None:
    """Has this process die in a function, if it is to."""
    function: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        die_at(moment)
        return function(*args, **options)

    setattr(owner, name, call)


def batch() -> torch.Tensor:
    return torch.ones(32, 256)


def by_horo(model: torch.nn.Module) -> None:
    import horo.torch as hvd  # noqa: PLC0415 - torchrun's ranks do without
    import horo.torch.elastic.copies  # noqa: PLC0415
    import horo.torch.elastic.state  # noqa: PLC0415
    from horo.bootstrap.elastic import membership  # noqa: PLC0415

    hvd.init()
    member = membership()
    dies_in(member, "_begin", "init")
    dies_in(horo.torch.elastic.state, "overwrite", "sync")
    dies_in(horo.torch.elastic.copies.Copies, "_views_of", "commit")
    next(model.parameters()).register_hook(lambda _: die_at("step"))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    last_s = 0.0

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal last_s
        noted = 0
        while member is not None:
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
            if noted != member.generation:
                noted = member.generation
                note(noted, hvd.rank(), hvd.size(), hvd.cross_rank(), time.monotonic() - last_s if last_s else 0.0)
            last_s = time.monotonic()
            if hvd.size() < FULL:
                time.sleep(PAUSE_S)  # leaves the cores to the one that is about to come
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
            host = int(os.environ["GROUP_RANK"])
            restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            note(restarts + 1, distributed.get_rank(), distributed.get_world_size(), host, 0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"horo": by_horo, "torchrun": by_torchrun}[sys.argv[1]](torch.nn.Linear(256, 256))
