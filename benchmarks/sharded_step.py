"""Time of a training step with sharding="optimizer" and without, beside processes that do not communicate.

    python benchmarks/sharded_step.py                                       four models, two ranks
    python benchmarks/sharded_step.py --models mlp --optimizers adam --rounds 15 --json out.json

The share is the time of the ceiling, which waits for the slowest rank in each step, over the time of the contestant,
within a round: the ceiling steps all parameters on each rank. Terms: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import models
import options
import peers
import report
from contest import Contest, start
from rounds import Case, Plan, Result, describe_probe, play
from training_step import IN_STEP
from workloads.training_step import OPTIMIZERS, SHARDING

SHARDINGS = {
    "none": peers.HORO,
    "optimizer": replace(peers.HORO, name="horo, sharded", environment={SHARDING: "optimizer"}),
}
LINE = "{:<12} {:<8} {:<16} {:>9} {:>9} {:>9} {:>11} {:>17}  {}"
TITLES = ("model", "", "", "min", "median", "max", "of ceiling", "(quartiles)", "check")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a training step with and without sharding of the optimizer.")
    options.add(parser, contestants="horo", rounds=9)
    known = ", ".join(models.RECIPES)
    default = "mlp,resnet50,transformer,recommender"
    parser.add_argument("--models", default=default, help=f"some of {known} (default: %(default)s)")
    parser.add_argument("--optimizers", default="sgd,adamw,adam", help=f"some of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--sharding", default="none,optimizer", help="some of %(default)s")
    parser.set_defaults(turn_ms=1000)
    arguments = options.parse(parser, words)
    for name, all_of in (("models", models.RECIPES), ("optimizers", OPTIMIZERS), ("sharding", SHARDINGS)):
        values = getattr(arguments, name).split(",")
        setattr(arguments, name, values)
        unknown = [value for value in values if value not in all_of]
        if unknown:
            parser.error(f"--{name}: no '{unknown[0]}'; known are {', '.join(all_of)}")
    if arguments.peers != [peers.HORO]:
        parser.error("--peers: horo alone shards")
    return arguments


def share(result: Result, name: str) -> tuple[float, float, float]:
    """The median of the ceiling's time over that of a contestant, between its quartiles."""
    ratios = result.ratios(IN_STEP.name, name) or [0.0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, middle, high


def as_table(results: Sequence[Result], ranks: int, where: str = "") -> str:
    """The table that people read."""
    lines = [
        f"training step, {ranks} ranks{where}, one thread each; time on the slowest rank; share of the ceiling in step",
        LINE.format(*TITLES),
    ]
    for result in results:
        for name in result.calls:
            values, given = result.micros(name), result.case.parameters
            low, middle, high = share(result, name)
            times = (report.time_text(value) for value in (min(values), statistics.median(values), max(values)))
            wrong = f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok"
            shown = f"({low:.1%}, {high:.1%})"
            lines.append(
                LINE.format(given["model"], given["optimizer"], name, *times, f"{middle:.1%}", shown, wrong).rstrip()
            )
    return "\n".join(filter(None, [*lines, describe_probe(results)]))


def rows_of(results: Sequence[Result], ranks: int) -> list[dict[str, Any]]:
    """The rows of sharded_step.json."""
    return [
        {**row, "of_ceiling": share(result, row["contestant"])}
        for result in results
        for row in result.as_rows(ranks=ranks)
    ]


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if parameters were wrong."""
    who = [IN_STEP, *(SHARDINGS[name] for name in arguments.sharding)]
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    results, versions = [], {}
    with options.hosts(arguments) as hosts:
        for model in arguments.models:
            for optimizer in arguments.optimizers:
                case = Case(f"{model} {optimizer}", {"model": model, "optimizer": optimizer})
                with Contest(who, arguments.np, turn_limit_s=arguments.turn_limit_s, hosts=hosts) as contest:
                    versions = contest.versions()
                    results += play(contest, "training_step", [case], plan)
    print(as_table(results, arguments.np, options.where(arguments)), flush=True)
    return options.finish(arguments, "sharded_step", results, rows_of(results, arguments.np), versions)


if __name__ == "__main__":
    start(parse_arguments, run)
