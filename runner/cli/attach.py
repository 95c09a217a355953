"""``hororun --attach PID``: the course of a job that another hororun of this user runs here."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from horo.runner.config import EXIT_UNREACHABLE, JobError
from horo.runner.job.attach_server import ATTACH_LINE, STACKS, WATCH, address_of, peer_of
from horo.runner.job.output import redraw_possible
from horo.runner.stdout import show
from horo.runner.text import printable

__all__ = ["attach", "course_of"]

_CONNECT_S = 5
_TIME = struct.Struct("@ll")
_STACKS_S = 1.0
"""Without a line of a stack: all have come."""
_FIRST_STACK_S = 5.0
_PLAIN_EVERY_S = 30.0
_READ_BYTES = 1 << 16
_SOCKETS = Path("/proc/net/unix")
_NAME = re.compile(r"@horo/hororun/(\d+)$", re.MULTILINE)
_ERASE, _NO_WRAP, _WRAP = "\r\x1b[2K", "\x1b[?7l", "\x1b[?7h"


def attach(pid: int, *, stacks: bool) -> int:
    """Shows the line of ``--live`` until the job ends or Ctrl-C comes, which the job does not notice.

    Args:
        pid: of the hororun.
        stacks: shows the stacks of the ranks instead, and ends.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        JobError: it is not there, or another user's; or stdout takes no more.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        if stacks:
            with _connect(pid) as connection:
                return _show_stacks(connection)
        return _show_line(pid)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def course_of(pid: int) -> Iterator[str]:
    """The line of ``--live``, as often as it is drawn, until the job is over; empty: there is none yet.

    Args:
        pid: of the hororun.

    Raises:
        JobError: it is not there, or another user's.
    """
    with _connect(pid) as connection:
        for lines in _lines(connection, WATCH):
            yield lines[-1].removeprefix(ATTACH_LINE.decode())


def _connect(pid: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(_CONNECT_S, 0))
    try:
        connection.connect(address_of(pid))
    except BlockingIOError:
        connection.close()
        raise JobError(
            f"--attach {pid}: no answer within {_CONNECT_S} s: it is stopped, and others wait for it; "
            f"'kill -CONT {pid}' continues it",
            EXIT_UNREACHABLE,
        ) from None
    except BaseException as error:
        connection.close()
        if not isinstance(error, OSError):
            raise
        others = ", ".join(_running()) or "none"
        raise JobError(
            f"--attach {pid}: no hororun that can be attached to runs here under this number; those that run: {others}",
            EXIT_UNREACHABLE,
        ) from None
    owner, user = peer_of(connection)
    if owner != pid or (user != os.geteuid() and os.geteuid() != 0):
        connection.close()
        raise JobError(f"--attach {pid}: this process belongs to another user", EXIT_UNREACHABLE)
    return connection


def _running() -> list[str]:
    """The numbers of those that can be attached to, as far as this user sees them."""
    with contextlib.suppress(OSError):
        found = map(int, _NAME.findall(_SOCKETS.read_text("ascii", "replace")))
        return [str(pid) for pid in sorted(set(found)) if _is_mine(pid)]
    return []


def _is_mine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.geteuid() in (0, Path(f"/proc/{pid}").stat().st_uid)
    return False


def _lines(
    connection: socket.socket, request: bytes, *, first_s: float | None = None, next_s: float | None = None
) -> Iterator[list[str]]:
    """Whole lines, until the other end is closed, or none has come for a time.

    They move no cursor and take little memory, whoever writes them: for root, any user's program may be there.
    """
    held, wait_s = b"", first_s
    with contextlib.suppress(ConnectionError):
        connection.sendall(request)
        while select.select([connection], [], [], wait_s)[0] and (data := connection.recv(_READ_BYTES)):
            *lines, held = (held + data).split(b"\n")
            held = held[-_READ_BYTES:]
            if lines:
                wait_s = next_s
                yield [printable(each.decode("utf-8", "replace")) for each in lines]


def _show_stacks(connection: socket.socket) -> int:
    shown = False
    for lines in _lines(connection, STACKS, first_s=_FIRST_STACK_S, next_s=_STACKS_S):
        show("\n".join(lines))
        shown = True
    if not shown:
        sys.stderr.write(
            "hororun: no rank has shown its stack: they have not called init() yet, or hang in the kernel\n"
        )
    return 0


def _show_line(pid: int) -> int:
    is_terminal, shown_s = redraw_possible(1), float("-inf")
    try:
        for text in course_of(pid):
            if text and is_terminal:
                show(f"{_ERASE}{_NO_WRAP}{text}{_WRAP}", end="")
            elif text and time.monotonic() - shown_s >= _PLAIN_EVERY_S:
                show(text)
                shown_s = time.monotonic()
    finally:
        if is_terminal:
            show(_ERASE, end="")
    sys.stderr.write(f"hororun: the job of process {pid} is over\n")
    return 0
