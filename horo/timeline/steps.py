"""The steps in timelines on one clock, and the waits of each rank for the last one. Pure."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from horo.diagnostics.slowest import slowest_of
from horo.timeline.operations import Key, TracedRequest, operations_of
from horo.timeline.reading import Timeline

__all__ = ["BlockedTime", "StepCourse", "steps_of"]

_GRADIENT = "gradient."
_NO_STEP = (".noname", ".check.parameters", ".check.inputs", ".check.samples")
_VIAS = {"SHM": "shared memory"}


class BlockedTime(NamedTuple):
    """A time in which a rank is taken to be blocked: from its last submission to its last result before the next."""

    begun_us: float
    ready_us: float
    """All ranks have begun what this one has submitted: from then on, data moves."""
    ended_us: float
    awaited: TracedRequest
    """The operation of this rank that began last."""
    last: TracedRequest
    """The same of the rank that has submitted it last."""
    last_rank: int


@dataclass(frozen=True)
class StepCourse:
    """StepCourse and waits of ranks.

    Attributes:
        waits: of each rank, in order.
        ends_us: of each rank, the ends of its steps; all have equally many.
        step_s: of a mean step, in seconds; 0: there are no two.
        facts: for the card, as those at the end of a job.
    """

    waits: dict[int, list[BlockedTime]]
    ends_us: dict[int, list[float]]
    step_s: float
    facts: dict[str, Any]


def steps_of(timelines: Sequence[Timeline]) -> StepCourse:
    """The course of a job.

    A step is from one result of a tensor to the next; the tensor is the one that comes most often, a gradient if there
    is any. Operations without a name count as no step.

    Args:
        timelines: of different ranks, on one clock.
    """
    operations = {each.rank: list(operations_of(each)) for each in timelines}
    records = _records(operations)
    waits = {rank: list(_waits(own, records)) for rank, own in operations.items()}
    marks = _marks(timelines, operations)
    ends_us = {rank: _ends(marks[rank], waits[rank]) for rank in operations}
    parts = {rank: _parts(ends_us[rank], waits[rank]) for rank in operations}
    step = _mean(list(parts.values()))
    is_whole = len(timelines) >= timelines[0].size
    samples = _samples(parts) if is_whole else _by_ticks(waits.get(0, []), ends_us.get(0, []), timelines[0].size)
    facts = _facts(timelines, operations, ends_us, samples, step)
    return StepCourse(waits, ends_us, step["seconds"] if step else 0.0, facts)


class _Record(NamedTuple):
    last: TracedRequest
    last_rank: int
    begun_us: float  # the last


def _records(operations: dict[int, list[TracedRequest]]) -> dict[Key, _Record]:
    """Of each record, the last rank."""
    found: dict[Key, _Record] = {}
    for rank, own in operations.items():
        for each in own:
            known = found.get(each.key) or _Record(each, rank, each.begun_us)
            if each.submitted_us > known.last.submitted_us:
                known = known._replace(last=each, last_rank=rank)
            found[each.key] = known._replace(begun_us=max(known.begun_us, each.begun_us))
    return found


def _waits(own: Sequence[TracedRequest], records: dict[Key, _Record]) -> Iterator[BlockedTime]:
    wait: BlockedTime | None = None
    for each in sorted(own, key=lambda operation: operation.submitted_us):
        last, rank, ready_us = records[each.key]
        if wait is not None and each.submitted_us > wait.ended_us:
            yield _clipped(wait)
            wait = None
        if wait is None:
            wait = BlockedTime(each.submitted_us, ready_us, each.ended_us, each, last, rank)
            continue
        wait = wait._replace(begun_us=each.submitted_us, ended_us=max(wait.ended_us, each.ended_us))
        if ready_us > wait.ready_us:
            wait = wait._replace(ready_us=ready_us, awaited=each, last=last, last_rank=rank)
    if wait is not None:
        yield _clipped(wait)


def _clipped(wait: BlockedTime) -> BlockedTime:
    return wait._replace(ready_us=min(max(wait.ready_us, wait.begun_us), wait.ended_us))


def _marks(timelines: Sequence[Timeline], operations: dict[int, list[TracedRequest]]) -> dict[int, list[TracedRequest]]:
    """Of each rank, its operations that end a step; of records that all ranks have."""
    names = {each.rank: _names(each) for each in timelines}
    counts: Counter[str] = Counter()
    for rank, own in operations.items():
        counts.update(names[rank].get(each.row, "") for each in own)
    named = [name for name in counts if name and not name.endswith(_NO_STEP)]
    gradients = [name for name in named if name.startswith(_GRADIENT)]
    name = max(gradients or named, key=lambda each: counts[each], default="")
    marks = {
        rank: {each.key: each for each in own if names[rank].get(each.row) == name} for rank, own in operations.items()
    }
    common = sorted(set.intersection(*map(set, marks.values()))) if name else []
    return {rank: [own[key] for key in common] for rank, own in marks.items()}


def _names(timeline: Timeline) -> dict[int, str]:
    return {
        event["pid"]: event["args"]["name"]
        for event in timeline.events
        if event["ph"] == "M" and event.get("name") == "process_name" and event.get("pid")
    }


def _ends(marks: Sequence[TracedRequest], waits: Sequence[BlockedTime]) -> list[float]:
    """A step has ended when its rank goes on."""
    ends_us = [each.ended_us for each in waits]
    return [ends_us[bisect.bisect_left(ends_us, mark.ended_us)] for mark in marks]


class _Part(NamedTuple):
    seconds: float
    waiting: float
    moving: float


def _parts(ends_us: Sequence[float], waits: Sequence[BlockedTime]) -> list[_Part]:
    """Of each step but the first."""
    rest = iter(waits)
    wait = next(rest, None)
    parts = []
    for begun, ended in pairwise(ends_us):
        waiting = moving = 0.0
        while wait is not None and wait.ended_us <= ended:
            if wait.ended_us > begun:
                waiting += wait.ready_us - wait.begun_us
                moving += wait.ended_us - wait.ready_us
            wait = next(rest, None)
        parts.append(_Part((ended - begun) / 1e6, waiting / 1e6, moving / 1e6))
    return parts


def _mean(by_rank: Sequence[Sequence[_Part]]) -> dict[str, float] | None:
    parts = [part for own in by_rank for part in own]
    if not parts:
        return None
    seconds, waiting, moving = (fmean(column) for column in zip(*parts, strict=True))
    return {
        "seconds": seconds,
        "computing": max(0.0, seconds - waiting - moving),
        "waiting": waiting,
        "moving": moving,
        "loading": 0.0,
    }


def _samples(parts: dict[int, list[_Part]]) -> dict[int, list[tuple[int, int, int]]]:
    return {
        rank: [(number, round(1e6 * each.waiting), 0) for number, each in enumerate(own, 2)]
        for rank, own in parts.items()
    }


def _by_ticks(
    waits: Sequence[BlockedTime], ends_us: Sequence[float], size: int
) -> dict[int, list[tuple[int, int, int]]]:
    """Samples of all ranks by the timeline of rank 0, which has a tick for each rank that is ready."""
    all_ends_us = [each.ended_us for each in waits]
    samples: dict[int, list[tuple[int, int, int]]] = {}
    for number, (begun, ended) in enumerate(pairwise(ends_us), 2):
        inside = waits[bisect.bisect_right(all_ends_us, begun) : bisect.bisect_right(all_ends_us, ended)]
        waited_us: dict[int, float] = {}
        for each in inside:
            for rank, at_us in each.awaited.ready_us if len(each.awaited.ready_us) == size else ():
                waited_us[rank] = waited_us.get(rank, 0.0) + max(0.0, each.ready_us - at_us)
        for rank, sum_us in waited_us.items():
            samples.setdefault(rank, []).append((number, round(sum_us), 0))
    return samples


def _facts(
    timelines: Sequence[Timeline],
    operations: dict[int, list[TracedRequest]],
    ends_us: dict[int, list[float]],
    samples: dict[int, list[tuple[int, int, int]]],
    step: dict[str, float] | None,
) -> dict[str, Any]:
    size, missing = timelines[0].size, timelines[0].size - len(timelines)
    slowest = slowest_of(samples, step["seconds"]) if step is not None else None
    notes = []
    if step is None:
        notes.append("no operation with a name comes again, by which steps could be known")
    if missing:
        unknown = "" if any(samples.values()) else ": the slowest is not known"
        notes.append(f"{missing} of {size} ranks are not in it{unknown}")
    return {
        "ranks": size,
        "hosts": len({each.host for each in timelines}),
        "steps": len(next(iter(ends_us.values()))),
        "steps_per_second": 1 / step["seconds"] if step is not None and step["seconds"] else None,
        "step": step,
        "slowest": None if slowest is None else vars(slowest),
        "traffic": _traffic(operations, ends_us),
        "memory": None,
        "gpu_memory": None,
        "ends": "",
        "notes": notes,
    }


def _traffic(operations: dict[int, list[TracedRequest]], ends_us: dict[int, list[float]]) -> dict[str, Any] | None:
    """Per step and rank."""
    steps = sum(len(ends) - 1 for ends in ends_us.values() if ends)
    inside = {
        rank: [each for each in own if ends_us[rank] and ends_us[rank][0] < each.ended_us <= ends_us[rank][-1]]
        for rank, own in operations.items()
    }
    every = [each for own in inside.values() for each in own]
    ways = Counter(each.moved.partition("_")[0] for each in every if each.moved)
    if not steps or not ways:
        return None
    between = max(ways, key=lambda way: (way != "SHM", ways[way]))
    return {
        "bytes": sum(each.bytes for each in every) / steps,
        "tensors": len(every) / steps,
        "batches": sum(len({each.key for each in own}) for own in inside.values()) / steps,
        "via": _VIAS.get(between, between),
    }
