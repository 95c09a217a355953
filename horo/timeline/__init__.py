"""Timelines of several ranks in one file: ``python -m horo.timeline merge``. Needs neither torch nor the core."""

from __future__ import annotations

from horo.timeline.merging import merge
from horo.timeline.reading import Timeline, TimelineError, read_timeline

__all__ = ["Timeline", "TimelineError", "merge", "read_timeline"]
