"""The thread that logs the stack of this rank's program when another rank waits for it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from horo.core.binding import ffi, lib
from horo.diagnostics.deadlock import OwnThread, describe_stacks

__all__ = ["Answers"]

_END_S = 1.0
_LOOK_S = 0.02


class Answers:
    """Of one ``horo_context``, until ``stop``."""

    def __init__(self, context: Any, callers: Callable[[], list[int]]) -> None:
        """``callers``: the threads that have called the core, see `describe_stacks`."""
        self._context = context  # the thread's own: it does not begin a call with what may be freed
        self._stoppable = context
        self._callers = callers
        self._is_telling = False
        self._process = os.getpid()
        self._thread = OwnThread(target=self._answer, name="horo answers", daemon=True)

    def start(self) -> None:
        """Starts the thread; questions stay unanswered if none can be started."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def _answer(self) -> None:
        shown = ""
        while lib.horo_await_question(self._context) == lib.HORO_OK:
            callers = self._callers()
            self._is_telling = True  # from here on it needs no context
            with contextlib.suppress(Exception):  # an error in a log handler or filter of the program
                stacks = describe_stacks(callers)
                text = " as before" if stacks == shown else f"\n{stacks}"
                logging.getLogger("horo").warning("another rank waits for this one, which stands here:%s", text)
                shown = stacks
            self._is_telling = False
            lib.horo_answer(self._context)

    def stop(self) -> None:
        """Afterwards the context may be freed. Idempotent; after an exception of a signal handler call it again."""
        self._context = ffi.NULL
        # The context is looked at last: in the calls before, a signal handler may have freed it.
        if self._thread.is_alive() and os.getpid() == self._process and self._stoppable != ffi.NULL:
            lib.horo_stop_answers(self._stoppable)
            # The thread may block in a write to a full stderr, or on a lock of logging that this thread holds.
            self._thread.join(_END_S)
            # Else it must have left the core, however late it is on a busy machine.
            while self._thread.is_alive() and not self._is_telling and not sys.is_finalizing():
                self._thread.join(_LOOK_S)
        self._stoppable = ffi.NULL
