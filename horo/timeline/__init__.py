"""Timelines: those of ranks, and several in one file, ``python -m horo.timeline``. Needs neither torch nor the core."""

from __future__ import annotations

from horo.timeline.merging import merge
from horo.timeline.reading import Timeline, TimelineError, read_timeline

__all__ = ["Timeline", "TimelineError", "merge", "read_timeline"]
