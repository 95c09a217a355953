"""What many process groups of torch cost each rank: descriptors, threads, memory, time, and what they do when idle.

    python benchmarks/groups.py --np 8 --groups 100
    python benchmarks/groups.py --np 2 --backends horo,gloo --json out.json

All groups have all ranks, so the first rank leads them all: it needs most. The terms are defined in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launching
import report
from contest import start

RANK = str(Path(__file__).resolve().parent / "groups_rank.py")
LIMIT_S = 300.0
BACKENDS = ("horo", "gloo")
HELD = ("descriptors", "threads", "resident_bytes", "shared_bytes")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What many process groups of torch cost.")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long they are idle (default: %(default)s)")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="of these (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    for name in ("np", "groups"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: at least 1")
    arguments.backends = arguments.backends.split(",")
    for backend in arguments.backends:
        if backend not in BACKENDS:
            parser.error(f"--backends {backend}: choose from {', '.join(BACKENDS)}")
    return arguments


def measure(backend: str, ranks: int, groups: int, seconds: float) -> dict[str, Any]:
    """The rank that needs most of each.

    Raises:
        ContestError: the job failed.
    """
    words = [RANK, backend, str(groups), str(seconds)]
    said = launching.run(launching.torchrun(ranks, words), limit_s=LIMIT_S)
    each = {what: max((of["with_groups"][what] - of["before"][what]) / groups for of in said) for what in HELD}
    left = {what: max(of["after"][what] - of["before"][what] for of in said) for what in ("descriptors", "threads")}
    return {
        "backend": backend,
        "ranks": ranks,
        "groups": groups,
        "per_group": {**each, "making_s": max(of["making_s"] for of in said) / groups},
        "left": left,
        "idle_s": seconds,
        "idle_wake_ups": max(of["idle_wake_ups"] for of in said),
        "idle_cpu_ms": max(of["idle_cpu_ns"] for of in said) / 1e6,
        "thread_names": said[0]["thread_names"],
    }


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table that people read."""
    lines = []
    for row in rows:
        each = row["per_group"]
        lines += [
            f"{row['backend']}, {row['groups']} groups of {row['ranks']} ranks, the rank that needs most",
            f"  per group: {each['descriptors']:.2f} descriptors, {each['threads']:.2f} threads, "
            f"{each['resident_bytes'] / 1024:.0f} KiB resident, {each['shared_bytes'] / 1024:.0f} KiB mapped, "
            f"{each['making_s'] * 1e3:.1f} ms to make",
            f"  left behind: {row['left']['descriptors']} descriptors, {row['left']['threads']} threads",
            f"  idle for {row['idle_s']:g} s: {row['idle_wake_ups']} wake-ups, {row['idle_cpu_ms']:.1f} ms of CPU",
        ]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    rows = [measure(backend, arguments.np, arguments.groups, arguments.seconds) for backend in arguments.backends]
    print(as_table(rows))
    report.save(arguments, "groups", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
