"""The thread that makes records of Python's ``logging`` of the messages of the core."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import Any

from horo.core.binding import ffi, lib
from horo.core.words import check
from horo.diagnostics.deadlock import OwnThread

__all__ = ["LogLines"]

_LEVELS = {
    lib.HORO_LOG_TRACE: logging.DEBUG,
    lib.HORO_LOG_DEBUG: logging.DEBUG,
    lib.HORO_LOG_INFO: logging.INFO,
    lib.HORO_LOG_WARNING: logging.WARNING,
    lib.HORO_LOG_ERROR: logging.ERROR,
}
_TEXT_BYTES = 2 * lib.HORO_MESSAGE_MAX
_END_S = 1.0
_LOOK_S = 0.02


def _take(queue: Any) -> tuple[int, str] | None:
    level, text = ffi.new("int32_t *"), ffi.new("char[]", _TEXT_BYTES)
    if lib.horo_take_line(queue, level, text, _TEXT_BYTES) != lib.HORO_OK:
        return None
    return _LEVELS[level[0]], bytes(ffi.string(text)).decode("utf-8", "replace")


class LogLines:
    """The messages of one context, until ``close``. They go through a queue: the engine waits for no Python."""

    def __init__(self, rank: int, *, is_logged: bool) -> None:
        """Starts the thread, if the messages are to be logged. Without one they are lines on stderr."""
        self._rank = rank
        self._is_logging = False
        self._order = threading.Lock()
        """Held from before a line is taken until it is logged."""
        self._process = os.getpid()
        self._thread = OwnThread(target=self._take_lines, name="horo log", daemon=True)
        self.queue = lib.horo_create_log_queue() if is_logged else ffi.NULL
        """The ``horo_log_queue`` for the setup of the context; NULL: there is none."""
        self._taken = self.queue  # the thread's own: it does not begin a call with what may be freed
        if self.queue != ffi.NULL:
            try:
                self._thread.start()
            except RuntimeError:  # there can be no more threads
                self.close()

    def _take_lines(self) -> None:
        while lib.horo_await_line(self._taken) == lib.HORO_OK:
            with self._order:
                # Only a thread that has the interpreter takes the line: else the engine writes it to stderr in time.
                if (line := _take(self._taken)) is not None:
                    self._is_logging = True  # from here on it needs no queue
                    self._log(*line)
                    self._is_logging = False

    def check(self, status: int, error: Any, is_told: bool = False) -> None:
        """Raises the error of a status, behind the messages that led to it; as ``check``. No ``close`` may run."""
        if status != lib.HORO_OK:
            self._log_waiting()
        check(status, error, is_told)

    def _log_waiting(self) -> None:
        """Logs what waits, and waits for what the thread has taken, but not long: a log handler may hang."""
        has_order = self._order.acquire(timeout=_END_S)
        try:
            while (line := _take(self.queue)) is not None:
                self._log(*line)
        finally:
            if has_order:
                self._order.release()

    def _log(self, level: int, text: str) -> None:
        try:
            logging.getLogger("horo.engine").log(level, "%s", text)
        except Exception:  # of a log handler or filter of the program
            with contextlib.suppress(OSError):
                os.write(2, f"horo [{self._rank}] {logging.getLevelName(level).lower()}: {text}\n".encode())

    def stop(self) -> None:
        """Messages that come after this are written to stderr. Idempotent."""
        lib.horo_stop_log_queue(self.queue)

    def close(self) -> None:
        """Returns when all messages have been logged or written. No context may use the queue any more. Idempotent."""
        if os.getpid() != self._process or self.queue == ffi.NULL:
            return
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._taken = ffi.NULL
        # A log handler may hang, or wait for a lock that this thread holds; else the thread must have left the core.
        while self._thread.is_alive() and not self._is_logging and not sys.is_finalizing():
            self._thread.join(_LOOK_S)
        queue, self.queue = self.queue, ffi.NULL
        lib.horo_destroy_log_queue(queue)
