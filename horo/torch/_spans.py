"""Spans in torch's profiler. Without one that runs, each costs a look at a variable of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

__all__ = ["begin_span", "end_span", "is_profiled", "span"]

_KNOWS = hasattr(profiler, "_is_profiler_enabled")


def is_profiled() -> bool:
    """Whether a profiler runs in this process."""
    return _KNOWS and profiler._is_profiler_enabled


def span(name: str) -> AbstractContextManager[Any]:
    """A context that the profiler shows as ``name``, if one runs."""
    return profiler.record_function(name) if is_profiled() else nullcontext()


def begin_span(collective: str, label: str) -> profiler.record_function:
    """Begins the span of one operation, which ``end_span`` ends."""
    shown = profiler.record_function(f"horo.{collective} {label}")
    shown.__enter__()
    return shown


def end_span(shown: profiler.record_function) -> None:
    """Ends what ``begin_span`` has begun."""
    shown.__exit__(None, None, None)
