"""Puts the timelines of several ranks into one: a process of the format for each rank, a thread for each tensor."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from horo.diagnostics.slowest import BEHIND_MIN
from horo.own_file import open_own_file
from horo.timeline.clocks import Alignment, align
from horo.timeline.reading import Timeline, TimelineError, ranks_of, read_merged, read_timeline
from horo.timeline.recording import finish
from horo.timeline.steps import BlockedTime, steps_of

__all__ = ["merge", "together"]

_ARROW_MIN_US = 1000.0
_NAMED_MAX = 3


def merge(out: str, paths: Sequence[str]) -> list[str]:
    """Writes one file with the events of all those in ``paths``, with times on the clock of the lowest rank.

    Args:
        out: the file to write; it is overwritten, unless it is a timeline of a rank.
        paths: of files of different ranks of one job, each written with ``{rank}`` in its path. What a rank has not
            ended is made first.

    Returns:
        Sentences for the user: the file that was written, and how exactly the clocks are aligned.

    Raises:
        TimelineError: a file is no timeline, two do not belong together, or ``out`` cannot be written.
    """
    if any(Path(out).resolve() == Path(path).resolve() for path in paths):
        raise TimelineError(f"{out}: is among the files to be merged; name another one for the result")
    for path in paths:
        finish(path, shows_now=True)
    _keep_timeline(out)
    timelines = sorted((read_timeline(path) for path in paths), key=lambda timeline: timeline.rank)
    _check(timelines)
    alignments = align(timelines)
    heads, timed = _merged(timelines, alignments)
    arrows = list(_arrows(heads, timed))
    shown = [*heads, *sorted([*timed, *arrows], key=_time_of)]
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in shown)
    try:
        with os.fdopen(open_own_file(out), "wb") as file:
            file.write(f"[\n{lines}\n]\n".encode(errors="backslashreplace"))  # a lone surrogate as JSON escapes it
    except OSError as error:
        raise TimelineError(f"{out}: cannot be written: {error.strerror}") from None
    late = Counter(event["args"]["rank"] for event in arrows if event["ph"] == "s")
    told = f"{out}: {_ranks(timelines)}, {len(timed)} events"
    if late:
        most = ", ".join(f"{number} for rank {rank}" for rank, number in late.most_common(_NAMED_MAX))
        told += f", {len(arrows) // 2} arrows to ranks that waited: {most}"
    remarks = [told, *_remarks(timelines, alignments)]
    missing = timelines[0].size - len(timelines)
    return [*remarks, f"{missing} of {timelines[0].size} ranks are not among the files"] if missing else remarks


def together(paths: Sequence[str]) -> tuple[list[Timeline], list[str]]:
    """The timelines of ranks on one clock, from a file of ``merge``, or from files of ranks as for ``merge``.

    Returns:
        The timelines, and sentences for the user on what is missing in them.

    Raises:
        TimelineError: a file is no timeline, or two do not belong together.
    """
    for path in paths:
        finish(path, shows_now=True)
    if len(paths) == 1 and (merged := read_merged(paths[0])):
        return merged, [f"{paths[0]}: its end was not written"] if merged[0].is_torn else []
    timelines = sorted((read_timeline(path) for path in paths), key=lambda timeline: timeline.rank)
    _check(timelines)
    alignments = align(timelines)
    heads, timed = _merged(timelines, alignments)
    return ranks_of([*heads, *timed], _about(heads), ""), list(_remarks(timelines, alignments))


def _merged(
    timelines: Sequence[Timeline], alignments: dict[str, Alignment]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The heads of all, and all events on one clock."""
    begin_us = min(each.began_us + alignments[each.clock].at(each.began_us) for each in timelines)
    heads = [head for timeline in timelines for head in _heads(timeline)]
    heads[0]["args"]["start_time_since_epoch_in_micros"] = int(
        timelines[0].began_epoch_us + begin_us - timelines[0].began_us
    )
    timed = [event for each in timelines for event in _timed(each, alignments[each.clock], begin_us)]
    timed.sort(key=_time_of)  # what is of one rank stays in its order
    return heads, timed


def _ranks(timelines: Sequence[Timeline]) -> str:
    return "1 rank" if len(timelines) == 1 else f"{len(timelines)} ranks"


def _about(heads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [head["args"] for head in heads if head["name"] == "process_name"]


def _time_of(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _keep_timeline(out: str) -> None:
    """Of ``merge t-*.json`` the first file would be the result. An earlier result may be replaced."""
    try:
        rank = read_timeline(out).rank
    except TimelineError:
        return
    raise TimelineError(f"{out}: is the timeline of rank {rank}; name the file for the result first")


def _check(timelines: Sequence[Timeline]) -> None:
    if not timelines:
        raise TimelineError("no files to merge")
    for one, other in pairwise(timelines):
        if one.rank == other.rank:
            raise TimelineError(f"{one.path} and {other.path}: both are of rank {one.rank}")
        if one.size != other.size:
            raise TimelineError(
                f"{one.path} and {other.path}: are of two jobs, of {one.size} and of {other.size} ranks"
            )


def _heads(timeline: Timeline) -> Iterator[dict[str, Any]]:
    def metadata(name: str, row: int, member: str, value: str | int) -> dict[str, Any]:
        return {"name": name, "ph": "M", "pid": timeline.rank, "tid": row, "args": {member: value}}

    head = metadata("process_name", 0, "name", f"rank {timeline.rank} on {timeline.host}")
    head["args"] |= {"rank": timeline.rank, "size": timeline.size, "host": timeline.host}
    yield head
    yield metadata("process_sort_index", 0, "sort_index", timeline.rank)
    yield metadata("thread_name", 0, "name", "marks")
    for event in timeline.events:
        if event.get("ph") == "M" and event["pid"] != 0 and event["name"] == "process_name":
            yield metadata("thread_name", event["pid"], "name", event["args"]["name"])
            yield metadata("thread_sort_index", event["pid"], "sort_index", event["pid"])


def _timed(timeline: Timeline, alignment: Alignment, begin_us: float) -> Iterator[dict[str, Any]]:
    latest_us = 0.0
    open_rows: dict[int, int] = {}
    for event in timeline.events:
        if event.get("ph") not in ("B", "E", "X", "i"):
            continue
        row = event["pid"]
        time_us = event["ts"] + timeline.began_us
        latest_us = max(latest_us, round(time_us + alignment.at(time_us) - begin_us, 3))
        open_rows[row] = open_rows.get(row, 0) + {"B": 1, "E": -1}.get(event["ph"], 0)
        moved = {**event, "ts": latest_us, "pid": timeline.rank, "tid": row}
        if event["ph"] == "i":
            moved["s"] = "p"  # of its rank, where it was of all in that rank's file
        yield moved
    for row, count in open_rows.items():  # of a file that was left while its rank was at work
        for _ in range(count):
            yield {"ph": "E", "ts": latest_us, "pid": timeline.rank, "tid": row}


def _arrows(heads: Sequence[dict[str, Any]], timed: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """From the submission of the last rank to the end of the wait of each rank that was blocked for it."""
    course = steps_of(ranks_of([*heads, *timed], _about(heads), ""))
    least_us = 1e6 * BEHIND_MIN * course.step_s or _ARROW_MIN_US
    waits = [(rank, each) for rank, own in course.waits.items() for each in own if rank != each.last_rank]
    for number, (rank, wait) in enumerate(waits, 1):
        is_ahead = wait.awaited.begun_us < wait.last.submitted_us  # the clocks are known less well than that
        if wait.last.submitted_us - wait.begun_us >= least_us and not is_ahead:
            yield from _arrow(number, rank, wait)


def _arrow(number: int, rank: int, wait: BlockedTime) -> Iterator[dict[str, Any]]:
    about = {"name": f"wait for rank {wait.last_rank}", "cat": "wait", "id": number}
    args = {"rank": wait.last_rank, "waited_ms": round((wait.last.submitted_us - wait.begun_us) / 1e3, 3)}
    yield {**about, "ph": "s", "ts": wait.last.submitted_us, "pid": wait.last_rank, "tid": wait.last.row, "args": args}
    yield {**about, "ph": "f", "bp": "e", "ts": wait.awaited.begun_us, "pid": rank, "tid": wait.awaited.row}


def _remarks(timelines: Sequence[Timeline], alignments: dict[str, Alignment]) -> Iterator[str]:
    for timeline in timelines:
        if timeline.damaged:
            yield f"{timeline.path}: is damaged; {timeline.damaged} of its events are not in the result"
        if timeline.is_torn:
            yield f"{timeline.path}: its end was not written; what was there is in the result"
    reference = timelines[0]
    hosts = {timeline.clock: timeline.host for timeline in reversed(timelines)}
    for clock, alignment in alignments.items():
        if clock == reference.clock:
            continue
        if alignment.within_us is None:
            yield (
                f"{hosts[clock]}: shares no operation with the other files; its times are as right as the dates of "
                f"{reference.host} and {hosts[clock]}"
            )
        else:
            yield f"{hosts[clock]}: its times are right to {alignment.within_us:.1f} us, beside {reference.host}"
