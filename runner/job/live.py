"""The course of a job while it runs, from what its ranks have counted: one line for the user. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from horo.config.hosts import ranges
from horo.runner.agent.rank_summary import RankSummary
from horo.runner.job.amounts import duration, ms, percent, span

__all__ = ["Late", "Progress", "line"]

_CHANGES_MAX = 10
"""Looks that the means are over."""
_WINDOW_S = 10.0
_LATE_MIN = 0.05
"""Of a step, by which a late rank is behind."""
_IDLE_MIN_S = 5.0
_IDLE_STEPS = 3.0
"""So many steps would have ended meanwhile."""
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "12345678"


@dataclass(frozen=True)
class Late:
    """The rank that the others wait for at present.

    Attributes:
        rank: its number.
        behind_s: how long the others wait in each step, at the median, and it does not.
    """

    rank: int
    behind_s: float


@dataclass(frozen=True)
class _Look:
    at_s: float
    counts: RankSummary


@dataclass(frozen=True)
class _Pace:
    steps: int
    ns: int
    waiting: int
    moving: int


class Progress:
    """Collects what ranks have counted.

    Args:
        word: the name for a process.
    """

    def __init__(self, word: str = "rank") -> None:
        self.word = word
        self.counts: dict[int, RankSummary] = {}
        """The latest of each rank that runs."""
        self._looks: dict[int, deque[_Look]] = {}

    def update(self, rank: int, counts: RankSummary, now_s: float) -> None:
        """A look at a rank that runs."""
        self.counts[rank] = counts
        looks = self._looks.setdefault(rank, deque(maxlen=_CHANGES_MAX))
        if looks and counts.measured < looks[-1].counts.measured:
            looks.clear()  # another job of that process has begun
        if not looks or counts.measured > looks[-1].counts.measured:
            looks.append(_Look(now_s, counts))
        while len(looks) > 2 and now_s - looks[1].at_s > _WINDOW_S:
            looks.popleft()

    def ended(self, rank: int) -> None:
        """The rank runs no more."""
        self.counts.pop(rank, None)
        self._looks.pop(rank, None)

    def paces(self) -> dict[int, _Pace]:
        """Of the ranks of which some steps are measured: the last ones."""
        return {rank: pace for rank, looks in sorted(self._looks.items()) if (pace := _pace_of(looks)) is not None}

    def idle_s(self, now_s: float) -> float:
        """The time since any rank was seen to have done a step; 0: not notable."""
        latest = max((looks[-1].at_s for looks in self._looks.values()), default=now_s)
        step_s = max((pace.ns / pace.steps / 1e9 for pace in self.paces().values()), default=0.0)
        idle_s = now_s - latest
        return idle_s if idle_s >= max(_IDLE_MIN_S, _IDLE_STEPS * step_s) else 0.0

    def late(self) -> Late | None:
        """The rank that waits least, if that costs the others time; None: there is none."""
        paces = self.paces()
        if len(paces) < 2 or len(paces) < len(self.counts):
            return None
        waited = {rank: pace.waiting / pace.steps / 1e9 for rank, pace in paces.items()}
        rank = min(waited, key=lambda each: waited[each])
        behind_s = median(s for each, s in waited.items() if each != rank) - waited[rank]
        step_s = fmean(pace.ns / pace.steps / 1e9 for pace in paces.values())
        return Late(rank, behind_s) if behind_s >= _LATE_MIN * step_s else None


def _pace_of(looks: deque[_Look]) -> _Pace | None:
    first, last = looks[0].counts if len(looks) > 1 else RankSummary(), looks[-1].counts
    steps = last.measured - first.measured
    ns = last.ns - first.ns
    if steps <= 0 or ns <= 0:
        return None
    return _Pace(steps, ns, max(0, last.waiting - first.waiting), max(0, last.moving - first.moving))


def line(progress: Progress, now_s: float, width: int, *, plain: bool = False) -> str:
    """The line for the user, of ``width`` characters at most; empty: no rank has counted anything.

    Args:
        progress: of the job.
        now_s: the time, by the clock of ``update``.
        width: room for it.
        plain: in ASCII.
    """
    counts, paces, word = progress.counts, progress.paces(), progress.word
    if not counts:
        return ""
    furthest = max(max(each.steps, each.within) for each in counts.values())
    parts = [f"step {furthest:,}"]
    idle_s = progress.idle_s(now_s)
    if idle_s:
        parts.append(f"no step for {duration(idle_s)}: {_places(counts, word)}")
    elif paces:
        pace = max(pace.steps / (pace.ns / 1e9) for pace in paces.values())
        parts.append(f"{pace:.3g} steps/s")
    if paces and not idle_s and len(counts) > 1:
        parts.append(f"waiting {percent(fmean(pace.waiting / pace.ns for pace in paces.values()))}")
    late = None if idle_s else progress.late()
    if late is not None:
        parts.append(f"{word} {late.rank} late by {ms(late.behind_s)} ms")
    memory = [each.peak for each in counts.values() if each.peak]
    if memory:
        parts.append(f"{span(min(memory), max(memory))} each")
    while len(parts) > 1 and len(" | ".join(parts)) > width:
        parts.pop()
    text = " | ".join(parts)
    bars = _bars(paces, plain=plain) if len(counts) > 1 and not idle_s else ""
    if bars and len(text) + len(bars) + 5 <= width:
        text = f"{text} | [{bars}]"
    return text[:width]


def _bars(paces: Mapping[int, _Pace], *, plain: bool) -> str:
    """One per rank: the share of its time in which it computes."""
    marks = _PLAIN_BARS if plain else _BARS
    shares = (1 - (pace.waiting + pace.moving) / pace.ns for pace in paces.values())
    return "".join(marks[min(len(marks) - 1, max(0, int(share * len(marks))))] for share in shares)


def _places(counts: Mapping[int, RankSummary], word: str) -> str:
    """The step of each rank."""
    groups: dict[str, list[int]] = {}
    for rank, each in sorted(counts.items()):
        groups.setdefault(f"in step {each.within}" if each.within else f"after step {each.steps}", []).append(rank)
    return ", ".join(
        f"{word}{'' if len(ranks) == 1 else 's'} {ranges(ranks)} {place}" for place, ranks in groups.items()
    )
