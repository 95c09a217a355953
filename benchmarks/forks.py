"""Ranks by fork, for benchmarks of the core alone: no launcher, no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["end_ranks", "fork_ranks", "segment_bytes"]


def fork_ranks(count: int) -> int:
    """Forks ranks 1 to ``count - 1``; which one this process is. Each then gives up what is the others'."""
    for rank in range(1, count):
        if os.fork() == 0:
            return rank
    return 0


def end_ranks(rank: int, count: int) -> None:
    """Ends all ranks but 0, which waits for them."""
    if rank != 0:
        os._exit(0)
    for _ in range(1, count):
        os.wait()


def segment_bytes(hosts: Sequence[int]) -> int:
    """As horo chooses it: on one host, and with several."""
    return 1 << 18 if len(hosts) == 1 else 1 << 20
