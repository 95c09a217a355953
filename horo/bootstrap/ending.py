"""Reports the exception that ends a rank to the other ranks and to hororun, and shortens its traceback.

Python calls ``sys.excepthook`` with the exception that ends the main thread. The hook that was set before prints the
traceback first. For ``SystemExit`` Python calls no hook and only reads its ``code``: so ``sys.exit`` raises a subclass
that detects a read by the interpreter. (``raise SystemExit(7)`` is not detected: the rank ends with its
script, and only hororun learns the code.) hororun reads messages, one line of JSON each, from a pipe that it has passed
to the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from horo.diagnostics.deadlock import innermost_own, is_of_horo
from horo.errors import DeadlockError, HoroError, InternalError, MismatchError

__all__ = [
    "EndReporter",
    "culprit_of",
    "culprit_of_chain",
    "describe_exception",
    "exit_status",
    "script_line",
    "shorten_traceback",
    "stay_behind_cause",
    "unwatch_exceptions",
    "watch_exceptions",
]

_HEAD_BYTES, _TAIL_BYTES = 520, 300
"""Of a long message. The remedy stands at its end; the core keeps 895 bytes, and a pipe takes 4096 as one write."""
_CULPRIT = re.compile(r"(?:init\(\) was given up because another rank failed: )?rank (\d+)\b")
_AFTER_CAUSE_S = 1.0
"""Time by which a rank that another one has ended stays behind it: torchrun and srun report the process that ends
first, and the cause may be slow to end."""


class EndReporter:
    """Messages to hororun about the end of this rank, sent over a pipe.

    Args:
        end_pipe: the value of ``HORO_END_PIPE``; None: there is none, and nothing is written.
        ranks: hororun's numbers of the ranks of this job, if they differ from the job's own.
    """

    def __init__(self, end_pipe: str | None, ranks: tuple[int, ...] | None = None) -> None:
        self._ranks = ranks
        self._fd = -1
        fd, _, inode = (end_pipe or "").partition(":")
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(int(fd))
            # A program between hororun and this process may have closed it, and the number may be that of another file.
            if stat.S_ISFIFO(status.st_mode) and status.st_ino == int(inode):
                self._fd = int(fd)

    @property
    def has_reader(self) -> bool:
        """Whether there is a hororun that reads the messages."""
        return self._fd >= 0

    def joined(self) -> None:
        """Reports that ``init()`` was called."""
        self._write({"joined": True, "awaits_all": self._ranks is None})

    def ended(self, error: str, where: str, culprit: int | None, status: int) -> None:
        """Reports that an exception ends this rank.

        Args:
            error: the exception.
            where: the line of the script.
            culprit: the rank that ended the group before; None: none did.
            status: what the process exits with, if nothing happens until then.
        """
        self._write({"error": error, "where": where, "points_at": self._number(culprit), "status": status})

    def lost(self, culprit: int | None) -> None:
        """Reports that ``culprit`` has ended the group; None: reports nothing."""
        if culprit is not None:
            self._write({"points_at": self._number(culprit)})

    def writes_timeline(self, path: str) -> None:
        """Reports the file of a timeline that is to be made of its rows if this rank cannot do so at its end."""
        self._write({"timeline": path})

    def summary(self, values: dict[str, object]) -> None:
        """Hands over the sums of this rank over its steps, for the card at the end of the job."""
        self._write({"summary": values})

    def elastic(self, **values: object) -> None:
        """Reports to the driver of an elastic job."""
        self._write({"elastic": values})

    def _number(self, rank: int | None) -> int | None:
        return rank if rank is None or self._ranks is None else self._ranks[rank]

    def _write(self, note: dict[str, object]) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # hororun is gone
                os.write(self._fd, json.dumps(note).encode() + b"\n")


def culprit_of(health: HoroError | None) -> int | None:
    """The rank that the core's message about the end of the group names as the cause; None: it names none."""
    if health is None or isinstance(health, (DeadlockError, MismatchError)):  # they name ranks, and none as the cause
        return None
    found = _CULPRIT.match(str(health))
    return int(found[1]) if found is not None else None


def culprit_of_chain(error: BaseException, kind: type[HoroError] = HoroError) -> int | None:
    """The rank that an exception names as the cause, or one that it came of, as an error of horo, else None.

    So a rank that another one has ended is known also where it has left the job before its exception ends it, or has
    not come through ``init()``.
    """
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is earlier for earlier in chain):
        culprit = culprit_of(each) if isinstance(each, kind) else None
        if culprit is not None:
            return culprit
        chain.append(each)
        each = each.__cause__ or each.__context__
    return None


def stay_behind_cause() -> None:
    """Waits for a second, or until a signal handler raises: that ends the wait, and the process goes on to its end."""
    with contextlib.suppress(BaseException):
        time.sleep(_AFTER_CAUSE_S)


def describe_exception(error: BaseException) -> str:
    """The exception as one line of printable characters: ``ValueError: bad sample in shard 7``.

    A long one lacks its middle.
    """
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be made)"
    name = type(error).__name__
    line = _cut(f"{name}: {message}" if message else name)
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line))


def _cut(line: str) -> str:
    data = line.encode("utf-8", "replace")
    if len(data) <= _HEAD_BYTES + _TAIL_BYTES:
        return data.decode()
    head, tail = data[:_HEAD_BYTES].decode(errors="ignore"), data[-_TAIL_BYTES:].decode(errors="ignore")
    return f"{head} ... {tail}"


def exit_status(error: BaseException) -> int:
    """The status of a process that this exception ends, as a shell has it."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    code = error.code if isinstance(error, SystemExit) else 1
    return code & 255 if isinstance(code, int) else 1


def script_line(traceback: TracebackType | None) -> str:
    """The innermost line outside libraries, else the innermost line: ``train.py, line 7``. Empty: there is none."""
    places = []
    while traceback is not None:
        places.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _innermost(places)


def _innermost(places: Sequence[tuple[str, int]]) -> str:
    if not places:
        return ""
    own = innermost_own([file for file, _ in places])
    file, line = places[-1 if own is None else own]
    return f"{Path(file).name}, line {line}"


def shorten_traceback(error: BaseException) -> None:
    """Removes the frames inside horo from the end of the traceback of an error that horo raises about other ranks.

    The place inside horo does not help the user: the last line of the traceback is then the call of horo in the script.
    """
    if not isinstance(error, HoroError) or isinstance(error, InternalError):
        return
    last, frame = None, error.__traceback__
    while frame is not None:
        if not is_of_horo(frame.tb_frame.f_code.co_filename):
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


class _Hook:
    """A function of the interpreter in whose place horo puts one of its own, which calls it."""

    def __init__(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._module, self._name, self._make = module, name, make
        self._before: Any = None
        self._own: Any = None

    def put(self) -> None:
        """Does nothing where it is in use."""
        if self._own is None:
            self._before = getattr(self._module, self._name)
            self._own = self._make(self._before)
            setattr(self._module, self._name, self._own)

    def take_back(self) -> None:
        """Does nothing where the program has put a function of its own there since, which may call this one."""
        if self._own is not None and getattr(self._module, self._name) is self._own:
            setattr(self._module, self._name, self._before)
            self._own = None


class _Watch:
    """The caller of ``watch_exceptions``."""

    tell: Callable[[BaseException, str], None] | None = None
    note_thread: Callable[[int | None, BaseException], None] | None = None
    process = 0

    def is_off(self) -> bool:
        return self.tell is None or os.getpid() != self.process


_watch = _Watch()


def watch_exceptions(
    tell: Callable[[BaseException, str], None],
    note_thread: Callable[[int | None, BaseException], None] | None = None,
) -> None:
    """Has ``tell`` called with the exception that ends this process, and with its ``script_line``.

    The traceback of the exception has been printed by then. A ``SystemExit`` counts if ``sys.exit`` was called in the
    main thread with a code that is not 0. ``note_thread`` is called with the identity of another thread and with the
    exception that has ended it.
    """
    _watch.tell, _watch.note_thread, _watch.process = tell, note_thread, os.getpid()
    for hook in _hooks:
        hook.put()


def unwatch_exceptions() -> None:
    """Takes the functions of the interpreter back, unless an exception is on its way that may end this process."""
    if sys.exc_info()[0] is None:
        _watch.tell = _watch.note_thread = None
        for hook in _hooks:
            hook.take_back()


def _make_excepthook(before: Any) -> Any:
    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # In an interactive session the process goes on.
        if _watch.is_off() or sys.flags.interactive or hasattr(sys, "ps1"):
            before(kind, error, traceback)
            return
        shorten_traceback(error)
        try:
            before(kind, error, error.__traceback__)
        finally:
            _tell(error, script_line(error.__traceback__))

    return hook


def _tell(error: BaseException, where: str) -> None:
    if _watch.tell is not None and not _watch.is_off():
        _watch.tell(error, where)


def _make_thread_hook(before: Any) -> Any:
    def hook(args: threading.ExceptHookArgs, /) -> None:
        try:
            before(args)
        finally:
            if _watch.note_thread is not None and not _watch.is_off() and args.exc_value is not None:
                _watch.note_thread(None if args.thread is None else args.thread.ident, args.exc_value)

    return hook


_CODE: Any = SystemExit.__dict__["code"]


class _Exit(SystemExit):
    """A ``SystemExit`` that differs from the original only in its type."""

    where = ""

    def _get_code(self) -> object:
        """The interpreter reads it, from no frame of Python, when this exception ends the process."""
        code: object = _CODE.__get__(self)
        if _has_no_caller(2) and code is not None and not (isinstance(code, int) and code == 0):
            _tell(self, self.where)
        return code

    def _set_code(self, code: object) -> None:
        _CODE.__set__(self, code)

    code = property(_get_code, _set_code)

    def __reduce__(self) -> tuple[type[SystemExit], tuple[object, ...]]:
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__
_Exit.__module__ = SystemExit.__module__


def _make_exit(before: Any) -> Any:
    @wraps(before)
    def leave(status: object = None, /) -> NoReturn:
        if threading.current_thread() is not threading.main_thread() or isinstance(status, BaseException):
            before(status)  # ends the thread alone, or is an exception of the program
        try:
            before(status)
        except SystemExit as error:
            ended = _Exit(*error.args)
        ended.where = _line_of_frame(sys._getframe(1))
        raise ended

    return leave


_hooks = (
    _Hook(sys, "excepthook", _make_excepthook),
    _Hook(sys, "exit", _make_exit),
    _Hook(threading, "excepthook", _make_thread_hook),
)


def _line_of_frame(frame: FrameType | None) -> str:
    """The line that ``script_line`` finds, but from a frame: while Python exits, the exception has no traceback."""
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _innermost(places[::-1])


def _has_no_caller(depth: int) -> bool:
    try:
        sys._getframe(depth)
    except ValueError:
        return True
    return False
