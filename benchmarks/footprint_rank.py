"""One rank of footprint.py: its memory before horo is there, with it, and while it works."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import horo.torch as hvd
from horo.torch.compression import Compressor

COUNT = 16 << 20
BYTES = 4 * COUNT  # of float32
PIECES = 64
SIDE = 1 << 10
RESET_PEAK = "5"  # for /proc/PID/clear_refs, see proc(5)


def own_bytes() -> int:
    """Anonymous and shared memory of this process, where what several share counts in parts; no files, so no code."""
    return sum(_kib("/proc/self/smaps_rollup", f"Pss_{kind}:") << 10 for kind in ("Anon", "Shmem"))


def resident_bytes() -> int:
    return _kib("/proc/self/status", "VmRSS:") << 10


def peak_bytes() -> int:
    """Most that was resident at once since ``reset_peak``."""
    return _kib("/proc/self/status", "VmHWM:") << 10


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def _kib(file: str, start: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(start):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no line '{start}'")


def trim() -> None:
    """Gives back to the system what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def highest(make: Callable[[], Callable[[], object]]) -> int:
    """Most that was resident while ``make()`` made its tensors and its work was done twice."""
    trim()
    reset_peak()
    work = make()
    work()
    work()
    return peak_bytes()


def in_place() -> Callable[[], object]:
    tensor = torch.zeros(COUNT)
    return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="in place")


def grouped() -> Callable[[], object]:
    tensors = [torch.zeros(COUNT // PIECES) for _ in range(PIECES)]
    return lambda: hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="grouped")


def asynchronous() -> Callable[[], object]:
    tensors = [torch.zeros(COUNT // PIECES) for _ in range(PIECES)]

    def work() -> None:
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{n}") for n, tensor in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    return work


def layers() -> torch.nn.Module:
    """64 MiB of parameters, equal on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(COUNT // SIDE**2)])


def step(compression: type[Compressor] | None) -> Callable[[], object]:
    """A training step with 64 MiB of gradients; None: without horo."""
    model = layers()
    data = torch.zeros(4, SIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if compression is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

    def work() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    return work


def sharded(ranks: int) -> int:
    """What 64 MiB of parameters and Adam's state take here beyond a share of what exists once per host.

    ranks: of the host.
    """
    trim()
    before = own_bytes()
    model = layers()
    adam = torch.optim.Adam(model.parameters(), foreach=False)
    optimizer = hvd.DistributedOptimizer(adam, model, sharding="optimizer")
    for _ in range(2):
        model(torch.zeros(4, SIDE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trim()
    hvd.barrier()
    taken = own_bytes() - before
    hvd.barrier()  # shared memory counts in equal parts while all ranks have it
    return taken - 3 * BYTES // ranks


def check() -> None:
    """That what is measured is correct."""
    summed = hvd.allreduce(torch.ones(COUNT), op=hvd.Sum, name="checked")
    if not summed.eq(hvd.size()).all().item():
        raise RuntimeError("a sum is wrong")


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["apart"]:
        os.environ["HORO_HOST_ID"] = f"host of process {os.getpid()}"
    plain_step = highest(lambda: step(None))
    trim()
    before, resident_before = own_bytes(), resident_bytes()
    plain_step -= resident_before
    hvd.init()
    after_init = own_bytes()
    most = {
        "allreduce in place": highest(in_place) - BYTES,
        "64 at once": highest(asynchronous) - BYTES,
        "a group of 64": highest(grouped) - BYTES,
        "training step": highest(lambda: step(hvd.Compression.none)) - plain_step,
        "training step, bf16": highest(lambda: step(hvd.Compression.bf16)) - plain_step,
    }
    check()
    beyond_share = sharded(1 if sys.argv[1:] == ["apart"] else hvd.size())
    trim()
    used = own_bytes()
    at_rest = {
        "after init": after_init - before,
        "at rest after use": used - before,
        "sharded Adam": beyond_share,
    }
    at_work = {what: value - resident_before for what, value in most.items()}
    say = {"rank": hvd.rank(), "at_rest": at_rest, "at_work": at_work}
    hvd.shutdown()
    sys.stdout.write(json.dumps(say) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
