"""Finds out whether all threads of this process that use horo wait, and at which lines of the program.

Only a thread that has already waited for a while does this, so it costs a quick call nothing. The source is the frames
of the threads: a thread waits exactly if it is inside ``Context._wait_long`` and no signal handler, which may submit a
request, runs on top of that.
"""

from __future__ import annotations

import os
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from horo.core.signal_safe_call import ThreadCall
from horo.diagnostics.frames import current_frames, locals_of

__all__ = [
    "Blocked",
    "OwnThread",
    "Wait",
    "describe_blocked",
    "describe_stacks",
    "innermost_own",
    "is_of_horo",
    "place_of",
]

_HORO = str(Path(__file__).resolve().parents[1]) + os.sep
_ALARM_S = 30.0
"""A SIGALRM that is due within this time may end a wait; a later one limits the time of a whole job."""
_CALLS_SHOWN = 12
"""The innermost calls that are listed for each thread; the outer ones help less."""
_NAME_SHOWN = 64
"""Most characters of a name in the report, which has room for about 256."""
_WAITS = tuple(
    os.path.realpath(sysconfig.get_path("stdlib")) + f"{os.sep}{name}.py"
    for name in (
        *("threading", "queue", "selectors", "socket", "socketserver", "subprocess"),
        *("concurrent/futures/thread", "multiprocessing/connection", "multiprocessing/queues"),
    )
)
"""Modules in which idle threads of libraries wait for work."""
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of other folders with libraries: the user's, those of .pth files and of ``PYTHONPATH``."""


class Wait(NamedTuple):
    """A thread that waits for a request."""

    handle: int
    place: str
    """The line of the program, such as ``train.py:12``; empty: there is none."""


class OwnThread(threading.Thread):
    """A thread of horo that submits nothing: of the program, only log handlers run in it."""


class Blocked(NamedTuple):
    """The state of the threads that have called horo."""

    waits: list[Wait]
    others: str
    """A thread that does not wait, so that it may still submit a request; empty: there is none."""


@cache
def _real(file: str) -> str:
    """The path without symbolic links; a relative path, or a name that is no path (``<string>``), is unchanged."""
    return os.path.realpath(file) if file.startswith(os.sep) else file


def is_of_horo(file: str) -> bool:
    """Whether a Python file belongs to horo."""
    return _real(file).startswith(_HORO)


def innermost_own(files: list[str]) -> int | None:
    """Index of the last of these files that belongs to no library; None if all do. The outermost call comes first."""
    own = [i for i, file in enumerate(files) if not _is_of_library(file)]
    return own[-1] if own else None


def _is_of_library(file: str) -> bool:
    real = _real(file)
    is_installed = real.startswith((_HORO, *_LIBRARIES)) or any(folder in real for folder in _PACKAGES)
    return is_installed or file.startswith("<frozen ")


def place_of(frame: FrameType | None) -> str:
    """The innermost line outside libraries, from this frame outwards, else the outermost line: ``train.py:12``."""
    frames = list(_outwards(frame))[::-1]
    if not frames:
        return ""
    chosen = frames[innermost_own([each.f_code.co_filename for each in frames]) or 0]
    return f"{Path(chosen.f_code.co_filename).name}:{chosen.f_lineno}"


def describe_blocked(
    context: object, wait: CodeType, callers: Iterable[int], duplicate: str = "", *, is_alone: bool = False
) -> Blocked:
    """Describes the state of the threads that have called horo.

    In a process with only one rank, the threads that may call horo count too: the main thread, threads that run the
    program's own code, and threads of libraries that do not merely wait for work. A SIGALRM that is due soon counts as
    well, since its handler may submit a request or end a wait.

    Args:
        context: the context whose calls count.
        wait: the code inside which a thread waits; it has the locals ``self`` and ``handle``.
        callers: the identifiers of all threads that have called horo, also of those that have ended.
        duplicate: a name that was refused since it was in use. The other ranks get it: they may wait for it.
        is_alone: whether all threads of this process belong to this rank.
    """
    frames = current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate() if not _is_foreign(thread)}
    own = {thread.ident for thread in threading.enumerate() if isinstance(thread, OwnThread)}
    waits, backward, others, waiters = [], [], [], []
    foreign_waits = has_thread_call = False
    counted: set[int | None] = set(callers)
    if is_alone:
        timers = {thread.ident for thread in threading.enumerate() if isinstance(thread, threading.Timer)}
        counted |= timers | {threading.main_thread().ident}
    # A caller without a frame has ended or runs no Python now; a thread of autograd runs none between two hooks.
    for thread, frame in frames.items():
        found = _find_wait(frame, context, wait, is_looking=thread == threading.get_ident())
        if frame.f_code is ThreadCall.wait.__code__:
            waiters.append(thread)
        elif found is not None:
            call = _find_call(frame)
            has_thread_call |= call is not None
            waits.append(found if call is None else found._replace(place=_place_of_caller(frames, call)))
            foreign_waits |= thread not in names and _is_of_library([*_outwards(frame)][-1].f_code.co_filename)
        elif thread not in counted and (not is_alone or thread in own or _awaits_work(frame)):
            continue
        elif _is_in_backward(frame):
            backward.append(thread)
        else:
            others.append(thread)
    others += [] if has_thread_call else waiters  # the thread that does their calls does not wait: it may finish one
    frames.clear()  # it holds this function's frame, which refers to it: a reference cycle
    if duplicate and waits:
        waits[0] = waits[0]._replace(place=_with_duplicate(waits[0].place, duplicate))
    # On a GPU, hooks run in a thread of autograd, and the thread that called backward() waits for its end.
    others += [] if foreign_waits else backward
    if others:
        return Blocked(waits, f"thread {names.get(others[0], others[0])!r}")
    return Blocked(waits, "the alarm" if is_alone and _alarm_rings_soon() else "")


def _with_duplicate(place: str, name: str) -> str:
    shown = name if len(name) <= _NAME_SHOWN else f"...{name[-_NAME_SHOWN:]}"
    return f"{place}{'; ' if place else ''}a second '{shown}' was refused before"


def _alarm_rings_soon() -> bool:
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    return 0 < left_s <= _ALARM_S and callable(signal.getsignal(signal.SIGALRM))


def describe_stacks(callers: Iterable[int]) -> str:
    """The stacks of the main thread and of the threads that have called horo: the last calls, the innermost last.

    They end at the line of the program that calls horo.
    """
    frames = current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = dict.fromkeys([threading.main_thread().ident, *callers])
    parts = []
    for thread in threads:
        if thread in frames:
            calls = _up_to_horo(traceback.extract_stack(frames[thread]))
            lines = "".join(traceback.format_list(calls[-_CALLS_SHOWN:]))
            parts.append(f"thread {names.get(thread, thread)!r}:\n{lines.rstrip()}")
    frames.clear()
    return "\n".join(parts)


def _up_to_horo(calls: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The calls without the innermost ones if these are horo's, which say nothing to the user."""
    end = len(calls)
    while end > 0 and (is_of_horo(calls[end - 1].filename) or _real(calls[end - 1].filename) in _WAITS):
        end -= 1
    first = next((i for i in range(end, len(calls)) if is_of_horo(calls[i].filename)), len(calls))
    return calls[:first] or calls


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaits_work(frame: FrameType) -> bool:
    """Whether a thread runs code of libraries only and waits as an idle worker, or in horo for a request of stacks."""
    file = frame.f_code.co_filename
    is_idle = _real(file) in _WAITS or is_of_horo(file)
    return is_idle and all(_is_of_library(each.f_code.co_filename) for each in _outwards(frame))


def _find_wait(frame: FrameType, context: object, wait: CodeType, *, is_looking: bool) -> Wait | None:
    above: FrameType | None = None
    for each in _outwards(frame):
        if each.f_code is wait and (found := locals_of(each)).get("self") is context:
            # The frame above belongs to this inspection, or to asynchronous code: a signal handler, a finalizer.
            is_own = is_looking or above is None or is_of_horo(above.f_code.co_filename)
            return Wait(found["handle"], place_of(each)) if is_own else None
        above = each
    return None


def _find_call(frame: FrameType) -> object | None:
    """The call of another thread that this one does."""
    return next((locals_of(each)["self"] for each in _outwards(frame) if each.f_code is ThreadCall.run.__code__), None)


def _place_of_caller(frames: Mapping[int, FrameType], call: object) -> str:
    """The line of the program that waits for a call; empty if none does any more."""
    waiters = (each for each in frames.values() if each.f_code is ThreadCall.wait.__code__)
    return next((place_of(each) for each in waiters if locals_of(each)["self"] is call), "")


def _is_in_backward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_engine_run_backward" and "torch" in Path(frame.f_code.co_filename).parts


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether the thread was not started through Python's ``threading``."""
    return isinstance(thread, threading._DummyThread)
