"""Operations of a process group in torch's profiler: "horo:all_reduce" and its kin, as torch's backends name theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horo.torch.compat.profiler import profiling
from horo.torch.compat.torch_private import begin_event, end_event, end_event_with
from horo.torch.distributed.work import HoroWork

__all__ = ["recorded"]

_TITLES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
}
"""By operations of the core. The others have the same name in torch."""


def recorded(backend: str, op: str, inputs: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
    """Does ``call``, as an event with the shapes of ``inputs`` where a profiler runs; the work that it returns.

    The event of a call that waits lies in the caller's thread. That of another one is asynchronous, and ends with the
    operation.
    """
    event = begin_event(f"{backend}:{_TITLES.get(op, op)}", inputs) if profiling._is_profiler_enabled else None
    if event is None:
        return call()
    try:
        work = call()
    except BaseException:
        end_event(event)
        raise
    if isinstance(work, HoroWork):
        work.record_until(end_event_with(event, work.get_future()))
    else:
        end_event(event)
    return work
