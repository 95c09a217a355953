"""Where horo stands beside its peers and its targets: one line per target, what `make bench-check` prints.

    python benchmarks/check.py                      quick, a few minutes
    python benchmarks/check.py allreduce --full     one benchmark, more rounds

A report, not a test: exit code 0 also where a target is missed, 1 only when something broke.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence

import report
import suite
from contest import ContestError, start
from report import CheckRow

TITLES = "{:<5} {:<44} {:>11}  {:<20} {:>8}  {:<10} {}"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One line per target: figure, best peer, ratio, target, ok or short.")
    known = [script for script in suite.scripts() if rows_of(script) is not None]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which benchmarks (default: all of {', '.join(known)})"
    )
    parser.add_argument("--full", action="store_true", help="more rounds: slower, and less noise")
    arguments = parser.parse_args(words)
    for name in arguments.names:
        if name not in known:
            parser.error(f"'{name}' has no targets; those that have are {', '.join(known)}")
    arguments.names = arguments.names or known
    return arguments


def rows_of(script: str) -> Callable[[bool], list[CheckRow]] | None:
    """``check_rows`` of a benchmark, None if it has no targets."""
    rows: Callable[[bool], list[CheckRow]] | None = getattr(importlib.import_module(script), "check_rows", None)
    return rows


def as_line(row: CheckRow) -> str:
    """``ok    64 MiB float32, 2 ranks  10.1 GB/s  Open MPI 2.6 GB/s  3.90x  >= 3.5x``."""
    peer = "" if row.peer_figure is None else f"{row.peer} {figure_text(row.peer_figure, row.unit)}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    figure = figure_text(row.figure, row.unit)
    return TITLES.format("ok" if row.ok else "short", row.what, figure, peer, ratio, row.target, row.note).rstrip()


def figure_text(figure: float, unit: str) -> str:
    if unit == "us":
        return report.time_text(figure)
    number = f"{figure:g}" if figure == int(figure) else report.three_digits(figure)
    return f"{number} {unit}".rstrip()


def summary(rows: Sequence[CheckRow]) -> str:
    short = sum(not row.ok for row in rows)
    return f"{len(rows)} targets: {len(rows) - short} ok, {short} short"


def run(arguments: argparse.Namespace) -> int:
    print(TITLES.format("", "what", "horo", "best peer", "ratio", "target", "").rstrip(), flush=True)
    rows: list[CheckRow] = []
    broken = []
    took = []
    for name in arguments.names:
        check_rows, begin = rows_of(name), time.monotonic()
        try:
            found = check_rows(not arguments.full) if check_rows else []
        except ContestError as error:
            print(f"check.py: {name}: {error}", file=sys.stderr)
            broken.append(name)
            continue
        for row in found:
            print(as_line(row), flush=True)
        rows += found
        took.append((name, time.monotonic() - begin))
    parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in took)
    print(f"{summary(rows)}; {sum(seconds for _, seconds in took):.0f} s ({parts})")
    return 1 if broken else 0


if __name__ == "__main__":
    start(parse_arguments, run)
