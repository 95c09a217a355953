"""The time for which threads wait for torch's ``DataLoader``, which has no hook for that."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from typing import Any

from horo.torch.compat.torch_private import loader_iterators

__all__ = ["loading_ns", "watch_loaders"]

_ns: defaultdict[int, int] = defaultdict(int)
"""By thread."""


def loading_ns() -> int:
    """Nanoseconds for which this thread has waited for loaders since ``watch_loaders``."""
    return _ns.get(get_ident(), 0)


def watch_loaders() -> None:
    """Has the waits for loaders measured from now on. Does nothing where none can be there yet, or a second time."""
    kind = loader_iterators()
    if kind is not None and not hasattr(kind.__next__, "is_measured"):
        kind.__next__ = _measured(kind.__next__)


def _measured(take: Any) -> Callable[[Any], Any]:
    @functools.wraps(take)
    def take_measured(self: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return take(self)
        finally:
            _ns[get_ident()] += time.perf_counter_ns() - began

    take_measured.is_measured = True  # type: ignore[attr-defined]
    return take_measured
