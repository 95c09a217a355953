"""Time of a training step through torch.distributed over horo and over gloo: DDP, FSDP2 and ZeRO.

    python benchmarks/distributed_step.py                                       one host
    python benchmarks/distributed_step.py --hosts 2 --rate 1gbit
    python benchmarks/distributed_step.py --models mlp-8 --ways ddp --bucket-mb 1 --rounds 21 --json out.json

Beside DDP, horo's own optimizer trains the same model. Ratios are within rounds. Terms: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import models
import options
import peers
import report
from contest import Contest, start
from rounds import Case, Plan, Result, describe_probe, play

from horo.runner.job.forwarded_variables import KEEP_MEMORY

WAYS = ("ddp", "views", "fsdp2", "zero")
OVER_HORO, OVER_GLOO, OWN = peers.HORO_DIST.name, peers.GLOO.name, peers.HORO.name
BEHIND_OWN_MAX = 1.05
"""Where horo's own optimizer leads gloo, DDP over horo may take so many times as long as that."""
SAME = 1e-3
LINE = "{:<14} {:<12} {:<10} {:>9} {:>9} {:>9} {:>9} {:>10} {:>15}  {:<7} {}"
TITLES = ("model", "way", "", "min", "median", "max", "CPU", "/ horo dist", "(quartiles)", "", "check")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a step of DDP, FSDP2 and ZeRO over horo and over gloo.")
    options.add(parser, contestants="horo-dist,gloo,horo", rounds=9)
    known = ", ".join(models.RECIPES)
    parser.add_argument(
        "--models", default="mlp-8,resnet50-64,transformer-2", help=f"some of {known} (default: %(default)s)"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="some of %(default)s")
    parser.add_argument(
        "--bucket-mb", default="1,25", metavar="LIST", help="sizes of DDP's buckets (default: %(default)s)"
    )
    parser.set_defaults(turn_ms=300)
    arguments = options.parse(parser, words)
    arguments.models, arguments.ways = arguments.models.split(","), arguments.ways.split(",")
    models.check_known(parser, "--models", arguments.models)
    for way in arguments.ways:
        if way not in WAYS:
            parser.error(f"--ways: no '{way}'; known are {', '.join(WAYS)}")
    sizes = arguments.bucket_mb.split(",")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        parser.error(f"--bucket-mb {arguments.bucket_mb}: no list of numbers of megabytes; write 1,25")
    arguments.bucket_mb = [int(size) for size in sizes]
    for peer in arguments.peers:
        if peer.library not in ("dist", "gloo", "horo"):
            parser.error(f"--peers: {peer.name} trains nothing")
    return arguments


def make_cases(names: Sequence[str], ways: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """All ways of a model, one model after the other."""
    cases = []
    for name in names:
        for way in ways:
            for size in sizes if way in ("ddp", "views") else [0]:
                title = f"{way}, {size} MB" if size else way
                cases.append(Case(f"{name} {title}", {"model": name, "title": title, "way": way, "bucket_mb": size}))
    return cases


def contestants(wanted: Sequence[peers.Peer]) -> list[peers.Peer]:
    """Those that are there, all with memory kept as hororun's ranks keep it: else more than the exchange differs."""
    found = peers.available(list(wanted))
    return [replace(peer, environment={**KEEP_MEMORY, **peer.environment}) for peer in found]


def compare_learning(result: Result) -> None:
    """Whoever has learnt something else than the first contestant is wrong."""
    learnt = {name: result.heats[0].turns[name].figure("learnt") for name in result.calls}
    (first, want), *others = learnt.items()
    for name, value in others:
        if not abs(value - want) <= SAME * abs(want):
            text = f"two steps have moved the parameters by {value:.6g}, those of {first} by {want:.6g}"
            result.wrong.setdefault(name, text)


@dataclass(frozen=True)
class Standing:
    """One contestant's time over that of torch.distributed over horo, round by round."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, result: Result, name: str) -> Standing | None:
        """None where either has no time; ``low`` and ``high`` are the quartiles."""
        ratios = result.ratios(name, OVER_HORO)
        if not ratios or name == OVER_HORO:
            return None
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(middle, low, high)

    def verdict(self, least: float) -> str:
        """``ok`` from ``least`` on; ``even`` where the quartiles have that between them; else ``short``."""
        if self.ratio >= least:
            return "ok"
        return "even" if self.high >= least else "short"


def verdicts_of(result: Result) -> dict[str, str]:
    """Beside gloo, DDP over horo is never slower; beside horo's optimizer where that leads gloo, by 5 % at most."""
    found = {}
    if gloo := Standing.of(result, OVER_GLOO):
        found[OVER_GLOO] = gloo.verdict(1.0)
    own = Standing.of(result, OWN)
    if own is not None:
        leads = (result.ratio(OVER_GLOO, OWN) or 0.0) > 1
        found[OWN] = own.verdict(1 / BEHIND_OWN_MAX) if leads else ""
    return found


def rows_of(results: Sequence[Result], ranks: int) -> list[dict[str, Any]]:
    """The rows of distributed_step.json: one per case and contestant."""
    rows = []
    for result in results:
        verdicts = verdicts_of(result)
        for row in result.as_rows(ranks=ranks):
            name = row["contestant"]
            standing = Standing.of(result, name)
            spread = None if standing is None else [standing.low, standing.ratio, standing.high]
            rows.append({**row, "of_horo_dist": spread, "verdict": verdicts.get(name, "")})
    return rows


def as_table(results: Sequence[Result], ranks: int, where: str = "") -> str:
    """The table that people read."""
    lines = [
        f"training step, {ranks} ranks{where}, one thread each; time on the slowest rank; CPU time per rank and step; "
        "time over that of torch.distributed over horo",
        LINE.format(*TITLES),
    ]
    for result in results:
        lines += [_line(result, name, ranks) for name in result.calls]
    return "\n".join(filter(None, [*lines, describe_probe(results)]))


def _line(result: Result, name: str, ranks: int) -> str:
    values, given = result.micros(name), result.case.parameters
    cpu = statistics.median(result.per_call(name, "cpu_s")) / ranks * 1e6
    standing = Standing.of(result, name)
    return LINE.format(
        given["model"],
        given["title"],
        name,
        *(report.time_text(value) for value in (min(values), statistics.median(values), max(values), cpu)),
        "" if standing is None else f"{standing.ratio:.3f}",
        "" if standing is None else f"({standing.low:.2f}, {standing.high:.2f})",
        verdicts_of(result).get(name, ""),
        f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok",
    ).rstrip()


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if parameters were wrong."""
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    results: list[Result] = []
    with (
        options.hosts(arguments) as hosts,
        Contest(
            contestants(arguments.peers), arguments.np, turn_limit_s=arguments.turn_limit_s, hosts=hosts
        ) as contest,
    ):
        versions = contest.versions()
        for case in make_cases(arguments.models, arguments.ways, arguments.bucket_mb):
            results += play(contest, "training_step", [case], plan)  # one after the other: memory
            compare_learning(results[-1])
    print(as_table(results, arguments.np, options.where(arguments)), flush=True)
    return options.finish(arguments, "distributed_step", results, rows_of(results, arguments.np), versions)


if __name__ == "__main__":
    start(parse_arguments, run)
