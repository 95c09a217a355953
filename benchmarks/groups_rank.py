"""One rank of groups.py: what it holds before there are groups, with them, and when they are gone."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resting import activity_of


def held() -> dict[str, int]:
    """Of this process, by name."""
    status = Path("/proc/self/status").read_text()
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line]
    ends = [line.split()[0].split("-") for line in shared]
    return {
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "resident_bytes": int(status.partition("\nVmRSS:")[2].split()[0]) << 10,
        "shared_bytes": sum(int(end, 16) - int(begin, 16) for begin, end in ends),
    }


def main() -> None:
    backend, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group(backend)
    ranks = list(range(dist.get_world_size()))
    dist.barrier()
    before = held()
    began = time.monotonic()
    groups: list[Any] = [dist.new_group(ranks) for _ in range(count)]
    making_s = time.monotonic() - began
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    dist.barrier()
    with_groups = held()
    names = Counter((thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir())
    time.sleep(1.0)  # what has spun comes to rest
    active = activity_of([os.getpid()])
    time.sleep(seconds)
    active = activity_of([os.getpid()]).since(active)
    for group in groups:
        dist.destroy_process_group(group)
    groups.clear()
    dist.barrier()
    row = {
        "rank": dist.get_rank(),
        "making_s": making_s,
        "before": before,
        "with_groups": with_groups,
        "after": held(),
        "thread_names": names,
        "idle_wake_ups": active.wake_ups - 1,  # its own sleep
        "idle_cpu_ns": active.cpu_ns,
    }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
