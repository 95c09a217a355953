"""How fast a core reads what another core has just written: the state of the machine that decides over shared memory.

On virtual machines this changes within seconds by a factor of ten, with the place that the host gives to virtual cores.
A number of the benchmark means little without it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import horo.torch as hvd

PROBE_BYTES = 4 << 20


class Probe:
    """Shared memory with one area per rank of this host. All ranks make it and measure together."""

    def __init__(self) -> None:
        size = hvd.size() * PROBE_BYTES
        name = [""]
        if hvd.rank() == 0:
            folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
            descriptor, name[0] = tempfile.mkstemp(prefix="horo-benchmark-", dir=folder)
            os.truncate(descriptor, size)
            os.close(descriptor)
        dist.broadcast_object_list(name, src=0)
        with Path(name[0]).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        dist.barrier()
        if hvd.rank() == 0:
            Path(name[0]).unlink()  # all have mapped it; nothing stays behind
        areas = np.frombuffer(self._memory, dtype=np.int64).reshape(hvd.size(), -1)
        self._mine, self._neighbours = areas[hvd.rank()], areas[(hvd.rank() + 1) % hvd.size()]
        self._private = np.zeros(PROBE_BYTES // 8, dtype=np.int64)
        self._count = 0

    def measure(self) -> float:
        """Microseconds to copy PROBE_BYTES that the next rank has just written; the first pass is not counted."""
        for _ in range(2):
            self._count += 1
            self._mine.fill(self._count)
            dist.barrier()
            begin = time.perf_counter_ns()
            np.copyto(self._private, self._neighbours)
            micros = (time.perf_counter_ns() - begin) / 1e3
            if int(self._private[0]) != self._count or int(self._private[-1]) != self._count:
                raise RuntimeError("the probe read memory that its neighbour had not written")
            dist.barrier()
        return micros


def gigabytes_per_second(micros: float) -> float:
    """Speed of the probe's copy."""
    return PROBE_BYTES / micros / 1e3


def describe(values: list[float]) -> str:
    """One line about the probe's values in microseconds; empty without values."""
    if not values:
        return ""
    tensor = torch.tensor(values)
    low, middle, high = (gigabytes_per_second(float(v)) for v in (tensor.max(), tensor.median(), tensor.min()))
    return f"memory just written by another core is read at {middle:.1f} GB/s (rounds: {low:.1f} to {high:.1f})"
