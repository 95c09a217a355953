"""Two builds of horo, in turn: what a change has done to the time of an allreduce and of a training step.

    git worktree add ../before COMMIT && make -C ../before build
    python benchmarks/builds.py ../before . --layouts "2;4;1,1;1,1,1,1" --sizes 4,4K,64K,4M,64M --rounds 9

Each tree has an environment of its own (`make build`). Ranks are forked processes of numpy arrays, hosts are joined by
TCP over loopback; no torch, no launcher. A ratio below 1 says that the second tree takes less time. Then two ranks of
each tree train a model, beside processes that exchange nothing: shares of that ceiling, and CPU time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import report
from trees import add_two_trees, check_built, run_in

SCRIPT = Path(__file__).resolve().parent / "builds_rank.py"
TURN_LIMIT_S = 300
TITLES = "{:<12} {:>8} {:>12} {:>12} {:>8} {:>15}"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two builds of horo, in turn.")
    add_two_trees(parser)
    parser.add_argument("--layouts", default="2;4;1,1;1,1,1,1", help="ranks of each host, layouts apart by ';'")
    parser.add_argument("--sizes", default="4,4K,64K,4M,64M", help="bytes of the tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each tree (default: %(default)s)")
    parser.add_argument("--turn-ms", type=float, default=200, help="about, per size (default: %(default)s)")
    parser.add_argument("--models", default="mlp", help="of training_step.py; '' for none (default: %(default)s)")
    parser.add_argument("--step-turn-ms", type=float, default=1000, help="about, per model (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    chosen = parser.parse_args(words)
    check_built(parser, chosen.before, chosen.after)
    return chosen


def turn(tree: Path, layout: str, sizes: list[int], turn_ms: float) -> dict[int, float]:
    """Microseconds by size, of one job of this tree."""
    words = [layout, ",".join(map(str, sizes)), str(turn_ms / 1000)]
    found = json.loads(run_in(tree, SCRIPT, *words, limit_s=TURN_LIMIT_S))
    return {int(size): micros for size, micros in found.items()}


def compare_steps(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints and returns the rows of whole steps."""
    models = [name for name in chosen.models.split(",") if name]
    if not models:
        return []
    import builds_steps as steps  # noqa: PLC0415 - it imports torch

    try:
        results = steps.compare(chosen.before, chosen.after, models, rounds=chosen.rounds, turn_ms=chosen.step_turn_ms)
    except steps.ContestError as error:
        raise SystemExit(f"builds.py: {error}") from None
    titles = ("ratio", "(least, most)", "share", "share after", "CPU ms", "CPU ms after")
    print(steps.TITLES.format("step of", "before", "after", *titles))
    for result in results:
        print(steps.line_of(result), flush=True)
    return [steps.row_of(result) for result in results]


def main(words: list[str]) -> None:
    chosen = parse_arguments(words)
    sizes = [report.parse_size(word) for word in chosen.sizes.split(",")]
    rows: list[dict[str, Any]] = []
    if chosen.layouts:
        print(TITLES.format("hosts", "size", "before us", "after us", "ratio", "(least, most)"))
    for layout in filter(None, chosen.layouts.split(";")):
        before: dict[int, list[float]] = {size: [] for size in sizes}
        after: dict[int, list[float]] = {size: [] for size in sizes}
        for index in range(chosen.rounds):
            order = [(chosen.before, before), (chosen.after, after)]
            for tree, times in order if index % 2 == 0 else reversed(order):
                for size, micros in turn(tree, layout, sizes, chosen.turn_ms).items():
                    times[size].append(micros)
        for size in sizes:
            ratios = sorted(b / a for a, b in zip(before[size], after[size], strict=True))
            a, b, ratio = (statistics.median(values) for values in (before[size], after[size], ratios))
            rows.append(
                {"layout": layout, "bytes": size, "before_us": before[size], "after_us": after[size], "ratio": ratio}
            )
            spread = f"({ratios[0]:.2f}, {ratios[-1]:.2f})"
            print(
                TITLES.format(layout, report.size_text(size), f"{a:.2f}", f"{b:.2f}", f"{ratio:.3f}", spread),
                flush=True,
            )
    rows += compare_steps(chosen)
    report.save(chosen, "builds", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
