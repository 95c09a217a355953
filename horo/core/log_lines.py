"""The thread that makes records of Python's ``logging`` of the messages of the core, and says where the program stands.

There is one for all contexts of the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from horo.core.binding import ffi, lib
from horo.core.words import check
from horo.diagnostics.deadlock import OwnThread, describe_stacks

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


class LogLines:
    """The messages of one context, until ``close``. They go through a queue: the engine waits for no Python."""

    def __init__(self, callers: Callable[[], list[int]], *, is_logged: bool) -> None:
        """Without ``is_logged`` the messages are lines on stderr, and questions where the program stands get no answer.

        ``callers``: the threads that have called the core, see `describe_stacks`.
        """
        self._callers: Callable[[], list[int]] | None = callers
        self._taker: _Taker | None = None
        if is_logged:
            with _process.lock:
                self._taker = _process.taker = _process.taker or _Taker()
                self._taker.users.add(self)

    @property
    def queue(self) -> Any:
        """The ``horo_log_queue`` for the setup of the context; NULL: there is none."""
        return ffi.NULL if self._taker is None else self._taker.queue

    def check(self, status: int, error: Any, is_told: bool = False) -> None:
        """Raises the error of a status, behind the messages that led to it; as ``check``. No ``close`` may run."""
        if status != lib.HORO_OK and self._taker is not None:
            self._taker.log_waiting()
        check(status, error, is_told)

    def callers(self) -> list[int]:
        """The threads that have called the core, as far as that is known; the caller has the lock of the process."""
        return [] if self._callers is None else self._callers()

    def forget_context(self) -> None:
        """The context may be freed afterwards: no thread asks it for its callers. Idempotent."""
        with _process.lock:
            self._callers = None

    def stop(self) -> None:
        """Messages of this process that come after this are written to stderr. Idempotent."""
        lib.horo_stop_log_queue(self.queue)

    def close(self) -> None:
        """The context uses the queue no more. The last returns when all messages are logged or written. Idempotent."""
        taker = self._taker
        if taker is None or os.getpid() != taker.process:
            return
        with _process.lock:
            taker.users.discard(self)
            is_last = not taker.users
            if is_last and _process.taker is taker:
                _process.taker = None
        if is_last:
            taker.close()
        self._taker = None


class _Taker:
    """The queue and its thread, while a context uses them."""

    def __init__(self) -> None:
        self.users: set[LogLines] = set()
        self.process = os.getpid()
        self.queue = lib.horo_create_log_queue()
        self._taken = self.queue  # the thread's own: it does not begin a call with what may be freed
        self._is_logging = False
        self._order = threading.Lock()
        """Held from before a line is taken until it is logged."""
        self._stacks = ""
        """The last ones that were logged."""
        self._thread = OwnThread(target=self._take_lines, name="horo log", daemon=True)
        if self.queue != ffi.NULL:
            try:
                self._thread.start()
            except RuntimeError:  # there can be no more threads
                self.close()

    def _take_lines(self) -> None:
        while lib.horo_await_line(self._taken) == lib.HORO_OK:
            with self._order:
                # Only a thread that has the interpreter takes the line: else the engine writes it to stderr in time.
                self._log_first(self._taken)

    def log_waiting(self) -> None:
        """Logs what waits, and waits for what the thread has taken, but not long: a log handler may hang."""
        has_order = self._order.acquire(timeout=_END_S)
        try:
            while self._log_first(self.queue):
                pass
        finally:
            if has_order:
                self._order.release()

    def _log_first(self, queue: Any) -> bool:
        """Takes and logs the oldest message, if there is one."""
        rank, level, text = ffi.new("int32_t *"), ffi.new("int32_t *"), ffi.new("char[]", _TEXT_BYTES)
        if lib.horo_take_line(queue, rank, level, text, _TEXT_BYTES) != lib.HORO_OK:
            return False
        is_own = threading.current_thread() is self._thread
        self._is_logging |= is_own  # from here on the thread needs no queue
        if level[0] == lib.HORO_LOG_QUESTION:
            self._log_stacks()
        else:
            _log(rank[0], _LEVELS[level[0]], bytes(ffi.string(text)).decode("utf-8", "replace"))
        self._is_logging &= not is_own
        return True

    def _log_stacks(self) -> None:
        with _process.lock:
            callers = [thread for user in self.users for thread in user.callers()]
        with contextlib.suppress(Exception):  # an error in a log handler or filter of the program
            stacks = describe_stacks(callers)
            text = " as before" if stacks == self._stacks else f"\n{stacks}"
            logging.getLogger("horo").warning("another rank waits for this one, which stands here:%s", text)
            self._stacks = stacks

    def close(self) -> None:
        """Returns when all messages have been logged or written. No context may use the queue any more."""
        if self.queue == ffi.NULL:
            return
        lib.horo_stop_log_queue(self.queue)
        if threading.current_thread() is self._thread:
            return  # in the collector of garbage, which runs in any thread; the queue, which it still uses, is left
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._taken = ffi.NULL
        # A log handler may hang, or wait for a lock that this thread holds; else the thread must have left the core.
        while self._thread.is_alive() and not self._is_logging and not sys.is_finalizing():
            self._thread.join(_LOOK_S)
        queue, self.queue = self.queue, ffi.NULL
        lib.horo_destroy_log_queue(queue)


def _log(rank: int, level: int, text: str) -> None:
    try:
        logging.getLogger("horo.engine").log(level, "%s", text)
    except Exception:  # of a log handler or filter of the program
        with contextlib.suppress(OSError):
            os.write(2, f"horo [{rank}] {logging.getLevelName(level).lower()}: {text}\n".encode())


class _Process:
    """The taker that the contexts of this process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may end a context in the middle of another end
        self.taker: _Taker | None = None


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]  # its threads are the parent's
