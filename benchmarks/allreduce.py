"""Time of an allreduce by horo, gloo, Open MPI, MPICH and, where it is installed, Horovod.

    python benchmarks/allreduce.py                      two ranks on this machine, 4 B to 256 MiB
    python benchmarks/allreduce.py --np 4 --dtype bfloat16 --max 256M --json out.json

Contestants take turns in short rounds, so that a change in the state of the machine falls on all of them. The terms are
defined in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import options
import peers
import report
import sizes
from contest import Contest, start
from rounds import Plan, play
from sizes import Target

from horo.bench.table import sizes_of


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of an allreduce by horo and its peers.")
    sizes.add_options(parser, "256M")
    return sizes.parse(parser, words)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if a sum was wrong."""
    contestants = peers.available(arguments.peers)
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    cases = sizes.make_cases(sizes_of(arguments.min, arguments.max, arguments.step), arguments.dtype)
    with (
        options.hosts(arguments) as hosts,
        Contest(contestants, arguments.np, turn_limit_s=arguments.turn_limit_s, hosts=hosts) as contest,
    ):
        versions = contest.versions()
        results = play(contest, "allreduce", cases, plan)
    print(sizes.as_table(results, arguments.np, arguments.dtype, options.where(arguments)), flush=True)
    return options.finish(arguments, "allreduce", results, sizes.rows_of(results, arguments.np), versions)


TARGETS = (
    Target(64 << 20, 2, {"sharing": 3.5, "apart": 3.5}),
    Target(4 << 20, 2, {"sharing": 1.3, "apart": 4.0}),
    Target(64 << 10, 2, {"sharing": 1.0, "apart": 1.0}),
    Target(4, 2, limit_us=15.0),
    Target(64 << 20, 4, {"sharing": 1.5, "apart": 1.5}),
    Target(4, 4, limit_us=60.0),
)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """For check.py.

    Raises:
        ContestError: a contestant died, or a sum was wrong.
    """
    return sizes.check_targets(TARGETS, "allreduce", quick)


if __name__ == "__main__":
    start(parse_arguments, run)
