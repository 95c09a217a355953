"""Time of a reducescatter, alltoall, allgather and broadcast by horo, gloo, Open MPI, MPICH and, if installed, Horovod.

    python benchmarks/collectives.py                    all four, two ranks on this machine, 4 B to 64 MiB
    python benchmarks/collectives.py --operation alltoall,broadcast --np 4 --min 64K --json out.json

As allreduce.py. The size of a line is that of the largest tensor on one rank: what a reducescatter and an alltoall are
given, what an allgather gives, what a broadcast writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import options
import peers
import report
import sizes
from contest import Contest, start
from rounds import Plan, Result, play
from sizes import Operation, Target

from horo.bench.table import sizes_of

OPERATIONS = {name: operation for name, operation in sizes.OPERATIONS.items() if name != "allreduce"}


def parse_operations(text: str) -> list[Operation]:
    """``alltoall,broadcast``: for argparse."""
    words = [word.strip().lower() for word in text.split(",")]
    unknown = [word for word in words if word not in OPERATIONS]
    if unknown or len(set(words)) < len(words):
        reason = f"knows no '{unknown[0]}'" if unknown else "names one twice"
        raise argparse.ArgumentTypeError(f"'{text}' {reason}; known are {', '.join(OPERATIONS)}")
    return [OPERATIONS[word] for word in words]


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of the other collectives by horo and its peers.")
    parser.add_argument(
        "--operation",
        type=parse_operations,
        default=",".join(OPERATIONS),
        metavar="NAMES",
        help="which (default: %(default)s)",
    )
    sizes.add_options(parser, "64M")
    return sizes.parse(parser, words)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if a result was wrong."""
    contestants = peers.available(arguments.peers)
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    wanted = sizes_of(arguments.min, arguments.max, arguments.step)
    rows: list[dict[str, Any]] = []
    all_results: list[Result] = []
    with (
        options.hosts(arguments) as hosts,
        Contest(contestants, arguments.np, turn_limit_s=arguments.turn_limit_s, hosts=hosts) as contest,
    ):
        versions = contest.versions()
        for operation in arguments.operation:
            cases = sizes.make_cases(wanted, arguments.dtype, arguments.np, operation)
            results = play(contest, "collectives", cases, plan)
            where = options.where(arguments)
            print(sizes.as_table(results, arguments.np, arguments.dtype, where, operation), end="\n\n", flush=True)
            rows += sizes.rows_of(results, arguments.np, operation)
            all_results += results
    return options.finish(arguments, "collectives", all_results, rows, versions)


# Ahead of the best peer wherever bandwidth counts.
TARGETS = tuple(
    Target(size, ranks, {"sharing": 1.0, "apart": 1.0}, operation=operation)
    for ranks in (2, 4)
    for operation in OPERATIONS.values()
    for size in (64 << 10, 1 << 20, 64 << 20)
)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """For check.py.

    Raises:
        ContestError: a contestant died, or a result was wrong.
    """
    return sizes.check_targets(TARGETS, "collectives", quick)


if __name__ == "__main__":
    start(parse_arguments, run)
