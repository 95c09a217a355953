"""Barrier: it returns when all ranks have called it."""

from __future__ import annotations

from horo.torch.engine.submit import (
    run_barrier,
)
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["barrier"]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until all ranks have called it.

    Args:
        process_set: The ranks that take part; others do not call it.

    Raises:
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        hvd.barrier()
        print(f"rank {hvd.rank()} goes on after all have come")
    """
    run_barrier(resolve_process_set(process_set, "barrier"))
