"""Ranks by fork, for benchmarks of the core alone: no launcher, no torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["core_of", "end_ranks", "fork_ranks", "segment_bytes"]


def core_of(tree: Path) -> Any:
    """The module of a tree that binds the core: ``horo._core`` in trees from before the rooms."""
    return importlib.import_module("horo.core.context" if (tree / "horo/core").is_dir() else "horo._core")


def fork_ranks(setups: Sequence[Any], close_setup: Callable[[Any], None]) -> int:
    """Forks all ranks but 0; which one this process is. Each gives up the set-ups of the others."""
    own = next((rank for rank in range(1, len(setups)) if os.fork() == 0), 0)
    for rank, setup in enumerate(setups):
        if rank != own:
            close_setup(setup)
    return own


def end_ranks(rank: int, count: int) -> None:
    """Ends all ranks but 0, which waits for them."""
    if rank != 0:
        os._exit(0)
    for _ in range(1, count):
        os.wait()


def segment_bytes(hosts: Sequence[int]) -> int:
    """As horo chooses it: on one host, and with several."""
    return 1 << 18 if len(hosts) == 1 else 1 << 20
