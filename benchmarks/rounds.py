"""Rounds of a contest and what is read from them. Everything but ``play`` is arithmetic on what was measured."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contest import Contest, Turn
from peers import Peer
from workloads.probe import AREA_BYTES

CALIBRATION_CALLS = 3
CALLS_MAX = 10_000
# Between the two speeds that the probe has: see README.md.
SHARING_GBS = 6.0
STATES = ("sharing", "apart")


@dataclass(frozen=True)
class Case:
    """One row of a benchmark: ``name`` for people, ``parameters`` (JSON values) for the workload's ``prepare``."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How often.

    Attributes:
        rounds: turns of every contestant at every case.
        turn_ms: a turn has as many calls as take about this long.
        calls: so many calls instead, for all contestants; 0: as many as ``turn_ms`` asks for.
        warm: calls before them that are not counted.
        each: keep the time of every call, not only the mean of a turn.
        check_before: check results also before the first round, not only after the last.
    """

    rounds: int = 11
    turn_ms: float = 20.0
    calls: int = 0
    warm: int = 1
    each: bool = False
    check_before: bool = True


@dataclass
class Heat:
    """One case in one round: everybody's turn, one directly after the other, between two probes of the cores."""

    probe_us: tuple[float, float]
    turns: dict[str, Turn]

    @property
    def state(self) -> str:
        """``sharing`` or ``apart``, by the speed of the probe before and after; ``changing`` if they disagree."""
        states = {STATES[0] if gigabytes_per_second(us) >= SHARING_GBS else STATES[1] for us in self.probe_us}
        return states.pop() if len(states) == 1 else "changing"


@dataclass
class Result:
    """One case with all its heats. Contestants are named as in their Peer."""

    case: Case
    calls: dict[str, int] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    heats: list[Heat] = field(default_factory=list)

    def micros(self, name: str, state: str = "") -> list[float]:
        """Values of the heats (of one state, if it is named) in which ``name`` had a turn."""
        return [heat.turns[name].micros for heat in self._heats(state) if name in heat.turns]

    def median(self, name: str, state: str = "") -> float:
        return statistics.median(self.micros(name, state))

    def ratio(self, peer: str, one: str = "horo", state: str = "") -> float | None:
        """Median over heats of ``peer``'s time over ``one``'s; above 1, ``one`` is faster. None without such a heat."""
        ratios = self.ratios(peer, one, state)
        return statistics.median(ratios) if ratios else None

    def ratios(self, peer: str, one: str = "horo", state: str = "") -> list[float]:
        """The same heat by heat: how far they are apart says what their median is worth."""
        return [
            heat.turns[peer].micros / heat.turns[one].micros
            for heat in self._heats(state)
            if peer in heat.turns and one in heat.turns
        ]

    def states(self) -> dict[str, int]:
        """How many heats were in which state."""
        counts: dict[str, int] = {}
        for heat in self.heats:
            counts[heat.state] = counts.get(heat.state, 0) + 1
        return counts

    def as_rows(self, **more: Any) -> list[dict[str, Any]]:
        """For report.document: one flat dict per contestant that took part, each with ``parameters`` and ``more``."""
        rows = []
        for name, calls in self.calls.items():
            values = self.micros(name)
            rows.append(
                {
                    "case": self.case.name,
                    **self.case.parameters,
                    **more,
                    "contestant": name,
                    "calls": calls,
                    "min_us": min(values),
                    "median_us": statistics.median(values),
                    "max_us": max(values),
                    "rounds_us": [round(value, 3) for value in values],
                    "states": [heat.state for heat in self.heats if name in heat.turns],
                    "cpu_us": statistics.median(self.per_call(name, "cpu_s")) * 1e6,
                    "switches": statistics.median(
                        a + b
                        for a, b in zip(
                            self.per_call(name, "switches_voluntary"),
                            self.per_call(name, "switches_forced"),
                            strict=True,
                        )
                    ),
                    "idle_cpu_percent": self.idle_cpu_percent(name),
                    "wrong": self.wrong.get(name, ""),
                }
            )
        return rows

    def idle_cpu_percent(self, name: str) -> float:
        """How busy a rank of ``name`` kept a core while others had their turn; a contest is fair if that is about 0."""
        ranks = [rank for heat in self.heats if name in heat.turns for rank in heat.turns[name].ranks]
        idle_s = sum(float(rank["idle_s"]) for rank in ranks)
        return 100 * sum(float(rank["idle_cpu_s"]) for rank in ranks) / idle_s if idle_s else 0.0

    def per_call(self, name: str, figure: str) -> list[float]:
        """What run_turn counts, summed over ranks, per call of ``name``, heat by heat."""
        return [heat.turns[name].total(figure) / self.calls[name] for heat in self.heats if name in heat.turns]

    def _heats(self, state: str) -> list[Heat]:
        return [heat for heat in self.heats if not state or heat.state == state]


def gigabytes_per_second(probe_us: float) -> float:
    return AREA_BYTES / probe_us / 1e3


def order_of(peers: Sequence[Peer], number: int) -> list[Peer]:
    """The order of turns in heat ``number``: everybody comes first once, then the same with the order reversed."""
    start = number % len(peers)
    order = [*peers[start:], *peers[:start]]
    return order if number // len(peers) % 2 == 0 else order[::-1]


def play(contest: Contest, workload: str, cases: Sequence[Case], plan: Plan) -> list[Result]:
    """Lets all contestants play all cases, ``plan.rounds`` times, and checks results, by default before and after.

    Raises:
        ContestError: a contestant died or is too slow to wait for.
    """
    results = [Result(case) for case in cases]
    try:
        _play(contest, workload, results, plan)
    finally:
        _show_progress("")
    return results


def _play(contest: Contest, workload: str, results: Sequence[Result], plan: Plan) -> None:
    for result in results:
        for peer in contest.peers:
            _begin(contest, peer, workload, result, plan)
    for number in range(plan.rounds):
        for result in results:
            _show_progress(f"round {number + 1} of {plan.rounds}: {workload} {result.case.name}")
            playing = [peer for peer in contest.peers if peer.name in result.calls]
            before = contest.probe()
            turns = {}
            for peer in order_of(playing, number) if playing else []:
                count = result.calls[peer.name]
                turns[peer.name] = contest.turn(peer, result.case.name, count, warm=plan.warm, each=plan.each)
            result.heats.append(Heat((before, contest.probe()), turns))
    for result in results:
        for peer in contest.peers:
            if peer.name in result.calls:
                _check(contest, peer, result)
                contest.forget(peer, result.case.name)


def _begin(contest: Contest, peer: Peer, workload: str, result: Result, plan: Plan) -> None:
    _show_progress(f"{peer.name} prepares {workload} {result.case.name}")
    name = result.case.name
    unsupported = contest.prepare(peer, workload, name, result.case.parameters)
    if unsupported:
        result.unsupported[peer.name] = unsupported
        return
    if plan.check_before:
        _check(contest, peer, result)
    count = plan.calls
    if count == 0:
        micros = contest.turn(peer, name, CALIBRATION_CALLS, warm=plan.warm).micros
        if micros * CALIBRATION_CALLS < plan.turn_ms * 1e3:  # else the first calls of all can hardly have misled
            micros = min(micros, contest.turn(peer, name, CALIBRATION_CALLS, warm=plan.warm).micros)
        count = max(1, min(CALLS_MAX, int(plan.turn_ms * 1e3 / micros)))
    result.calls[peer.name] = count


def _check(contest: Contest, peer: Peer, result: Result) -> None:
    wrong = contest.check(peer, result.case.name)
    if wrong:
        result.wrong.setdefault(peer.name, wrong)


def _show_progress(text: str) -> None:
    """On a terminal, one line that is overwritten; elsewhere nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def probe_values(results: Sequence[Result]) -> list[float]:
    """All values of the probe in microseconds, in the order in which they were measured per case."""
    return [value for result in results for heat in result.heats for value in heat.probe_us]


def describe_probe(results: Sequence[Result]) -> str:
    """One line about the state of the cores; empty without a heat."""
    speeds = [gigabytes_per_second(us) for us in probe_values(results)]
    if not speeds:
        return ""
    counts: dict[str, int] = {}
    for result in results:
        for state, count in result.states().items():
            counts[state] = counts.get(state, 0) + count
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    middle, low, high = statistics.median(speeds), min(speeds), max(speeds)
    return (
        f"a core reads what another has just written at {middle:.1f} GB/s ({low:.1f} to {high:.1f}); "
        f"rounds by state of the cores: {states}"
    )
