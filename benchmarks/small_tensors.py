"""Time of 1000 tensors of 1 KiB by horo, gloo and, where it is installed, Horovod: one call each, or one call for all.

    python benchmarks/small_tensors.py --json out.json

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
from contest import Contest, ContestError, start
from rounds import Case, Plan, Result, describe_probe, play
from spaces import Spaces

GROUPED_LIMIT_US = 3000.0
SINGLE_LIMIT_US = 15.0
TITLES = "{:<8} {:<9} {:>9} {:>9} {:>9} {:>11} {:>13}  {}"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of many small tensors by horo and its peers.")
    options.add(parser, contestants="horo,gloo,horovod")
    parser.add_argument("--tensors", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--size", type=report.parse_size, default=1024, metavar="SIZE", help="of each (default: 1K)")
    arguments = options.parse(parser, words)
    if arguments.tensors < 1 or arguments.size % 4:
        parser.error(
            f"--tensors {arguments.tensors} --size {arguments.size}: at least 1 tensor, of a multiple of 4 bytes"
        )
    return arguments


def make_cases(tensors: int, size_bytes: int) -> list[Case]:
    return [
        Case(form, {"form": form, "tensors": tensors, "bytes": size_bytes, "count": size_bytes // 4})
        for form in ("single", "grouped")
    ]


def submit_us(result: Result, name: str) -> float:
    """Median over heats of what it takes to submit one tensor; 0 for the grouped form."""
    return statistics.median(heat.turns[name].figure("submit_us") for heat in result.heats if name in heat.turns)


def rows_of(results: Sequence[Result], ranks: int) -> list[dict[str, Any]]:
    """The rows of small_tensors.json: one per form and contestant; times are of all tensors, ``submit_us`` of one."""
    return [
        {**row, "submit_us": submit_us(result, row["contestant"]), "ratio": result.ratio(row["contestant"])}
        for result in results
        for row in result.as_rows(ranks=ranks)
    ]


def as_table(results: Sequence[Result], ranks: int, where: str = "") -> str:
    """The table that people read."""
    given = results[0].case.parameters
    lines = [
        f"{given['tensors']} tensors of {report.size_text(given['bytes'])}, {ranks} ranks{where}; "
        "time of all on the slowest rank",
        TITLES.format("", "", "min", "median", "max", "per tensor", "its submission", "sums"),
    ]
    for result in results:
        for name in result.calls:
            values = result.micros(name)
            median, submit = result.median(name), submit_us(result, name)
            times = [min(values), median, max(values), median / given["tensors"]]
            wrong = f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok"
            texts = [report.time_text(value) for value in times]
            lines.append(
                TITLES.format(result.case.name, name, *texts, report.time_text(submit) if submit else "", wrong)
            )
        lines += [f"{result.case.name:<8} {name:<9} {why}" for name, why in result.unsupported.items()]
    return "\n".join(filter(None, [*lines, describe_probe(results)]))


def measure(
    who: Sequence[peers.Peer],
    ranks: int,
    cases: Sequence[Case],
    plan: Plan,
    *,
    limit_s: float,
    hosts: Spaces | None = None,
) -> Any:
    with Contest(who, ranks, turn_limit_s=limit_s, hosts=hosts) as contest:
        return play(contest, "small_tensors", cases, plan), contest.versions()


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if a sum was wrong."""
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    who = peers.available(arguments.peers)
    cases = make_cases(arguments.tensors, arguments.size)
    with options.hosts(arguments) as hosts:
        results, versions = measure(who, arguments.np, cases, plan, limit_s=arguments.turn_limit_s, hosts=hosts)
    print(as_table(results, arguments.np, options.where(arguments)), flush=True)
    return options.finish(arguments, "small_tensors", results, rows_of(results, arguments.np), versions)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """For check.py.

    Raises:
        ContestError: a contestant died, or a sum was wrong.
    """
    who = peers.available([peers.HORO, peers.GLOO])
    results, _ = measure(who, 2, make_cases(1000, 1024), Plan(rounds=5 if quick else 31), limit_s=120)
    for result in results:
        if result.wrong:
            raise ContestError(f"small tensors, {result.case.name}: wrong sums: {result.wrong}")
    single, grouped = results
    whole = grouped.median("horo")
    mine, theirs = single.median("horo") / 1000, single.median("gloo") / 1000
    limit, each = f"<= {report.time_text(GROUPED_LIMIT_US)}", f"<= {report.time_text(SINGLE_LIMIT_US)}"
    note = f"of which {report.time_text(submit_us(single, 'horo'))} until it is submitted"
    return [
        report.CheckRow("1000 x 1 KiB, grouped", whole, "us", "", None, None, limit, whole <= GROUPED_LIMIT_US),
        report.CheckRow(
            "1000 x 1 KiB, asynchronous, each", mine, "us", "gloo", theirs, single.ratio("gloo"), each,
            mine <= SINGLE_LIMIT_US, note,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    start(parse_arguments, run)
