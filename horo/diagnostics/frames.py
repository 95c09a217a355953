"""The frames of all threads, and their variables, read while those threads go on.

Before Python 3.12, garbage may be collected wherever the interpreter makes an object, also within a function of its
own. A finalizer, or a function in ``gc.callbacks``, then lets another thread run. If the interpreter holds a lock
just then that this thread needs, both wait for ever, and with them all others. If it has an address of a frame,
which that thread leaves, the process reads memory that is gone. So no garbage is collected meanwhile.

A later Python collects none there and is left alone: a program that asks just then whether garbage is collected would
get a no.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["current_frames", "is_within", "locals_of"]

_one_at_a_time = threading.RLock()  # a signal handler may look while its thread does


@contextmanager
def _without_collections() -> Iterator[None]:
    if sys.version_info >= (3, 12):
        yield
        return
    with _one_at_a_time:
        collects = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if collects:
                gc.enable()


def current_frames() -> dict[int, FrameType]:
    """Returns what ``sys._current_frames`` does: the frame of each thread that runs Python, by its identifier.

    The outer frames have been read, too: Python 3.11 makes their objects only then.
    """
    with _without_collections():
        frames = sys._current_frames()
        for frame in frames.values():
            outer: FrameType | None = frame
            while outer is not None:
                outer = outer.f_back
        return frames


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """The local variables of a frame in which another thread may be."""
    with _without_collections():
        return frame.f_locals


def is_within(frame: FrameType | None, folder: str) -> bool:
    """Whether a call comes from within code of a folder, as one of a signal handler may."""
    while frame is not None and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return frame is not None
