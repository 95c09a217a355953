"""Time of a training step by horo, DDP over gloo and, where it is installed, Horovod, beside processes on their own.

    python benchmarks/training_step.py                            MLP, ResNet-50 and a transformer on two ranks
    python benchmarks/training_step.py --models mlp --rounds 21 --json out.json

Efficiency is the time of the ceiling over the time of the contestant, within a round. Terms: benchmarks/README.md.
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
import spaces
from contest import Contest, ContestError, start
from rounds import Case, Plan, Result, describe_probe, play

from horo.runner.job.forwarded_variables import KEEP_MEMORY

CEILING = peers.ALONE.name
KEPT = ", memory kept"
# The same once more with what hororun sets: else horo would be compared with processes that lack it.
CEILING_KEPT = replace(peers.ALONE, name=CEILING + KEPT, environment=dict(KEEP_MEMORY))
# And once more waiting for the slowest rank in each step, as everybody must who averages gradients.
IN_STEP = replace(CEILING_KEPT, name=CEILING_KEPT.name + ", in step", library="in_step")
CEILINGS = {"efficiency": CEILING, "efficiency_memory_kept": CEILING_KEPT.name, "efficiency_in_step": IN_STEP.name}
GLOO_KEPT = replace(peers.GLOO, name=peers.GLOO.name + KEPT, environment=dict(KEEP_MEMORY))
TARGET = 0.97
# For check.py in a hurry: a fixed number of steps needs no calibration. A step of a second is warm enough by itself.
QUICK_PLANS = {
    "mlp": Plan(rounds=3, calls=3, check_before=False),
    "resnet50": Plan(rounds=3, calls=2, warm=0, check_before=False),
}
LINE = "{:<12} {:<30} {:>9} {:>9} {:>9} {:>11} {:>11} {:>9} {:>9} {:>9} {:>8}  {}"
TITLES = (
    "model",
    "",
    "min",
    "median",
    "max",
    "of ceiling",
    "memory kept",
    "in step",
    "CPU",
    "switches",
    "faults",
    "check",
)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a training step beside processes that do not communicate.")
    options.add(parser, contestants="horo,gloo,horovod", rounds=9)
    known = ", ".join(models.RECIPES)
    parser.add_argument("--models", default="mlp,resnet50,transformer", help=f"some of {known} (default: %(default)s)")
    parser.set_defaults(turn_ms=1000)
    arguments = options.parse(parser, words)
    arguments.models = arguments.models.split(",")
    models.check_known(parser, "--models", arguments.models)
    for peer in arguments.peers:
        if peer.library not in ("horo", "gloo", "horovod"):
            parser.error(f"--peers: {peer.name} trains nothing")
    return arguments


def contestants(wanted: Sequence[peers.Peer]) -> list[peers.Peer]:
    """The ceilings, those wanted that are there, and gloo once more with memory kept."""
    found = peers.available(list(wanted))
    kept = [GLOO_KEPT] if peers.GLOO in found else []
    return [peers.ALONE, CEILING_KEPT, IN_STEP, *found, *kept]


def measure(
    who: Sequence[peers.Peer],
    ranks: int,
    names: Sequence[str],
    plan: Plan,
    *,
    limit_s: float,
    hosts: spaces.Spaces | None = None,
) -> tuple[list[Result], dict[str, dict[str, str]]]:
    """One model after another: all at once would not fit into memory."""
    results, versions = [], {}
    for name in names:
        with Contest(who, ranks, turn_limit_s=limit_s, hosts=hosts) as contest:
            versions = contest.versions()
            results += play(contest, "training_step", [Case(name, {"model": name})], plan)
    return results, versions


def efficiency(result: Result, name: str, ceiling: str) -> float:
    ratio = result.ratio(ceiling, name)
    return 0.0 if ratio is None else ratio


def per_step(result: Result, name: str, figure: str, ranks: int) -> float:
    """Median over heats of what one rank spends on a step."""
    return statistics.median(result.per_call(name, figure)) / ranks


def rows_of(results: Sequence[Result], ranks: int) -> list[dict[str, Any]]:
    """The rows of training_step.json: one per model and contestant."""
    rows = []
    for result in results:
        for row in result.as_rows(ranks=ranks):
            name = row["contestant"]
            rows.append(
                {
                    **row,
                    **{key: efficiency(result, name, ceiling) for key, ceiling in CEILINGS.items()},
                    "cpu_ms_per_rank": per_step(result, name, "cpu_s", ranks) * 1e3,
                    "switches_voluntary": per_step(result, name, "switches_voluntary", ranks),
                    "switches_forced": per_step(result, name, "switches_forced", ranks),
                    "page_faults": per_step(result, name, "page_faults", ranks),
                }
            )
    return rows


def as_table(results: Sequence[Result], ranks: int, where: str = "") -> str:
    """The table that people read."""
    lines = [
        f"training step, {ranks} ranks{where}, one thread each; time on the slowest rank; per rank and step: CPU time, "
        "context switches (voluntary, forced), page faults",
        LINE.format(*TITLES),
    ]
    for result in results:
        model = result.case.name
        for name in result.calls:
            lines.append(_line(model, name, result, ranks))
            model = ""
        lines += [f"{'':<12} {name:<30} {why}" for name, why in result.unsupported.items()]
    return "\n".join(filter(None, [*lines, describe_probe(results)]))


def _line(model: str, name: str, result: Result, ranks: int) -> str:
    values = result.micros(name)
    times = [report.time_text(value) for value in (min(values), result.median(name), max(values))]
    shares = [f"{efficiency(result, name, ceiling):.1%}" for ceiling in CEILINGS.values()]
    switches = [per_step(result, name, f"switches_{kind}", ranks) for kind in ("voluntary", "forced")]
    return LINE.format(
        model,
        name,
        *times,
        *shares,
        report.time_text(per_step(result, name, "cpu_s", ranks) * 1e6),
        " ".join(f"{count:.0f}" for count in switches),
        f"{per_step(result, name, 'page_faults', ranks):.0f}",
        f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok",
    ).rstrip()


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if parameters were wrong."""
    who = contestants(arguments.peers)
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms)
    with options.hosts(arguments) as hosts:
        results, versions = measure(
            who, arguments.np, arguments.models, plan, limit_s=arguments.turn_limit_s, hosts=hosts
        )
    print(as_table(results, arguments.np, options.where(arguments)), flush=True)
    return options.finish(arguments, "training_step", results, rows_of(results, arguments.np), versions)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """For check.py.

    Raises:
        ContestError: a contestant died, or parameters were wrong.
    """
    # In a hurry, the ceiling that users have and the one nearest to what can be reached, and DDP at its best.
    who = [peers.ALONE, IN_STEP, peers.HORO, GLOO_KEPT] if quick else contestants([peers.HORO, peers.GLOO])
    results: list[Result] = []
    for name, quick_plan in QUICK_PLANS.items():
        plan = quick_plan if quick else Plan(rounds=21, turn_ms=700)
        results += measure(who, 2, [name], plan, limit_s=120)[0]
    rows = []
    for result in results:
        if result.wrong:
            raise ContestError(f"training step of {result.case.name}: wrong parameters: {result.wrong}")
        measured = [ceiling for ceiling in CEILINGS.values() if ceiling in result.calls]
        rows += [row_for(result, ceiling, GLOO_KEPT.name) for ceiling in measured]
    return rows


def row_for(result: Result, ceiling: str, peer: str) -> report.CheckRow:
    mine, theirs = efficiency(result, "horo", ceiling), efficiency(result, peer, ceiling)
    step = report.time_text(result.median("horo"))
    return report.CheckRow(
        what=f"training step of {result.case.name}, 2 ranks",
        figure=mine * 100,
        unit="%",
        peer=f"DDP over {peer}",
        peer_figure=theirs * 100,
        ratio=result.ratio(peer),
        target=f">= {TARGET:.0%}",
        ok=mine >= TARGET,
        note=f"of the {ceiling}, {report.time_text(result.median(ceiling))}; horo {step}",
    )


if __name__ == "__main__":
    start(parse_arguments, run)
