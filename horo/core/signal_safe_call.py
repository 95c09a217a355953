"""Runs calls one after the other, each on a thread of its own, so that an exception of a signal handler leaves no call
half done: it leaves the wait for the call, and the call goes on.

Python runs signal handlers on the main thread only, and they may raise there at almost any place.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from horo.errors import ResourceError

__all__ = ["CallQueue", "ThreadCall"]


class ThreadCall:
    """A call that a thread of its own does for the thread that waits."""

    def __init__(self, step: Callable[[ThreadCall], Any]) -> None:
        self._step = step
        self._begun = threading.Lock()  # taken by whoever is first to begin the call or to withdraw it
        self._ended = threading.Lock()
        self._ended.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None
        """The thread that makes the call, once it has begun."""
        self.is_left = False
        """An exception has ended the wait for it, or has come in place of its result."""

    def run(self) -> None:
        """Does the call, unless it has been withdrawn. ``describe_blocked`` knows this function by its frame."""
        if not self._begun.acquire(blocking=False):
            return
        self.thread = threading.current_thread()
        try:
            self._result = self._step(self)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.release()

    def wait(self) -> None:
        """Waits for the end of the call. ``describe_blocked`` knows this function by its frame."""
        self._ended.acquire()

    def withdraw(self) -> bool:
        """Prevents that the call begins. Whether it had not, and now never will."""
        return self._begun.acquire(blocking=False)

    def result(self) -> Any:
        """The result of the call; raises its exception."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                error = None  # it refers to this frame
        return self._result


class CallQueue:
    """Does calls of any threads one after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._calls: SimpleQueue[ThreadCall] = SimpleQueue()

    def do(self, what: str, step: Callable[[ThreadCall], Any]) -> Any:
        """Does ``step`` when all calls before it are done; blocks until then.

        Raises:
            ResourceError: No thread can be started; ``what`` names the call in the message.
            BaseException: What ``step`` raises; or the exception of a signal handler, and then ``step`` goes on, unless
                it had not begun.
        """
        call = ThreadCall(step)
        try:
            self._calls.put(call)
            self._start(what)
            call.wait()
            return call.result()
        except BaseException:  # of a signal handler also behind the end of the call
            call.is_left = True
            call.withdraw()
            raise

    def _start(self, what: str) -> None:
        handled = sys.exc_info()[1]  # by the caller
        try:
            threading.Thread(target=self._run_all, name="horo process sets", daemon=True).start()
        except (KeyError, RuntimeError) as error:
            if not _is_of_threading(error):  # a signal handler's
                raise
            cause = error.__context__
            if cause is not None and cause is not handled:  # one that came inside start(), which then failed by itself
                raise cause from None
            raise ResourceError(f"{what}: no thread can be started: {error}") from error

    def _run_all(self) -> None:
        with self._turn, suppress(Empty):
            while True:
                self._calls.get_nowait().run()


def _is_of_threading(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__") == threading.__name__
