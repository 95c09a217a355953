"""A fault in the middle of training by DDP or FSDP2: all ranks get the error that names the rank; nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import open_descriptors
from rank_pool import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LATE = r"TimeoutError: rank 1 \(.*\) (has not called|does not answer)"
FAULTS = {
    "kill": r"PeerLostError: rank 1 \(.*\) is gone: its process ended",
    "stop": LATE,
    "order": r"MismatchError: call \d+: rank 0 .* calls .*, rank 1 .* calls broadcast",
    "uneven": LATE,
}
"""What rank 1 does in its third step, and the error of all ranks; that of DDP's backward is torch's, with horo's in it.
"""


def ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Sequential) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def do(fault: str) -> None:
    """What is wrong with rank 1."""
    store = dist.distributed_c10d._get_default_store()
    if fault in {"kill", "stop"}:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "order":
        dist.broadcast(torch.ones(3), 1)
    else:  # it has no more batches, and computes
        while (error := dist.group.WORLD._exchange.job.context.health()) is None:
            time.sleep(0.01)
        raise error


def train(wrap: Callable[[nn.Sequential], nn.Module], fault: str, store: str) -> tuple[str, float]:
    """The error, and the seconds until it came."""
    before = open_descriptors()
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group("horo", init_method=f"file://{store}", rank=rank, world_size=size)
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        for step in range(9):
            if step == 2:
                dist.barrier()
                dist.group.WORLD._set_default_timeout(timedelta(seconds=1))
                began = time.monotonic()
                if rank == 1:
                    do(fault)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    took = time.monotonic() - began
    if fault == "stop" and rank != 1:
        os.kill(int(dist.distributed_c10d._get_default_store().get("pid")), signal.SIGCONT)
    dist.destroy_process_group()
    del model, optimizer
    assert open_descriptors() <= before
    assert "horo-arena" not in Path("/proc/self/maps").read_text()
    return f"{type(caught.value).__name__}: {caught.value}", took


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_all_ranks_get_the_right_error_and_nothing_is_left(tmp_path: Path, wrap: Any, fault: str) -> None:
    with RankPool(3, init=False) as ranks:
        lost = [1] if fault == "kill" else []
        results = ranks.run_each(train, [(wrap, fault, str(tmp_path / "store"))] * 3, lost=lost)
    for said, took in (result for result in results if result is not None):
        assert re.search(FAULTS[fault], said), results
        assert took < 20
