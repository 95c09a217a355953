"""Time of an allreduce by horo, gloo, Open MPI, MPICH and, where it is installed, Horovod.

    python benchmarks/allreduce.py                      two ranks on this machine, 4 B to 256 MiB
    python benchmarks/allreduce.py --np 4 --dtype bfloat16 --max 256M --json out.json

Contestants take turns in short rounds, so that a change in the state of the machine falls on all of them. The terms are
defined in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import options
import peers
import report
from contest import Contest, ContestError, exit_code
from rounds import Case, Plan, Result, describe_probe, play, probe_values

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of an allreduce by horo and its peers.")
    options.add(parser)
    parser.add_argument("--min", type=report.parse_size, default=4, metavar="SIZE", help="smallest tensor (default: 4)")
    parser.add_argument(
        "--max", type=report.parse_size, default=256 << 20, metavar="SIZE", help="largest tensor (default: 256M)"
    )
    parser.add_argument("--step", type=int, default=4, help="factor from one size to the next (default: %(default)s)")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="float32", help="of the tensors (default: %(default)s)")
    arguments = options.parse(parser, words)
    if arguments.step < 2:
        parser.error(f"--step {arguments.step}: at least 2")
    if arguments.max < arguments.min:
        parser.error(f"--max {arguments.max} is below --min {arguments.min}")
    return arguments


def make_cases(smallest: int, largest: int, step: int, dtype: str) -> list[Case]:
    """One case per size; sizes that would come to the same number of elements are one."""
    cases: dict[int, Case] = {}
    size = smallest
    while size <= largest:
        count = max(1, size // ITEM_BYTES[dtype])
        size_bytes = count * ITEM_BYTES[dtype]
        name = f"benchmark.{dtype}.{size_bytes}"
        parameters = {"dtype": dtype, "bytes": size_bytes, "count": count, "name": name}
        cases.setdefault(count, Case(report.size_text(size_bytes), parameters))
        size *= step
    return list(cases.values())


@dataclass(frozen=True)
class Rates:
    """Of one contestant at one size, from its median: GB/s with 1e9 bytes."""

    algbw: float
    busbw: float

    @classmethod
    def of(cls, size_bytes: int, ranks: int, median_us: float) -> Rates:
        algbw = size_bytes / median_us / 1e3
        return cls(algbw, algbw * bus_factor(ranks))


def bus_factor(ranks: int) -> float:
    """Bytes that must cross a rank's link for each byte of an allreduce: 2 (p - 1) / p."""
    return 2 * (ranks - 1) / ranks


def rows_of(results: Sequence[Result], ranks: int) -> list[dict[str, Any]]:
    """The rows of allreduce.json: one per size and contestant."""
    rows = []
    for result in results:
        for row in result.as_rows(ranks=ranks):
            rates = Rates.of(row["bytes"], ranks, row["median_us"])
            rows.append({**row, "algbw": rates.algbw, "busbw": rates.busbw, "ratio": result.ratio(row["contestant"])})
    return rows


TITLES = "{:>9}  {:<14} {:>9} {:>9} {:>9} {:>7} {:>7} {:>9}  {}"


def as_table(results: Sequence[Result], ranks: int, dtype: str, where: str = "") -> str:
    """The table that people read."""
    lines = [
        f"allreduce, in-place sum of {dtype}, {ranks} rank{'s' if ranks > 1 else ''}{where}; "
        "time of one call on the slowest rank, rates in GB/s (1e9 bytes)",
        TITLES.format("size", "", "min", "median", "max", "algbw", "busbw", "x horo", "sums"),
    ]
    for result in results:
        size = result.case.name
        for name in [*result.calls, *result.unsupported]:
            lines.append(_line(size, name, result, ranks))
            size = ""
    lines.append(describe_probe(results))
    return "\n".join(filter(None, lines))


def _line(size: str, name: str, result: Result, ranks: int) -> str:
    if name in result.unsupported:
        return f"{size:>9}  {name:<9} {result.unsupported[name]}"
    values = result.micros(name)
    rates = Rates.of(result.case.parameters["bytes"], ranks, result.median(name))
    ratio = result.ratio(name)
    times = [report.time_text(value) for value in (min(values), result.median(name), max(values))]
    sums = f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok"
    shown = "" if ratio is None or name == "horo" else f"{ratio:.2f}"
    return TITLES.format(size, name, *times, f"{rates.algbw:.2f}", f"{rates.busbw:.2f}", shown, sums)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if a sum was wrong."""
    contestants = peers.available(arguments.peers)
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    cases = make_cases(arguments.min, arguments.max, arguments.step, arguments.dtype)
    with (
        options.hosts(arguments) as hosts,
        Contest(contestants, arguments.np, turn_limit_s=arguments.turn_limit_s, hosts=hosts) as contest,
    ):
        versions = contest.versions()
        results = play(contest, "allreduce", cases, plan)
    print(as_table(results, arguments.np, arguments.dtype, options.where(arguments)), flush=True)
    if arguments.json:
        rows = rows_of(results, arguments.np)
        asked = options.as_json(arguments)
        more = {"probe_us": probe_values(results)}
        report.write(arguments.json, report.document("allreduce", rows, options=asked, versions=versions, **more))
    return 1 if any(result.wrong for result in results) else 0


@dataclass(frozen=True)
class Target:
    """What one size should reach: so many times the best peer, by state of the cores, or so many microseconds."""

    size: int
    ranks: int
    times_best: dict[str, float] = field(default_factory=dict)
    limit_us: float = 0.0


TARGETS = (
    Target(64 << 20, 2, {"sharing": 3.5, "apart": 3.5}),
    Target(4 << 20, 2, {"sharing": 1.3, "apart": 4.0}),
    Target(64 << 10, 2, {"sharing": 1.0, "apart": 1.0}),
    Target(4, 2, limit_us=15.0),
    Target(64 << 20, 4, {"sharing": 1.5, "apart": 1.5}),
    Target(4, 4, limit_us=60.0),
)
RATES_FROM_BYTES = 64 << 10
# A state of the cores in which fewer heats were is not reported.
HEATS_OF_STATE_MIN = 3


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """For check.py.

    Raises:
        ContestError: a contestant died, or a sum was wrong.
    """
    contestants = peers.available(list(peers.DEFAULT.values()))
    plan = Plan(rounds=7 if quick else 41)
    rows: list[report.CheckRow] = []
    for ranks in sorted({target.ranks for target in TARGETS}):
        targets = [target for target in TARGETS if target.ranks == ranks]
        cases = [case for target in targets for case in make_cases(target.size, target.size, 2, "float32")]
        with Contest(in_a_hurry(contestants) if quick and ranks > 2 else contestants, ranks) as contest:
            results = play(contest, "allreduce", cases, plan)
        for target, result in zip(targets, results, strict=True):
            if result.wrong:
                raise ContestError(f"{result.case.name}, {ranks} ranks: wrong sums: {result.wrong}")
            rows += rows_for(target, result)
    return rows


def in_a_hurry(contestants: Sequence[peers.Peer]) -> Sequence[peers.Peer]:
    """Those who can be the best peer, for many ranks take longer to start than to time; all, where there is no MPI."""
    quickest = [peer for peer in contestants if peer is peers.HORO or peer.library == "mpi"]
    return quickest if len(quickest) > 1 else contestants


def rows_for(target: Target, result: Result) -> list[report.CheckRow]:
    """One row; where the target depends on the state of the cores, one for each state that occurred."""
    if target.limit_us:
        return [_row_for(target, result, "")]
    counts = result.states()
    states = [state for state in target.times_best if counts.get(state, 0) >= HEATS_OF_STATE_MIN]
    return [_row_for(target, result, state) for state in states or [""]]


def _row_for(target: Target, result: Result, state: str) -> report.CheckRow:
    others = sorted((name for name in result.calls if name != "horo"), key=lambda name: result.median(name, state))
    best = others[0] if others else ""
    ratio = result.ratio(best, state=state) if best else None
    is_rate = target.size >= RATES_FROM_BYTES
    figures = {
        name: Rates.of(target.size, target.ranks, result.median(name, state)).busbw if is_rate else result.median(name)
        for name in result.calls
    }
    unit = "GB/s" if is_rate else "us"
    if target.limit_us:
        text, is_met = f"<= {target.limit_us:g} us", figures["horo"] <= target.limit_us
    else:
        # Cores that changed their state all the time: the harder of the targets.
        wanted = target.times_best.get(state) or max(target.times_best.values())
        text, is_met = f">= {wanted:g}x", ratio is not None and ratio >= wanted
    cores = {"": "", "sharing": "cores share a cache", "apart": "cores share no cache"}[state]
    rest = ", ".join(f"{name} {report.three_digits(figures[name])}" for name in others[1:])
    return report.CheckRow(
        what=f"{result.case.name} float32, {target.ranks} ranks",
        figure=figures["horo"],
        unit=unit,
        peer=best,
        peer_figure=figures[best] if best else None,
        ratio=ratio,
        target=text,
        ok=is_met,
        note="; ".join(filter(None, [rest, cores])),
    )


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
