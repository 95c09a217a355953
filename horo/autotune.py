"""Autotuning, by rank 0: whole steps are measured, other values proposed to all ranks, the best ones kept.

``search`` is pure: it yields the point that is to be measured next, is sent the cost there, and returns one that costs
no more than the first. A *point* has an index into the values of each knob, which ascend by powers of two.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from horo.core.setup import KNOBS
from horo.own_file import open_own_file

if TYPE_CHECKING:
    from horo.core.context import Context

__all__ = ["Meter", "Point", "Search", "Tuner", "Winner", "search"]

Point = tuple[int, ...]

_SUCCESS = 0.97
"""Of the cost of the best point: what costs less is better; a smaller difference is noise."""
_WINS = 0.99
"""The same in the end, where medians are compared."""
_ROUNDS = 5
"""The samples of each finalist."""
_SKIPPED = 2
"""Steps that do not count: the one in which values have changed, and the next."""
_ABSENT = 100
"""After so many steps of other optimizers, the one whose steps were measured counts as gone."""
_OVERLAPS = ("", "never", "always")
_HEAD = (
    "sample,stage,segment_bytes,piece_bytes,sockets_per_peer,tensor_fusion_threshold,doubling_bytes,carried_bytes,"
    "cycle_time_ms,overlap,score\n"
)


class Winner(NamedTuple):
    """The end of a search. If several points were compared in the end, costs are medians."""

    point: Point
    cost: float
    first_cost: float


def search(
    counts: Sequence[int], first: Point, defaults: Point, *, warmup: int, most: int
) -> Generator[tuple[str, Point], float, Winner]:
    """Searches along one knob after the other, in their order: up, and down where that does not pay.

    By two indices at first, by one from the second round on, and twice as far after each success. A point that
    seems better is compared with the best one, measured again beside it. The search ends after a round without success
    from which no finer one follows, or when ``most`` points have been measured. Then the first point, the defaults and
    the best take turns: the winner is another than the first or the defaults, whichever is cheaper, only if it takes
    off 1 % there, too.

    Args:
        counts: The number of values of each knob; 1: it is not tuned.
        first: The point at which the job begins.
        defaults: The point at which it would begin if the user had set nothing.
        warmup: How often the first point is measured in vain.
        most: Points to be measured before the end, at most; a check is not left out.

    Yields:
        The stage (``warmup``, ``first``, ``defaults``, ``try``, ``check`` or ``final``) and the point; is sent its
        cost, of which anything but a positive number counts as endless.
    """
    for _ in range(warmup):
        yield "warmup", first
    best, best_cost = first, _sane((yield "first", first))
    measured = 1

    def challenge(stage: str, point: Point) -> Generator[tuple[str, Point], float, bool]:
        """Whether the point is better than the best; then it is the best."""
        nonlocal best, best_cost, measured
        cost = _sane((yield stage, point))
        measured += 1
        if not cost < _SUCCESS * best_cost:
            return False
        best_cost = _sane((yield "check", best))
        measured += 1
        if not cost < _SUCCESS * best_cost:
            return False
        best, best_cost = point, cost
        return True

    def walk(knob: int, direction: int, smallest: int) -> Generator[tuple[str, Point], float, bool]:
        """Whether anything has paid."""
        stride, has_paid = smallest, False
        while measured < most:
            index = min(max(best[knob] + direction * stride, 0), counts[knob] - 1)
            point = (*best[:knob], index, *best[knob + 1 :])
            if point != best and (yield from challenge("try", point)):
                has_paid = True
                stride *= 2
            elif stride > smallest:
                stride //= 2
            else:
                break
        return has_paid

    if defaults != first:
        yield from challenge("defaults", defaults)
    for smallest in itertools.chain([2], itertools.repeat(1)):
        moves = 0
        for knob in range(len(counts)):  # down only where up does not pay: else it would lead back
            moves += (yield from walk(knob, 1, smallest)) or (yield from walk(knob, -1, smallest))
        if measured >= most or (smallest == 1 and not moves):
            break
    finalists = list(dict.fromkeys((first, defaults, best)))
    return Winner(best, best_cost, best_cost) if len(finalists) == 1 else (yield from _compare(finalists, defaults))


def _compare(finalists: list[Point], defaults: Point) -> Generator[tuple[str, Point], float, Winner]:
    """Each round begins with another one, so that a machine that gets slower or faster favours none."""
    costs: dict[Point, list[float]] = {point: [] for point in finalists}
    for turn in range(_ROUNDS * len(finalists)):
        point = finalists[(turn + turn // len(finalists)) % len(finalists)]
        costs[point].append(_sane((yield "final", point)))
    medians = {point: statistics.median(values) for point, values in costs.items()}
    winner = finalists[0]
    for point in finalists[1:]:  # the defaults need no lead over a first point that a user has chosen
        if medians[point] < (1.0 if point == defaults else _WINS) * medians[winner]:
            winner = point
    return Winner(winner, medians[winner], medians[finalists[0]])


def _sane(cost: float) -> float:
    return cost if cost > 0 and math.isfinite(cost) else math.inf


class Meter:
    """Makes samples of whole steps, computation included: the median of some, so that a pause changes nothing.

    A step is what lies between two steps of one optimizer, the first that steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._anchor: object = None
        self._absent = 0
        self._begin_s = 0.0
        self._skipped = _SKIPPED
        self._seconds: list[float] = []

    def restart(self) -> None:
        """Called at the end of a step in which something has changed that changes the time of steps."""
        self._skipped = _SKIPPED
        self._seconds.clear()

    def is_measured(self, optimizer: object) -> bool:
        """Called at the end of each step: whether those of this optimizer are measured."""
        if optimizer != self._anchor:
            self._absent += 1
            if self._anchor is not None and self._absent <= _ABSENT:
                return False
            self._anchor = optimizer
            self.restart()
        self._absent = 0
        return True

    def note(self, now_s: float) -> float | None:
        """The end of a step that is measured: seconds per step where a sample is complete; the next has begun."""
        took_s, self._begin_s = now_s - self._begin_s, now_s
        if self._skipped > 0:
            self._skipped -= 1
            return None
        self._seconds.append(took_s)
        if len(self._seconds) < self._steps:
            return None
        sample_s = statistics.median(self._seconds)
        self._seconds.clear()
        return sample_s


@dataclass(frozen=True)
class Search:
    """The parts of a search."""

    defaults: Mapping[str, int]
    """The values that the job would begin with if the user had set nothing, by the names in ``KNOBS``; a missing one is
    the one that it begins with."""
    ranges: Mapping[str, tuple[int, int]]
    """The least and the largest value that is tried of each knob, powers of two; a missing one is not tuned."""
    warmup_samples: int
    steps_per_sample: int
    max_samples: int
    log: str | None = None
    """The file in which each sample is a line of CSV."""


class Tuner:
    """The search of one job, on rank 0.

    Args:
        context: The native context, which runs with the first values.
        plan: The parts of the search.
    """

    def __init__(self, context: Context, plan: Search) -> None:
        self._context = context
        first, _ = context.tuning()
        self._choices = {
            knob: _choices({first[knob], plan.defaults.get(knob, first[knob])}, plan.ranges.get(knob)) for knob in KNOBS
        }
        self._search = search(
            [len(choices) for choices in self._choices.values()],
            self._point_of(first),
            self._point_of({**first, **plan.defaults}),
            warmup=plan.warmup_samples,
            most=plan.max_samples,
        )
        self._stage, self._point = next(self._search)
        self._waits = False
        """The last proposal is not in force yet: nothing is measured."""
        self._meter = Meter(plan.steps_per_sample)
        self._samples = self._steps = 0
        self._bytes = context.counters()["bytes"]
        self._bytes_per_step = 0.0
        self._log_path = plan.log and os.path.abspath(plan.log)  # noqa: PTH100 - the script may change its folder
        self._log: int | None = None

    def end_step(self, optimizer: object, now_s: float | None = None) -> bool:
        """Called at the end of each step of an optimizer of all ranks; whether the search is over."""
        if not self._meter.is_measured(optimizer):
            return False
        self._steps += 1
        if self._waits:
            self._waits = self._context.tuning()[0] != self._values()
            self._meter.restart()
        cost = self._meter.note(time.perf_counter() if now_s is None else now_s)
        return not self._waits and cost is not None and self._end_sample(cost)

    def close(self) -> None:
        """Closes the log; idempotent."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _end_sample(self, seconds: float) -> bool:
        self._samples += 1
        self._note(self._stage, seconds)
        before = self._point
        try:
            self._stage, self._point = self._search.send(seconds)
        except StopIteration as end:
            self._finish(end.value)
            return True
        if self._point != before:
            self._context.propose_tuning(self._values())
            self._waits = True
        return False

    def _finish(self, winner: Winner) -> None:
        self._point = winner.point
        self._context.propose_tuning(self._values(), is_final=True)
        self._note("best", winner.cost)
        self.close()
        logging.getLogger("horo").info(
            "autotuning has ended after %d samples: a step takes %.4g ms, and took %.4g ms at its start",
            self._samples,
            winner.cost * 1000,
            winner.first_cost * 1000,
        )

    def _point_of(self, values: Mapping[str, int]) -> Point:
        return tuple(choices.index(values[knob]) for knob, choices in self._choices.items())

    def _values(self) -> dict[str, int]:
        return {knob: c[index] for (knob, c), index in zip(self._choices.items(), self._point, strict=True)}

    def _note(self, stage: str, seconds: float) -> None:
        """Writes a row, at once, so that whoever reads sees whole ones; a log that cannot be written ends there.

        The score is bytes per microsecond, as Horovod's.
        """
        if self._log_path is None:
            return
        if self._steps:
            now = self._context.counters()["bytes"]
            self._bytes_per_step, self._bytes, self._steps = (now - self._bytes) / self._steps, now, 0
        *values, cycle, overlap = self._values().values()
        sizes = ",".join(map(str, values))
        score = self._bytes_per_step / seconds / 1e6
        row = f"{self._samples},{stage},{sizes},{cycle / 1000:.3f},{_OVERLAPS[overlap]},{score:.6g}\n"
        try:
            if self._log is None:
                self._log, row = open_own_file(self._log_path), _HEAD + row
            whole = os.write(self._log, row.encode()) == len(row)
        except OSError:
            whole = False
        if not whole:
            self.close()
            self._log_path = None


def _choices(given: set[int], limits: tuple[int, int] | None) -> list[int]:
    least, most = limits or (1, 0)
    powers = itertools.takewhile(lambda value: value <= most, (least << shift for shift in itertools.count()))
    return sorted(given.union(powers))
