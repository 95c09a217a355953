"""Notes of a rank on its own end, on a pipe from hororun; ``horo/bootstrap/ending.py`` writes it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TypeGuard

from horo.runner.agent.rank_summary import RankSummary, read_summary
from horo.runner.text import printable

__all__ = ["PIPE_NAME", "Note", "NoteReader", "open_pipe"]

PIPE_NAME = "HORO_END_PIPE"
_LINE_MAX_BYTES = 1 << 18
_RANK_MAX = (1 << 31) - 1
_STATUS_MAX = 255


@dataclass(frozen=True)
class Note:
    """The notes of a rank, put together.

    Attributes:
        joined: it has called ``init()``.
        awaits_all: that waits for all ranks of the job.
        error: the exception that ends it, ``ValueError: bad sample``; empty: none that horo knows of.
        where: the line of the script, ``train.py, line 7``.
        points_at: the rank that ended its group; None: none did.
        status: what it exits with by that exception, if it comes to its end.
        timelines: files whose rows it has begun to write.
        summary: its sums over steps; None: it has not told them.
        now: its sums at the last look of its agent, with its present memory as peak; None: nobody has looked.
    """

    joined: bool = False
    awaits_all: bool = False
    error: str = ""
    where: str = ""
    points_at: int | None = None
    status: int = 1
    timelines: frozenset[str] = frozenset()
    summary: RankSummary | None = None
    now: RankSummary | None = None


class NoteReader:
    """Reads the lines of one rank; other lines than notes are passed over, since any program may inherit the pipe."""

    def __init__(self) -> None:
        self.note = Note()
        self._held = b""

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """``data`` came from the pipe; returns the reports to the driver of an elastic job that are in it."""
        elastic: list[dict[str, object]] = []
        *lines, held = (self._held + data).split(b"\n")
        self._held = held[-_LINE_MAX_BYTES:]
        for line in lines:
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                self._take(values)
                if isinstance(report := values.get("elastic"), dict):
                    elastic.append(report)
        return elastic

    def _take(self, values: dict[str, object]) -> None:
        timeline = values.get("timeline")
        points_at, status = values.get("points_at"), values.get("status")
        summary = read_summary(values.get("summary"))
        self.note = replace(
            self.note,
            joined=self.note.joined or values.get("joined") is True,
            awaits_all=self.note.awaits_all or values.get("awaits_all") is True,
            error=_text(values.get("error")) or self.note.error,
            where=_text(values.get("where")) or self.note.where,
            points_at=points_at if _is_rank(points_at) else self.note.points_at,
            status=status if _is_rank(status) and status <= _STATUS_MAX else self.note.status,
            timelines=self.note.timelines.union([timeline] if _is_path(timeline) else ()),
            now=read_summary(values.get("now")) or self.note.now,
            summary=self.note.summary if summary is None else summary.after(self.note.summary),
        )


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _RANK_MAX


def _is_path(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.startswith("/") and "\0" not in value


def _text(value: object) -> str:
    return printable(value) if isinstance(value, str) else ""


def open_pipe() -> tuple[int, int, str]:
    """A new pipe: its read end, its write end, and the variable by which a rank knows it again.

    A descriptor alone could be another file by then: whatever stands between hororun and the rank may close it.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    return read_fd, write_fd, f"{write_fd}:{os.fstat(write_fd).st_ino}"
