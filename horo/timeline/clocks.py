"""The differences between the clocks of machines, found in their timelines alone.

Ranks execute the records of a team's log together: none begins one before all have submitted its requests, and none
ends an allreduce before all have begun it. Each record bounds the difference of two clocks from both sides so.
Differences change with time, so there is one per second of the timeline, and a line between two of them.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horo.timeline.operations import Batch, Key, batches_of
from horo.timeline.reading import Timeline

__all__ = ["Alignment", "align"]

_WINDOW_US = 1e6


@dataclass(frozen=True)
class Alignment:
    """The offsets to add to the times of one clock to get those of the reference clock."""

    times_us: tuple[float, ...]
    """On this clock, rising."""
    offsets_us: tuple[float, ...]
    """At these times."""
    within_us: float | None
    """The true difference is at most so far away; None: not known, the date has decided."""

    def at(self, time_us: float) -> float:
        """The offset at a time of this clock; before the first and after the last known one, that one."""
        place = bisect.bisect_right(self.times_us, time_us)
        if place in (0, len(self.times_us)):
            return self.offsets_us[min(place, len(self.times_us) - 1)]
        (t0, t1), (o0, o1) = self.times_us[place - 1 : place + 1], self.offsets_us[place - 1 : place + 1]
        return o0 + (o1 - o0) * (time_us - t0) / (t1 - t0)


@dataclass
class _Together:
    """All ranks of one clock, at one record."""

    submitted_us: float  # the last
    first_begun_us: float
    last_begun_us: float
    joint_end_us: float  # the first; infinite: none

    def add(self, batch: Batch, offset_us: float = 0.0) -> None:
        self.submitted_us = max(self.submitted_us, batch.submitted_us + offset_us)
        self.first_begun_us = min(self.first_begun_us, batch.begun_us + offset_us)
        self.last_begun_us = max(self.last_begun_us, batch.begun_us + offset_us)
        if batch.joint_end_us is not None:
            self.joint_end_us = min(self.joint_end_us, batch.joint_end_us + offset_us)


def _nothing() -> _Together:
    return _Together(-math.inf, math.inf, -math.inf, math.inf)


def align(timelines: Sequence[Timeline]) -> dict[str, Alignment]:
    """The alignment of each clock to that of the first timeline."""
    by_clock: dict[str, list[dict[Key, Batch]]] = defaultdict(list)
    for timeline in timelines:
        by_clock[timeline.clock].append(batches_of(timeline))
    found = {timelines[0].clock: Alignment((0.0,), (0.0,), 0.0)}
    aligned: dict[Key, _Together] = defaultdict(_nothing)
    _take_in(aligned, by_clock.pop(timelines[0].clock), found[timelines[0].clock])
    while by_clock:
        shared = {clock: _shared(aligned, batches) for clock, batches in by_clock.items()}
        clock = max(shared, key=lambda each: len(shared[each]))
        found[clock] = _fit(shared[clock]) if shared[clock] else _by_date(timelines, clock)
        _take_in(aligned, by_clock.pop(clock), found[clock])
    return found


def _take_in(aligned: dict[Key, _Together], ranks: Sequence[Mapping[Key, Batch]], alignment: Alignment) -> None:
    for batches in ranks:
        for key, batch in batches.items():
            aligned[key].add(batch, alignment.at(batch.begun_us))


def _shared(aligned: Mapping[Key, _Together], ranks: Sequence[Mapping[Key, Batch]]) -> list[tuple[float, float, float]]:
    """The time on the new clock of each record that both sides have, with the least and the greatest offset."""
    own: dict[Key, _Together] = defaultdict(_nothing)
    for batches in ranks:
        for key, batch in batches.items():
            if key in aligned:
                own[key].add(batch)
    bounds = []
    for key, here in own.items():
        there = aligned[key]
        least = max(there.submitted_us - here.first_begun_us, there.last_begun_us - here.joint_end_us)
        greatest = min(there.first_begun_us - here.submitted_us, there.joint_end_us - here.last_begun_us)
        bounds.append((here.first_begun_us, least, greatest))
    return bounds


def _fit(bounds: Sequence[tuple[float, float, float]]) -> Alignment:
    least, greatest = max(low for _, low, _ in bounds), min(high for _, _, high in bounds)
    if least <= greatest:  # one offset is true throughout
        return Alignment((bounds[0][0],), ((least + greatest) / 2,), (greatest - least) / 2)
    windows: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for bound in bounds:
        windows[int(bound[0] // _WINDOW_US)].append(bound)
    times, offsets, within = [], [], 0.0
    for _, part in sorted(windows.items()):
        least, greatest = max(low for _, low, _ in part), min(high for _, _, high in part)
        times.append(sum(time for time, _, _ in part) / len(part))
        offsets.append((least + greatest) / 2)
        within = max(within, abs(greatest - least) / 2)
    return Alignment(tuple(times), tuple(offsets), within)


def _by_date(timelines: Sequence[Timeline], clock: str) -> Alignment:
    """No record is on both sides: the dates at which the timelines have begun are all that there is."""
    reference = timelines[0]
    other = next(timeline for timeline in timelines if timeline.clock == clock)
    offset = (other.began_epoch_us - reference.began_epoch_us) - (other.began_us - reference.began_us)
    return Alignment((0.0,), (offset,), None)
