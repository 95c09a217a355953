"""The frames in which all threads are."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

__all__ = ["current_frames"]

_one_at_a_time = threading.RLock()  # a signal handler may look while its thread does


def current_frames() -> dict[int, FrameType]:
    """Returns what ``sys._current_frames`` does: the frame of each thread that runs Python, by its identifier.

    That function makes its result while it holds a lock of the interpreter. Before Python 3.12, garbage may be
    collected just then: a finalizer lets another thread run, and if that one wants the lock, both wait for ever, and
    with them all others. So no garbage is collected meanwhile.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
