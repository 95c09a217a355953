"""Reads the timeline of one rank, and those of all ranks in a file of ``merge``."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Timeline", "TimelineError", "is_number", "ranks_of", "read_merged", "read_timeline"]


class TimelineError(Exception):
    """A file is no timeline, or files do not belong together; the text names them."""


@dataclass(frozen=True)
class Timeline:
    """One rank's file."""

    path: str
    rank: int
    size: int
    host: str
    clock: str
    """Files with equal ones were written on one machine, by the same clock."""
    began_us: float
    """Time 0 of the file on that clock."""
    began_epoch_us: float
    """The same on the clock of the date, which may be wrong by any amount."""
    events: list[dict[str, Any]]
    is_torn: bool
    """The end of the file cannot be read: its writer, or the machine, was stopped in the middle of a write."""
    damaged: int
    """Number of its events that are not as horo writes them; ``events`` is without them."""


def read_timeline(path: str) -> Timeline:
    """Reads a file, also one whose end was not written.

    Raises:
        TimelineError: it cannot be read, or is no timeline of horo.
    """
    text = _text_of(path)
    events, is_torn = _events_in(text)
    try:
        head = events[0]["args"]
        well = [event for event in events if _is_well(event)]
        return Timeline(
            path=path,
            rank=int(head["rank"]),
            size=int(head["size"]),
            host=str(head["host"]),
            clock=str(head["clock"]),
            began_us=int(head["monotonic_ns"]) / 1e3,
            began_epoch_us=float(head["start_time_since_epoch_in_micros"]),
            events=well,
            is_torn=is_torn,
            damaged=len(events) - len(well),
        )
    except (LookupError, TypeError, ValueError, OverflowError):
        is_merged = isinstance(events, list) and any(
            "rank" in each.get("args", ()) for each in events if _is_well(each)
        )
        what = "has several ranks already: name it alone" if is_merged else "is no timeline of a rank of horo"
        raise TimelineError(f"{path}: {what}") from None


def read_merged(path: str) -> list[Timeline]:
    """The timelines of the ranks in a file of ``merge``, all on one clock; none: it is of one rank.

    Raises:
        TimelineError: it cannot be read, or is no timeline of horo.
    """
    events, is_torn = _events_in(_text_of(path))
    well = [event for event in events if _is_well(event)] if isinstance(events, list) else []
    about = [event["args"] for event in well if event.get("name") == "process_name" and "rank" in event.get("args", ())]
    if not about or not all(is_number(head.get(name), whole=True) for head in about for name in ("rank", "size")):
        raise TimelineError(f"{path}: is no timeline of horo")
    about = list({head["rank"]: head for head in about}.values())
    return [] if "monotonic_ns" in about[0] else ranks_of(well, about, path, is_torn=is_torn)


def ranks_of(
    events: Sequence[dict[str, Any]], about: Sequence[dict[str, Any]], path: str, *, is_torn: bool = False
) -> list[Timeline]:
    """Of the events of a merged file, those of each rank, as if it had a file of its own.

    Args:
        events: of all ranks, on one clock.
        about: of each rank, ``rank``, ``size`` and ``host``.
        path: of the file.
        is_torn: its end is missing.
    """
    by_rank: dict[int, list[dict[str, Any]]] = {head["rank"]: [] for head in about}
    for event in events:
        row, own = event.get("tid", 0), by_rank.get(event.get("pid", 0))
        if own is not None and event["ph"] in ("B", "E", "X"):
            own.append({**event, "pid": row})
        elif own is not None and event.get("name") == "thread_name" and row:
            own.append({**event, "pid": row, "name": "process_name"})
    return [
        Timeline(
            path, head["rank"], head["size"], str(head.get("host")), "", 0.0, 0.0, by_rank[head["rank"]], is_torn, 0
        )
        for head in about
    ]


def _text_of(path: str) -> str:
    try:
        return _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TimelineError(f"{path}: cannot be read: {reason}") from None


def _events_in(text: str) -> tuple[Any, bool]:
    """The events, and whether the end of the file is missing."""
    try:
        return json.loads(text), False
    except (ValueError, RecursionError):
        return list(_whole_lines(text)), True


def _read(path: str) -> str:
    """The text of a regular file; nothing else is waited for, such as the writer of a FIFO."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EPERM, "it is no regular file", path)
        return file.read().decode("utf-8")


def _whole_lines(text: str) -> Iterator[dict[str, Any]]:
    """Each event is a line."""
    for line in text.splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _is_well(event: object) -> bool:
    """Whether it has what is read of an event, in the types that horo writes."""
    if not isinstance(event, dict):
        return False
    kind, args = event.get("ph"), event.get("args", {})
    if not isinstance(kind, str) or not isinstance(args, dict):
        return False
    if not all(is_number(event.get(name, 0), whole=True) for name in ("pid", "tid")):
        return False
    if kind == "M":
        names_row = event.get("name") == "thread_name" or (event.get("name") == "process_name" and event.get("pid"))
        return isinstance(event.get("name"), str) and (not names_row or isinstance(args.get("name"), str))
    has_place = "record" not in args or all(is_number(args.get(name), whole=True) for name in ("team", "record"))
    has_name = kind not in ("B", "X", "i") or isinstance(event.get("name"), str)
    return has_place and has_name and "pid" in event and is_number(event.get("ts"))


def is_number(value: object, *, whole: bool = False) -> bool:
    """Whether it is a finite number, or a whole one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < float("inf") and (isinstance(value, int) or not whole)
