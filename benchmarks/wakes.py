"""Two builds of horo, in turn: what a change has done to wake-ups, thread switches and system calls.

    git worktree add ../before COMMIT && make -C ../before build
    python benchmarks/wakes.py ../before .

Each tree has an environment of its own (`make build`). Ranks are forked processes, hosts are joined by TCP over
loopback; no torch, no launcher. A call is an allreduce of 4 bytes. Figures are sums over all ranks, per call, or per
second of a job that is idle. System calls are counted by strace, where that is installed, in runs of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import report
from trees import add_two_trees, check_built, run_in

SCRIPT = Path(__file__).resolve().parent / "wakes_rank.py"
TURN_LIMIT_S = 300
FORM = "{:<24} {:<18} {:>10} {:>10} {:>18}"
FIGURES = {
    "caller": "caller wakes",
    "others": "thread wakes",
    "forced": "forced switches",
    "system calls": "system calls",
}
BEGIN, END = "wakes begin", "wakes end"  # as in wakes_rank.py


class Situation(NamedTuple):
    """What ranks do while they are looked at."""

    name: str
    layout: str
    kind: str


SITUATIONS = (
    Situation("idle, one host", "2", "idle"),
    Situation("idle, two hosts", "1,1", "idle"),
    Situation("sync calls, one host", "2", "sync"),
    Situation("async calls, one host", "2", "async"),
    Situation("sync calls, two hosts", "1,1", "sync"),
)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two builds of horo, in turn: wake-ups and system calls.")
    add_two_trees(parser)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each tree (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=2000, help="of a turn (default: %(default)s)")
    parser.add_argument("--traced-calls", type=int, default=200, help="under strace; 0: none (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn that is idle (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    chosen = parser.parse_args(words)
    check_built(parser, chosen.before, chosen.after)
    return chosen


def run(tree: Path, situation: Situation, amount: int, *before: str) -> dict[str, Any]:
    """What wakes_rank.py says; ``before``: words in front of its command line."""
    words = [situation.layout, situation.kind, str(amount)]
    found: dict[str, Any] = json.loads(run_in(tree, SCRIPT, *words, limit_s=TURN_LIMIT_S, before=before))
    return found


def system_calls(tree: Path, situation: Situation, amount: int) -> int:
    """Those of all ranks, but for giving way to others, which depends on how slow everything is under strace."""
    with tempfile.TemporaryDirectory(prefix="wakes-") as folder:
        log = Path(folder, "log")
        words = ["strace", "-f", "--seccomp-bpf", "-e", "trace=!sched_yield", "-o", str(log)]
        found = run(tree, situation, amount, *words)
        count = count_calls(log.read_text(errors="replace").splitlines(), found["threads"])
    return count - len(found["threads"]) if situation.kind == "idle" else count  # each has a sleep of its own


def count_calls(lines: list[str], ranks: list[list[int]]) -> int:
    """The calls of a log of strace that threads of a rank began while the rank was looked at.

    Args:
        lines: each begins with the number of a thread.
        ranks: the numbers of the threads of each.
    """
    rank_of = {thread: rank for rank, threads in enumerate(ranks) for thread in threads}
    looked_at: set[int] = set()
    count = 0
    for line in lines:
        thread, _, call = line.partition(" ")
        rank = rank_of.get(int(thread), -1)
        if f'"{BEGIN}"' in call:
            looked_at.add(rank)
        elif f'"{END}"' in call:
            looked_at.discard(rank)
        elif rank in looked_at and not call.lstrip().startswith(("<...", "---", "+++")):
            count += 1
    return count


def turn(chosen: argparse.Namespace, tree: Path, situation: Situation) -> dict[str, float]:
    """The figures of one turn, per call or per second."""
    is_idle = situation.kind == "idle"
    amount = round(chosen.seconds * 1000) if is_idle else chosen.calls
    share = chosen.seconds if is_idle else chosen.calls
    figures = {name: count / share for name, count in run(tree, situation, amount)["counts"].items()}
    if chosen.traced_calls > 0 and shutil.which("strace") is not None:
        more, per = (amount, chosen.seconds) if is_idle else (chosen.traced_calls, chosen.traced_calls)
        figures["system calls"] = system_calls(tree, situation, more) / per
    return figures


def main(words: list[str]) -> None:
    chosen = parse_arguments(words)
    rows: list[dict[str, Any]] = []
    print(FORM.format("", "per call (idle: per s)", "before", "after", "(least, most) after"))
    for situation in SITUATIONS:
        before: list[dict[str, float]] = []
        after: list[dict[str, float]] = []
        for index in range(chosen.rounds):
            order = [(chosen.before, before), (chosen.after, after)]
            for tree, found in order if index % 2 == 0 else reversed(order):
                found.append(turn(chosen, tree, situation))
        for name, title in FIGURES.items():
            if name not in before[0]:
                continue
            a, b = ([each[name] for each in found] for found in (before, after))
            rows.append({"situation": situation.name, "figure": name, "before": a, "after": b})
            spread = f"({min(b):.4g}, {max(b):.4g})"
            medians = (f"{statistics.median(values):.4g}" for values in (a, b))
            print(FORM.format(situation.name, title, *medians, spread), flush=True)
    report.save(chosen, "wakes", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
