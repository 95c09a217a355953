"""Spans in torch's profiler. Without one that runs, each costs a look at a variable of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from horo.torch.compat.torch_private import profiler_state

__all__ = ["begin_span", "end_span", "profiling", "span"]

profiling = profiler_state()
"""Its ``_is_profiler_enabled`` is true while a profiler runs in this process."""


def span(name: str) -> AbstractContextManager[Any]:
    """A context that the profiler shows as ``name``, if one runs."""
    return profiler.record_function(name) if profiling._is_profiler_enabled else nullcontext()


def begin_span(collective: str, label: str) -> Any:
    """Begins the span of one operation, which ``end_span`` ends."""
    shown: Any = profiler.record_function(f"horo.{collective} {label}")
    shown.__enter__()
    return shown


def end_span(shown: Any) -> None:
    """Ends the span that ``begin_span`` has begun."""
    shown.__exit__(None, None, None)
