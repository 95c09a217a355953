"""The counts of the ranks of one host, read from the page that the agent shares with each of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from horo.diagnostics import page
from horo.diagnostics.on_signal import STACKS_SIGNAL
from horo.runner.loop import Loop, Timer
from horo.runner.processes import send_signal

__all__ = ["RankCounts", "shows_stack"]

_CAUGHT = re.compile(rb"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
_RESIDENT = re.compile(rb"^VmRSS:\s*(\d+) kB$", re.MULTILINE)


class RankCounts:
    """Pages of the ranks that run here; each rank counts in its own, and is not disturbed by a look at it.

    Args:
        loop: calls back.
        emit: gets the number of a rank, and a note as the rank itself would write it.
    """

    def __init__(self, loop: Loop, emit: Callable[[int, bytes], None]) -> None:
        self._loop = loop
        self._emit = emit
        self._pages: dict[int, tuple[int, int]] = {}  # pid -> rank, descriptor
        self._every_s = 0.0
        self._timer: Timer | None = None

    def started(self, pid: int, rank: int, fd: int | None) -> None:
        """The rank runs, as process ``pid``, with a page or without one."""
        if fd is not None:
            self._pages[pid] = rank, fd

    def ended(self, pid: int) -> None:
        """It has ended, in any way: reports the steps that it has not reported itself."""
        rank, fd = self._pages.pop(pid, (0, -1))
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            left = page.read(fd)
            if left is not None:
                self._emit(rank, _line({"summary": left}))
        os.close(fd)

    def watch(self, every_s: float) -> None:
        """Reports what all ranks have counted so far, at once and again and again; 0: no more."""
        self._every_s = every_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if every_s:
            self._look()

    def show_stacks(self) -> None:
        """Has the ranks show where they stand, on stderr, if they can."""
        owners = [(page.owner(fd), pid) for pid, (_, fd) in self._pages.items()]
        send_signal([owner for owner, pid in owners if _is_of(owner, pid) and shows_stack(owner)], STACKS_SIGNAL)

    def close(self) -> None:
        """Closes the descriptors that are open."""
        self.watch(0)
        for _, fd in self._pages.values():
            os.close(fd)
        self._pages.clear()

    def _look(self) -> None:
        for pid, (rank, fd) in self._pages.items():
            with contextlib.suppress(OSError):
                now = page.read(fd, with_samples=False)
                if now is not None:
                    owner = page.owner(fd)
                    self._emit(
                        rank, _line({"now": {**now, "peak": _resident_bytes(owner) if _is_of(owner, pid) else 0}})
                    )
        self._timer = self._loop.call_later(self._every_s, self._look)


def shows_stack(pid: int) -> bool:
    """Whether a process has a handler for the request; else that would end it."""
    try:
        found = _CAUGHT.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _is_of(owner: int, rank: int) -> bool:
    """Whether a page's process is of the session of a rank; in a PID namespace its number is another process's here."""
    with contextlib.suppress(OSError):
        return owner > 0 and os.getsid(owner) == rank
    return False


def _line(values: dict[str, object]) -> bytes:
    return json.dumps(values).encode("ascii") + b"\n"


def _resident_bytes(pid: int) -> int:
    """The memory of a process now; 0: Linux does not tell."""
    with contextlib.suppress(OSError):
        found = _RESIDENT.search(Path(f"/proc/{pid}/status").read_bytes())
        return 1024 * int(found[1]) if found else 0
    return 0
