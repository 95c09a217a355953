"""The time for which threads wait for torch's ``DataLoader``, which has no hook for that."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from horo.torch.compat.torch_private import loader_iterators

__all__ = ["take_loading_ns", "watch_loaders"]


class _Waits(threading.local):
    ns = 0
    is_inside = False


_waits = _Waits()


def take_loading_ns() -> int:
    """Nanoseconds for which this thread has waited for loaders since it was here last, or since ``watch_loaders``."""
    ns, _waits.ns = _waits.ns, 0
    return ns


def watch_loaders() -> None:
    """Has the waits for loaders measured from now on. Does nothing where none can be there yet, or a second time."""
    kind = loader_iterators()
    if kind is not None and not hasattr(kind.__next__, "is_measured"):
        kind.__next__ = _measured(kind.__next__)


def _measured(take: Any) -> Callable[[Any], Any]:
    @functools.wraps(take)
    def take_measured(self: Any) -> Any:
        if _waits.is_inside:  # a loader whose dataset reads from another one
            return take(self)
        _waits.is_inside, began = True, time.perf_counter_ns()
        try:
            return take(self)
        finally:
            _waits.is_inside = False
            _waits.ns += time.perf_counter_ns() - began

    take_measured.is_measured = True  # type: ignore[attr-defined]
    return take_measured
