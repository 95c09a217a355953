"""What a timeline, or the counters of ``hvd.stats()``, cost a training step: a job trains with and without, in turn.

    python benchmarks/timeline.py                              MLP, ResNet-50 and a transformer on two ranks
    python benchmarks/timeline.py --models mlp --rounds 41 --json out.json
    python benchmarks/timeline.py --of stats                   the counters that are read at the end of each step

Every rank writes a timeline, with marks of cycles. In each round both turns come one directly after the other, in an
order that alternates; a turn's value is the time of a step on the slowest rank, and ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launching
import models
import report
from contest import start

RANK = str(Path(__file__).resolve().parent / "timeline_rank.py")
LIMIT_S = 900.0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a training step with a timeline over that without.")
    known = ", ".join(models.RECIPES)
    parser.add_argument("--models", default="mlp,resnet50,transformer", help=f"some of {known} (default: %(default)s)")
    parser.add_argument("--of", choices=("timeline", "stats"), default="timeline", help="(default: %(default)s)")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each (default: %(default)s)")
    parser.add_argument("--turn-ms", type=float, default=1000, help="about, of each turn (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    for name, least in (("np", 1), ("rounds", 2)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: at least {least}")
    arguments.models = arguments.models.split(",")
    models.check_known(parser, "--models", arguments.models)
    return arguments


def measure(of: str, model: str, ranks: int, rounds: int, turn_ms: float) -> dict[str, Any]:
    """The row of one model.

    Raises:
        ContestError: the job failed, or took too long.
    """
    words = [RANK, of, model, str(rounds), str(turn_ms)]
    (said,) = launching.run(launching.hororun(ranks, words), limit_s=LIMIT_S)
    ratios = [on / off for on, off in zip(said["on_us"], said["off_us"], strict=True)]
    return {"of": of, "model": model, "ranks": ranks, **said, "ratios": ratios, "ratio": statistics.median(ratios)}


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table that people read."""
    form = "{:<18} {:>10} {:>10} {:>8} {:>18} {:>18} {:>14}"
    titles = ("", "off", "on", "ratio", "middle half", "(least, most)", "events a step")
    lines = [
        f"{rows[0]['of']}: training step, {rows[0]['ranks']} ranks, {len(rows[0]['ratios'])} rounds",
        form.format(*titles),
    ]
    for row in rows:
        low, _, high = statistics.quantiles(row["ratios"], n=4)
        times = (report.time_text(statistics.median(row[key])) for key in ("off_us", "on_us"))
        spread = f"({min(row['ratios']):.3f}, {max(row['ratios']):.3f})"
        middle = f"{low:.3f} to {high:.3f}"
        lines.append(
            form.format(row["model"], *times, f"{row['ratio']:.4f}", middle, spread, f"{row['events_per_step']:.0f}")
        )
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    rows = [measure(arguments.of, name, arguments.np, arguments.rounds, arguments.turn_ms) for name in arguments.models]
    print(as_table(rows))
    report.save(arguments, "timeline", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
