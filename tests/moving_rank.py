"""A rank that moves and adds up tensors of several sizes with the others and checks each element.

    moving_rank.py TURNS [VICTIM]

VICTIM is killed while it is in the middle of a call, after some of them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

import horo.torch as hvd

CALLS_BEFORE = 12


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    calls = 0

    def kill_in_a_call() -> None:
        while calls < CALLS_BEFORE:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.argv[2:] == [str(rank)]:
        threading.Thread(target=kill_in_a_call, daemon=True).start()
    for turn in range(int(sys.argv[1])):
        for count in (5, 30_000, 700_001):
            base = torch.arange(count, dtype=torch.float32) + turn
            gathered = hvd.allgather(base * (rank + 1), name="g")
            assert torch.equal(gathered, torch.cat([base * (r + 1) for r in range(size)]))
            calls += 1
            exchanged = hvd.alltoall(torch.cat([base + 3 * rank + to for to in range(size)]), name="a")
            assert torch.equal(exchanged, torch.cat([base + 3 * r + rank for r in range(size)]))
            calls += 1
            scattered = hvd.reducescatter(torch.cat([base * (rank + 1)] * size), op=hvd.Sum, name="s")
            assert torch.equal(scattered, base * (size * (size + 1) // 2))
            calls += 1
            root = turn % size
            assert torch.equal(hvd.broadcast(base * (rank + 1), root, name=f"b{root}"), base * (root + 1))
            calls += 1
    print("all is right")


if __name__ == "__main__":
    main()
