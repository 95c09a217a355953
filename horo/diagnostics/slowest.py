"""The rank that the others wait for, by samples of the steps of all. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

__all__ = ["BEHIND_MIN", "Slowest", "slowest_of"]

BEHIND_MIN = 0.05
"""Of a step, by which that rank was behind."""
_SAMPLES_MIN = 10
_CHANCE_MAX = 1.5
"""By which a share of n steps is above chance where nobody is slower, times the root of n: 3 standard deviations of two
ranks."""


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        share: of the steps, in which it was the last one.
        behind_s: how long the others had waited then, at the median.
        loading_s: the part of that for which it had waited longer for its DataLoader than they had, at the median.
    """

    rank: int
    share: float
    behind_s: float
    loading_s: float


def slowest_of(samples: Mapping[int, Sequence[tuple[int, int, int]]], step_s: float) -> Slowest | None:
    """The rank that was last in most steps, if it has cost time; None: there is none.

    Args:
        samples: of each rank, steps: their number, and how many microseconds it has waited and loaded.
        step_s: seconds of a step.
    """
    by_step = [{number: rest for number, *rest in rows} for rows in samples.values()]
    common = sorted(set.intersection(*map(set, by_step))) if len(by_step) > 1 else []
    if len(common) < _SAMPLES_MIN:
        return None
    last: dict[int, list[tuple[float, float]]] = {}
    for number in common:
        waited = [rows[number][0] for rows in by_step]
        loaded = [rows[number][1] for rows in by_step]
        index = waited.index(min(waited))
        others = [each for each in range(len(waited)) if each != index]
        behind = median(waited[each] for each in others) - waited[index]
        last.setdefault(index, []).append((behind, loaded[index] - median(loaded[each] for each in others)))
    index = max(last, key=lambda each: len(last[each]))
    behind_s, loading_s = (median(column) / 1e6 for column in zip(*last[index], strict=True))
    share, chance = len(last[index]) / len(common), 1 / len(by_step)
    is_chance = share < (1 + chance) / 2 or (share - chance) * sqrt(len(common)) < _CHANCE_MAX
    if is_chance or behind_s < BEHIND_MIN * step_s:
        return None
    return Slowest(list(samples)[index], share, behind_s, min(behind_s, max(0.0, loading_s)))
