"""How much memory horo needs beyond what a script has without it.

    python benchmarks/footprint.py
    python benchmarks/footprint.py --np 4 --json out.json

Every rank measures itself: at rest, and at the highest point of reducing 64 MiB in several ways. What is counted
stands in benchmarks/README.md, what is promised in docs/reference/memory.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launching
import report
from contest import start

RANK = str(Path(__file__).resolve().parent / "footprint_rank.py")
LIMIT_S = 120.0
IN_FLIGHT_BYTES = 64 << 20
FIXED_BYTES = 16 << 20
BYTES_PER_BYTE = 2
# Freed tensors go back to the system at once, so that a high point is that of one piece of work.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
PLACES = {"one host": "together", "a host per rank": "apart"}


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory that horo needs per rank.")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.np < 1:
        parser.error(f"--np {arguments.np}: at least 1")
    return arguments


def measure(ranks: int) -> list[dict[str, Any]]:
    """One row per place and figure, each with the rank that needs most.

    Raises:
        ContestError: a job failed.
    """
    rows = []
    for place, word in PLACES.items():
        said = launching.run(launching.hororun(ranks, [RANK, word]), limit_s=LIMIT_S, more=ALLOCATOR)
        for when, in_flight in (("at_rest", 0), ("at_work", IN_FLIGHT_BYTES)):
            for what in said[0][when]:
                by_rank = [rank[when][what] for rank in sorted(said, key=lambda rank: int(rank["rank"]))]
                rows.append(
                    {
                        "place": place,
                        "ranks": ranks,
                        "what": what,
                        "in_flight_bytes": in_flight,
                        "extra_bytes": max(by_rank),
                        "by_rank_bytes": by_rank,
                        "allowed_bytes": FIXED_BYTES + BYTES_PER_BYTE * in_flight,
                    }
                )
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table that people read."""
    form = "{:16} {:22} {:>14} {:>14} {:>14}"
    lines = [form.format(f"{rows[0]['ranks']} rank(s)", "", "in flight", "extra per rank", "at most")]
    for row in rows:
        sizes = [mebibytes(row[name]) for name in ("in_flight_bytes", "extra_bytes", "allowed_bytes")]
        lines.append(form.format(row["place"], row["what"], *sizes))
    return "\n".join(lines)


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """The lines of `make bench-check`: at rest and at work, the case that needs most."""
    rows = measure(2) if quick else [*measure(2), *measure(4)]
    highest = {row["in_flight_bytes"]: row for row in sorted(rows, key=lambda row: int(row["extra_bytes"]))}
    return [
        report.CheckRow(
            f"extra memory per rank, {report.size_text(in_flight) if in_flight else 'nothing'} in flight",
            row["extra_bytes"] / (1 << 20),
            "MiB",
            "",
            None,
            None,
            f"<= {row['allowed_bytes'] >> 20} MiB",
            row["extra_bytes"] <= row["allowed_bytes"],
            f"{row['place']}, {row['what']}",
        )
        for in_flight, row in sorted(highest.items())
    ]


def run(arguments: argparse.Namespace) -> int:
    rows = measure(arguments.np)
    print(as_table(rows))
    report.save(arguments, "footprint", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
