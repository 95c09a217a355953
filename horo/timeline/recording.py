"""The files of a timeline: the rows that a rank writes while it runs, and the events that are made of them at an end.

``FILE.rows`` lies beside ``FILE``, and its writer holds a lock of it until ``FILE`` is made and it is removed. The
system lets go of that lock when the writer dies; whoever finds it free makes ``FILE`` then: other ranks, hororun, or
``python -m horo.timeline FILE``. ``FILE`` is replaced as a whole, so it is JSON at all times.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

from horo.own_file import open_own_file
from horo.timeline.reading import TimelineError
from horo.timeline.rows import MAGIC, ROW, events_of

__all__ = ["Recording", "finish", "rows_of"]

_HEAD_MAX_BYTES = 1 << 20
_ROWS_PER_READ = 4096
_LOOK_S = 0.01
_PART = ".part"


def rows_of(path: str) -> str:
    """The file of the rows that ``path`` is made of."""
    return f"{path}.rows"


class Recording:
    """The timelines of one rank, one after the other. Not thread-safe.

    Args:
        words: for the numbers in rows, by ``ops`` and ``statuses``.
    """

    def __init__(self, words: Mapping[str, Mapping[int, str]]) -> None:
        self._words = words
        self._path = ""
        self._rows = -1

    def start(self, path: str, about: Mapping[str, Any], write_rows: Callable[[int], None]) -> None:
        """Begins one in ``path``, which is emptied. The one before ends, unless it is the same: that goes on.

        Args:
            path: of the file.
            about: arguments of its first event.
            write_rows: has the core write rows to a descriptor; -1: to the one before.

        Raises:
            TimelineError: the file cannot be written; the one before goes on.
        """
        if self._rows >= 0 and os.path.exists(path) and os.path.samefile(path, self._path):  # noqa: PTH110, PTH121
            write_rows(-1)
            return
        try:
            with os.fdopen(open_own_file(path), "wb") as file:
                file.write(b"[\n]\n")
            rows = _create(rows_of(path), like=path)
        except OSError as error:
            raise _unwritable(path, error) from None
        head = {
            **about,
            "start_time_since_epoch_in_micros": time.time_ns() // 1000,
            "monotonic_ns": time.monotonic_ns(),
            "words": self._words,
        }
        try:
            _lock(rows)
            _write_head(rows, path, MAGIC + json.dumps(head).encode() + b"\n")
            write_rows(rows)
        except BaseException:
            Path(rows_of(path)).unlink(missing_ok=True)
            os.close(rows)
            raise
        self.finish()
        self._path, self._rows = os.path.abspath(path), rows  # noqa: PTH100 - links stay as they are

    def finish(self) -> None:
        """Makes the file of its rows, once the core writes no more. If that fails, the log has the reason."""
        rows, self._rows = self._rows, -1
        if rows < 0:
            return
        try:
            _replace(self._path, rows, _PART)
        except (OSError, TimelineError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            logging.getLogger("horo").warning(
                "the timeline '%s' cannot be written: %s; its rows are in %s; 'python -m horo.timeline %s' makes it",
                self._path, reason, rows_of(self._path), self._path,
            )  # fmt: skip
        finally:
            os.close(rows)

    def after_fork(self) -> None:
        """In a forked child, to which nothing of this belongs: the lock is the parent's until it closes the rows."""
        rows, self._rows = self._rows, -1
        if rows >= 0:
            os.close(rows)


def finish(path: str, *, wait_s: float = 0.0, shows_now: bool = False) -> bool:
    """Makes a file of rows that an ended process has left; returns whether there were any.

    Args:
        path: of the timeline.
        wait_s: for the end of the process that writes them.
        shows_now: of one that is being written, makes the file as of now, and leaves the rows to their writer.

    Raises:
        TimelineError: the rows cannot be read, or the file cannot be written.
    """
    try:
        rows = os.open(rows_of(path), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TimelineError(f"{rows_of(path)}: cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(rows).st_mode):
            raise TimelineError(f"{rows_of(path)}: is no regular file")
        deadline_s = time.monotonic() + wait_s
        while not (is_free := _lock(rows)) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        if is_free or shows_now:
            return _replace(path, rows, _PART if is_free else ".now")
        return False
    except OSError as error:
        raise TimelineError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        os.close(rows)


def _create(path: str, *, like: str) -> int:
    """A new file in place of what is there, with the mode of another one."""
    Path(path).unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(os.stat(like).st_mode))  # noqa: PTH116 - as above
    return descriptor


def _write_head(rows: int, path: str, head: bytes) -> None:
    try:
        if os.write(rows, head) < len(head):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> TimelineError:
    return TimelineError(f"the timeline '{path}' cannot be written: {error.strerror}")


def _lock(rows: int) -> bool:
    """Whether no other process writes them; where there are no locks, it is up to the caller to know."""
    try:
        fcntl.flock(rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _replace(path: str, rows: int, suffix: str) -> bool:
    """Makes the file, by way of one with a suffix. The rows are removed, unless it has another one than ``_PART``.

    Returns False where another process has been faster, or has begun anew.
    """
    part = path + suffix
    if os.fstat(rows).st_nlink == 0:
        return False
    try:
        with os.fdopen(_create(part, like=path), "wb") as out, os.fdopen(rows, "rb", closefd=False) as source:
            source.seek(0)
            for number, event in enumerate(_events(path, source)):
                out.write((",\n" if number else "[\n").encode() + event.encode("utf-8", "replace"))
            out.write(b"\n]\n")
        if os.fstat(rows).st_nlink == 0:
            return False
        os.replace(part, path)  # noqa: PTH105 - as above
        if suffix == _PART:
            Path(rows_of(path)).unlink(missing_ok=True)
        return True
    finally:
        Path(part).unlink(missing_ok=True)


def _events(path: str, source: IO[bytes]) -> Iterator[str]:
    line = source.readline(_HEAD_MAX_BYTES)
    try:
        if not line.startswith(MAGIC):
            raise ValueError("not by horo")
        head = json.loads(line.removeprefix(MAGIC))
        yield from events_of(head, chain.from_iterable(_blocks(source)))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise TimelineError(f"{rows_of(path)}: has no rows of a timeline of horo") from None


def _blocks(source: IO[bytes]) -> Iterator[Iterator[tuple[Any, ...]]]:
    """A row that was cut short when its writer died is left out."""
    while block := source.read(ROW.size * _ROWS_PER_READ):
        yield ROW.iter_unpack(block[: len(block) // ROW.size * ROW.size])
