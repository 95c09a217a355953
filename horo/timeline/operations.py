"""The operations in the timeline of one rank, each from its submission to its result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from horo.timeline.reading import Timeline, is_number

__all__ = ["Batch", "Key", "TracedRequest", "batches_of", "operations_of"]

_JOINT = ("ALLREDUCE", "ADASUM", "REDUCESCATTER")
"""Operations that no rank finishes before all have begun: each result needs data of all ranks."""
_RANK = re.compile(r"[0-9]{1,9}")
Key = tuple[int, int]
"""The id of a team, and the place of a record in its log, which are the same on all ranks."""


class TracedRequest(NamedTuple):
    """One request, in microseconds since the begin of its timeline."""

    key: Key
    row: int
    name: str
    """As the timeline has it: ``ALLREDUCE``."""
    submitted_us: float
    begun_us: float
    ended_us: float
    moved: str
    """The move of its data: ``SHM_ALLREDUCE``; empty: there is none."""
    bytes: int
    ready_us: tuple[tuple[int, float], ...]
    """Ranks, each with the time at which rank 0 knew that it was ready; other ranks know none."""


class Batch(NamedTuple):
    """One rank's part in one record of a team's log, in microseconds of its clock."""

    submitted_us: float
    """The last of its requests; no rank begins before that."""
    begun_us: float
    joint_end_us: float | None
    """The first end of an operation that needs all ranks to have begun; None: there is none."""


def operations_of(timeline: Timeline) -> Iterator[TracedRequest]:
    """The requests with a place in a log, in the order of their ends."""
    began: dict[int, list[tuple[str, float]]] = {}
    ready: dict[int, dict[int, float]] = {}
    for event in timeline.events:
        kind, row = event.get("ph"), event.get("pid", 0)
        if kind == "B":
            began.setdefault(row, []).append((event["name"], event["ts"]))
        elif kind == "X" and _RANK.fullmatch(event["name"]):
            ready.setdefault(row, {})[int(event["name"])] = event["ts"]
        elif kind == "E" and "record" in event.get("args", ()):
            args, begun, ticks = event["args"], began.pop(row, []), ready.pop(row, {})
            negotiations = [index for index, (name, _) in enumerate(begun) if name.startswith("NEGOTIATE_")]
            if negotiations and len(begun) >= negotiations[-1] + 2:  # then the operation, and what has moved the data
                (_, submitted_us), (name, begun_us), *data = begun[negotiations[-1] :]
                size = args.get("bytes")
                if not submitted_us <= begun_us <= event["ts"]:
                    continue  # of a file that was changed
                yield TracedRequest(
                    (args["team"], args["record"]),
                    row,
                    name,
                    submitted_us,
                    begun_us,
                    event["ts"],
                    data[0][0] if data else "",
                    size if is_number(size, whole=True) else 0,
                    tuple(ticks.items()),
                )


def batches_of(timeline: Timeline) -> dict[Key, Batch]:
    """By team and place in its log."""
    found: dict[Key, Batch] = {}
    for each in operations_of(timeline):
        is_joint = each.name in _JOINT and each.moved
        batch = Batch(
            each.submitted_us + timeline.began_us,
            each.begun_us + timeline.began_us,
            each.ended_us + timeline.began_us if is_joint else None,
        )
        found[each.key] = _joined(found.get(each.key), batch)
    return found


def _joined(one: Batch | None, other: Batch) -> Batch:
    if one is None:
        return other
    ends = [batch.joint_end_us for batch in (one, other) if batch.joint_end_us is not None]
    return Batch(
        max(one.submitted_us, other.submitted_us), min(one.begun_us, other.begun_us), min(ends) if ends else None
    )
