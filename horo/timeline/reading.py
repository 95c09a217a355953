"""Reads the timeline of one rank."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Batch", "Timeline", "TimelineError", "batches_of", "read_timeline"]

_JOINT = ("ALLREDUCE", "ADASUM", "REDUCESCATTER")
"""Operations that no rank finishes before all have begun: each result needs data of all ranks."""


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


class Batch(NamedTuple):
    """One rank's part in one record of a team's log, in microseconds of its clock."""

    submitted_us: float
    """The last of its requests; no rank begins before that."""
    begun_us: float
    joint_end_us: float | None
    """The first end of an operation that needs all ranks to have begun; None: there is none."""


def read_timeline(path: str) -> Timeline:
    """Reads a file, also one whose end was not written.

    Raises:
        TimelineError: it cannot be read, or is no timeline of horo.
    """
    try:
        text = _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TimelineError(f"{path}: cannot be read: {reason}") from None
    is_torn = False
    try:
        events = json.loads(text)
    except (ValueError, RecursionError):
        events, is_torn = list(_whole_lines(text)), True
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
        raise TimelineError(f"{path}: is no timeline of a rank of horo") from None


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
    if not isinstance(kind, str) or not isinstance(args, dict) or not _is_number(event.get("pid", 0), whole=True):
        return False
    if kind == "M":
        return isinstance(event.get("name"), str) and (
            event["name"] != "process_name" or event.get("pid", 0) == 0 or isinstance(args.get("name"), str)
        )
    has_place = "record" not in args or all(_is_number(args.get(name), whole=True) for name in ("team", "record"))
    has_name = kind not in ("B", "X", "i") or isinstance(event.get("name"), str)
    return has_place and has_name and "pid" in event and _is_number(event.get("ts"))


def _is_number(value: object, *, whole: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < float("inf") and (isinstance(value, int) or not whole)


def batches_of(timeline: Timeline) -> dict[tuple[int, int], Batch]:
    """By team and place in its log, which are the same on all ranks."""
    found: dict[tuple[int, int], Batch] = {}
    began: dict[int, list[tuple[str, float]]] = {}
    for event in timeline.events:
        kind, row = event.get("ph"), event.get("pid", 0)
        if kind == "B":
            began.setdefault(row, []).append((event["name"], event["ts"]))
        elif kind == "E" and "record" in event.get("args", ()):
            batch = _batch(began.pop(row, []), event["ts"], timeline.began_us)
            if batch is not None:
                key = event["args"]["team"], event["args"]["record"]
                found[key] = _joined(found.get(key), batch)
    return found


def _batch(begun: list[tuple[str, float]], end_us: float, offset_us: float) -> Batch | None:
    """Of what a row has begun, in order: the negotiation, the operation, what has moved the data."""
    operations = [index for index, (name, _) in enumerate(begun) if name.startswith("NEGOTIATE_")]
    if not operations or len(begun) < operations[-1] + 2:
        return None
    (_, submitted_us), (name, begun_us), *data = begun[operations[-1] :]
    is_joint = name in _JOINT and bool(data)
    return Batch(submitted_us + offset_us, begun_us + offset_us, end_us + offset_us if is_joint else None)


def _joined(one: Batch | None, other: Batch) -> Batch:
    if one is None:
        return other
    ends = [batch.joint_end_us for batch in (one, other) if batch.joint_end_us is not None]
    return Batch(
        max(one.submitted_us, other.submitted_us), min(one.begun_us, other.begun_us), min(ends) if ends else None
    )
