"""Time of one small allreduce, call by call: to its result, to the return of an asynchronous call, and of poll().

    python benchmarks/latency.py --json out.json
    python benchmarks/latency.py --peers horo,horo-dist,gloo --max 4M     # horo dist: dist.all_reduce over horo

The terms are defined in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import options
import peers
import report
from contest import Contest, start
from rounds import Case, Plan, Result, describe_probe, play

TITLES = "{:>9} {:<9} {:<9} {:>9} {:>9} {:>9}  {}"
IN_FLIGHT = 100


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Latency of small allreduces by horo and its peers.")
    options.add(parser, contestants="horo,horo-dist,gloo,horovod")
    parser.add_argument(
        "--max", type=report.parse_size, default=64 << 10, metavar="SIZE", help="largest (default: 64K)"
    )
    return options.parse(parser, words)


def make_cases(largest: int) -> list[Case]:
    cases = []
    size = 4
    while size <= largest:
        for form in ("complete", "submit", "poll") if size == 4 else ("complete",):
            parameters = {"form": form, "bytes": size, "count": size // 4, "in_flight": IN_FLIGHT}
            cases.append(Case(f"{report.size_text(size)} {form}", parameters))
        size *= 4
    return cases


def calls_of(result: Result, name: str) -> list[float]:
    """Microseconds of every call in all rounds, on the slowest rank, sorted."""
    return sorted(us for heat in result.heats if name in heat.turns for us in heat.turns[name].slowest_calls())


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that is not below this share of all."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def rows_of(results: Sequence[Result], ranks: int) -> list[dict[str, Any]]:
    """The rows of latency.json: one per size, form and contestant; min, median and p99 are of single calls."""
    rows = []
    for result in results:
        for row in result.as_rows(ranks=ranks):
            calls = calls_of(result, row["contestant"])
            spread = {"call_min_us": calls[0], "call_median_us": statistics.median(calls)}
            rows.append({**row, **spread, "call_p99_us": percentile(calls, 0.99)})
    return rows


def as_table(results: Sequence[Result], ranks: int, where: str = "") -> str:
    """The table that people read."""
    lines = [
        f"one allreduce, {ranks} ranks{where}; single calls on the slowest rank: to the result (complete), to the "
        "return of the asynchronous call (submit), one poll()",
        TITLES.format("size", "", "", "min", "median", "p99", "sums"),
    ]
    for result in results:
        given = result.case.parameters
        head = (report.size_text(given["bytes"]), given["form"])
        for name in result.calls:
            calls = calls_of(result, name)
            texts = [report.time_text(v) for v in (calls[0], statistics.median(calls), percentile(calls, 0.99))]
            wrong = f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok"
            lines.append(TITLES.format(*head, name, *texts, wrong))
        lines += [f"{head[0]:>9} {head[1]:<9} {name:<9} {why}" for name, why in result.unsupported.items()]
    return "\n".join(filter(None, [*lines, describe_probe(results)]))


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if a sum was wrong."""
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms, warm=5, each=True)
    who = peers.available(arguments.peers)
    with (
        options.hosts(arguments) as hosts,
        Contest(who, arguments.np, turn_limit_s=arguments.turn_limit_s, hosts=hosts) as contest,
    ):
        versions = contest.versions()
        results = play(contest, "latency", make_cases(arguments.max), plan)
    print(as_table(results, arguments.np, options.where(arguments)), flush=True)
    return options.finish(arguments, "latency", results, rows_of(results, arguments.np), versions)


if __name__ == "__main__":
    start(parse_arguments, run)
