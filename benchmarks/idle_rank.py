"""One rank of idle.py: starts a library, uses it once, and then waits in a read of the driver's socket."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from channel import Channel
from resting import own_packets

ELEMENTS = 1 << 18


def start_horo(apart: bool) -> Callable[[], None]:
    """``apart``: no rank shares memory with another, as if each had a host of its own. Returns what ends it."""
    import torch  # noqa: PLC0415  (the other library has no part in this process)

    import horo.torch as hvd  # noqa: PLC0415

    if apart:
        os.environ["HORO_HOST_ID"] = f"host of process {os.getpid()}"
    hvd.init()
    ones = hvd.allreduce_(torch.ones(ELEMENTS), op=hvd.Sum, name="once")
    _check(ones.eq(hvd.size()).all().item())
    return hvd.shutdown


def start_gloo() -> Callable[[], None]:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo")
    ones = torch.ones(ELEMENTS)
    dist.all_reduce(ones)
    _check(ones.eq(dist.get_world_size()).all().item())
    return dist.destroy_process_group


def _check(correct: object) -> None:
    if not correct:
        raise RuntimeError("the sum is wrong")


def main() -> int:
    path, library = sys.argv[1:]
    channel = Channel.dial(path)
    end = start_gloo() if library == "gloo" else start_horo(apart=library == "horo-apart")
    channel.send({"ready": True})
    while channel.receive()["do"] == "count":
        packets, connections = own_packets()
        channel.send({"packets": packets, "connections": connections})
    end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
