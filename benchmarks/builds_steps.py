"""Whole training steps of two trees, in turn, for builds.py: a change that slows the step down is seen here.

Terms: benchmarks/README.md. The ceiling is that of processes that exchange nothing and wait for the slowest in each
step (``in step`` of training_step.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from contest import ContestError
from peers import Peer
from rounds import Plan, Result
from training_step import IN_STEP, efficiency, measure, per_step

__all__ = ["TITLES", "ContestError", "compare", "line_of", "row_of"]

RANKS = 2
LIMIT_S = 300
TITLES = "{:<12} {:>10} {:>10} {:>8} {:>15} {:>11} {:>11} {:>12} {:>12}"


def contestants(trees: Mapping[str, Path]) -> list[Peer]:
    """The ceiling, and horo of each tree: of its own sources, by its own Python."""
    horos = []
    for name, tree in trees.items():
        folder = tree.resolve()
        horos.append(Peer(name, "horo", "hororun", folder=folder / ".venv", environment={"PYTHONPATH": str(folder)}))
    return [IN_STEP, *horos]


def compare(before: Path, after: Path, models: Sequence[str], *, rounds: int, turn_ms: float) -> list[Result]:
    """Trains each model with both trees.

    Raises:
        ContestError: a rank has died, or has other parameters than one process with all batches.
    """
    who = contestants({"before": before, "after": after})
    results = measure(who, RANKS, models, Plan(rounds=rounds, turn_ms=turn_ms), limit_s=LIMIT_S)[0]
    for result in results:
        if result.wrong:
            raise ContestError(f"training step of {result.case.name}: wrong parameters: {result.wrong}")
    return results


def row_of(result: Result) -> dict[str, Any]:
    row: dict[str, Any] = {"model": result.case.name, "ratio": statistics.median(result.ratios("after", "before"))}
    for name in ("before", "after"):
        row[f"{name}_us"] = result.micros(name)
        row[f"{name}_share"] = efficiency(result, name, IN_STEP.name)
        row[f"{name}_cpu_ms"] = per_step(result, name, "cpu_s", RANKS) * 1e3
    return row


def line_of(result: Result) -> str:
    row, ratios = row_of(result), sorted(result.ratios("after", "before"))
    return TITLES.format(
        row["model"],
        *(report.time_text(result.median(name)) for name in ("before", "after")),
        f"{row['ratio']:.3f}",
        f"({ratios[0]:.2f}, {ratios[-1]:.2f})",
        *(f"{row[f'{name}_share']:.1%}" for name in ("before", "after")),
        *(f"{row[f'{name}_cpu_ms']:.1f}" for name in ("before", "after")),
    )
