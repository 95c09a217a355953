"""Whether all threads of this process that use horo wait, and where in the program they do.

Looked at only by a thread that has waited for a while, so that a call that is quick pays nothing. The truth is taken
from the frames of the threads: a thread waits exactly if it is inside ``Context._wait_long`` and no signal handler runs
on top of that, which may submit something.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

__all__ = ["Blocked", "Wait", "describe_blocked", "describe_stacks", "innermost_own", "is_of_horo", "place_of"]

_HORO = str(Path(__file__).resolve().parent) + os.sep
_ALARM_S = 30.0
"""An alarm that rings within this time may end a wait; one that rings later limits the time of a whole job."""
_CALLS_SHOWN = 12
"""Of a thread; the outer ones say less."""
_WAITS = tuple(
    os.path.realpath(sysconfig.get_path("stdlib")) + f"{os.sep}{name}.py"
    for name in (
        *("threading", "queue", "selectors", "socket", "socketserver", "subprocess"),
        *("concurrent/futures/thread", "multiprocessing/connection", "multiprocessing/queues"),
    )
)
"""Where idle threads of libraries wait for work."""
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class Wait(NamedTuple):
    """A thread that waits for a request."""

    handle: int
    place: str
    """The line of the program: ``train.py:12``; empty: there is none."""


class Blocked(NamedTuple):
    """What threads do that have called horo."""

    waits: list[Wait]
    others: str
    """A thread that does not wait, and so may still submit something; empty: there is none."""


@cache
def _real(file: str) -> str:
    """Without links; a name that is no path, like ``<string>``, and one that is relative stay as they are."""
    return os.path.realpath(file) if file.startswith(os.sep) else file


def is_of_horo(file: str) -> bool:
    """Whether a file of Python is horo's own."""
    return _real(file).startswith(_HORO)


def innermost_own(files: list[str]) -> int | None:
    """Which of these files, from the outermost call to the innermost, is the last one of no library; None: all are."""
    own = [i for i, file in enumerate(files) if not _is_of_library(file)]
    return own[-1] if own else None


def _is_of_library(file: str) -> bool:
    return file.startswith("<frozen ") or _real(file).startswith((_HORO, *_LIBRARIES))


def place_of(frame: FrameType | None) -> str:
    """``train.py:12``: the innermost line from this frame outwards that is of no library, else the outermost one."""
    frames = list(_outwards(frame))[::-1]
    if not frames:
        return ""
    chosen = frames[innermost_own([each.f_code.co_filename for each in frames]) or 0]
    return f"{Path(chosen.f_code.co_filename).name}:{chosen.f_lineno}"


def describe_blocked(context: object, wait: CodeType, callers: Iterable[int], *, is_alone: bool = False) -> Blocked:
    """What the threads do that have called horo.

    In a process that is one rank alone, those that may call it count too: the main thread, and those that run the
    program's own code; threads of libraries where they do not merely wait for work; and an alarm that rings soon, whose
    handler may submit something or end a wait.

    Args:
        context: whose calls count.
        wait: the code inside which a thread waits; it has the locals ``self`` and ``handle``.
        callers: the identifiers of all threads that have called horo, also of those that have ended.
        is_alone: whether all threads of this process are of this rank.
    """
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate() if not _is_foreign(thread)}
    waits, backward, others = [], [], []
    foreign_waits = False
    counted: set[int | None] = set(callers)
    if is_alone:
        timers = {thread.ident for thread in threading.enumerate() if isinstance(thread, threading.Timer)}
        counted |= timers | {threading.main_thread().ident}
    # A caller that is not among these has ended, or runs no Python, as a thread of autograd does between two hooks.
    for thread, frame in frames.items():
        found = _find_wait(frame, context, wait, is_looking=thread == threading.get_ident())
        if found is not None:
            waits.append(found)
            foreign_waits |= thread not in names and _is_of_library([*_outwards(frame)][-1].f_code.co_filename)
        elif thread not in counted and (not is_alone or _awaits_work(frame)):
            continue
        elif _is_in_backward(frame):
            backward.append(thread)
        else:
            others.append(thread)
    frames.clear()  # it has this function's own, which has it: a circle
    # Backward of a GPU runs hooks in a thread of autograd, for whose end the thread that called backward() waits.
    others += [] if foreign_waits else backward
    if others:
        return Blocked(waits, f"thread {names.get(others[0], others[0])!r}")
    return Blocked(waits, "the alarm" if is_alone and _alarm_rings_soon() else "")


def _alarm_rings_soon() -> bool:
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    return 0 < left_s <= _ALARM_S and callable(signal.getsignal(signal.SIGALRM))


def describe_stacks(callers: Iterable[int]) -> str:
    """Where the main thread stands, and those that have called horo: the last calls of each, the innermost last."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = dict.fromkeys([threading.main_thread().ident, *callers])
    parts = []
    for thread in threads:
        if thread in frames:
            lines = "".join(traceback.format_stack(frames[thread])[-_CALLS_SHOWN:])
            parts.append(f"thread {names.get(thread, thread)!r}:\n{lines.rstrip()}")
    frames.clear()
    return "\n".join(parts)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaits_work(frame: FrameType) -> bool:
    """Whether a thread runs code of libraries only and waits where idle workers do, or in horo for questions."""
    file = frame.f_code.co_filename
    is_idle = _real(file) in _WAITS or is_of_horo(file)
    return is_idle and all(_is_of_library(each.f_code.co_filename) for each in _outwards(frame))


def _find_wait(frame: FrameType, context: object, wait: CodeType, *, is_looking: bool) -> Wait | None:
    above: FrameType | None = None
    for each in _outwards(frame):
        if each.f_code is wait and each.f_locals.get("self") is context:
            # Above it stands code that looks at threads, or what came by itself: a signal handler, a finalizer.
            is_own = is_looking or above is None or is_of_horo(above.f_code.co_filename)
            return Wait(each.f_locals["handle"], place_of(each)) if is_own else None
        above = each
    return None


def _is_in_backward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_engine_run_backward" and "torch" in Path(frame.f_code.co_filename).parts


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether it was begun by another library than Python's ``threading``."""
    return isinstance(thread, threading._DummyThread)
