"""Has the core write a rank's timeline."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from horo.core.binding import lib
from horo.core.request_buffer import OP_NAMES
from horo.core.words import STATUS_NAMES, check, error_buffer, text_of
from horo.errors import UsageError
from horo.timeline.reading import TimelineError
from horo.timeline.recording import Recording

__all__ = ["CoreTimeline"]

_WORDS = {
    "ops": OP_NAMES,
    "statuses": {number: text_of(lib.horo_status_name(number)) for number in STATUS_NAMES},
}


class CoreTimeline:
    """The timeline of a context; each call gets that. Thread-safe."""

    def __init__(self) -> None:
        self._recording = Recording(_WORDS)
        self._starts_or_stops = threading.RLock()

    def start(self, context: Any, path: str, about: Mapping[str, Any], *, marks_batches: bool) -> None:
        """As ``Context.start_timeline``."""

        def write_rows(descriptor: int) -> None:
            error = error_buffer()
            check(lib.horo_start_timeline(context, descriptor, marks_batches, error, lib.HORO_MESSAGE_MAX), error)

        try:
            with self._starts_or_stops:
                self._recording.start(path, about, write_rows)
        except TimelineError as error:
            raise UsageError(str(error)) from None

    def stop(self, context: Any) -> int:
        """As ``Context.stop_timeline``; returns the status of the core."""
        with self._starts_or_stops:
            status: int = lib.horo_stop_timeline(context)
            if status == lib.HORO_OK:
                self._recording.finish()
        return status

    def finish(self) -> None:
        """Makes the file once the context is destroyed."""
        self._recording.finish()

    def after_fork(self) -> None:
        """In a forked child."""
        self._recording.after_fork()
