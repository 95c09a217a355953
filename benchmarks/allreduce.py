"""Time of an allreduce by horo, gloo, Open MPI, MPICH and, where it is installed, Horovod.

    python benchmarks/allreduce.py                      two ranks on this machine, 4 B to 64 MiB
    python benchmarks/allreduce.py --np 4 --dtype bfloat16 --max 256M --json out.json

Contestants take turns in short rounds, so that a change in the state of the machine falls on all of them. The terms are
defined in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import options
import peers
import report
from contest import Contest, exit_code
from rounds import Case, Plan, Result, describe_probe, play, probe_values

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of an allreduce by horo and its peers.")
    options.add(parser)
    parser.add_argument("--min", type=report.parse_size, default=4, metavar="SIZE", help="smallest tensor (default: 4)")
    parser.add_argument(
        "--max", type=report.parse_size, default=64 << 20, metavar="SIZE", help="largest tensor (default: 64M)"
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


TITLES = "{:>9}  {:<9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>9}  {}"


def as_table(results: Sequence[Result], ranks: int, dtype: str) -> str:
    """The table that people read."""
    lines = [
        f"allreduce, in-place sum of {dtype}, {ranks} rank{'s' if ranks > 1 else ''}; "
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
    with Contest(contestants, arguments.np, turn_limit_s=arguments.turn_limit_s) as contest:
        versions = contest.versions()
        results = play(contest, "allreduce", cases, plan)
    print(as_table(results, arguments.np, arguments.dtype), flush=True)
    if arguments.json:
        rows = rows_of(results, arguments.np)
        asked = options.as_json(arguments)
        more = {"probe_us": probe_values(results)}
        report.write(arguments.json, report.document("allreduce", rows, options=asked, versions=versions, **more))
    return 1 if any(result.wrong for result in results) else 0


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
