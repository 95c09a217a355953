"""How long horo takes until training can begin, beside torchrun with gloo.

    python benchmarks/startup.py
    python benchmarks/startup.py --np 4 --rounds 9 --json out.json
    python benchmarks/startup.py --clients 1024

Measured from outside, with a clock that all processes share; everybody has a turn in every round. What each row means
stands in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import launching
import report
from contest import start
from startup_clients import measure_clients

RANK = str(Path(__file__).resolve().parent / "startup_rank.py")
LIMIT_S = 100.0
CYCLES = 5


class Target(NamedTuple):
    """A row of the check: at most ``most_ms``, or at most what ``peer`` takes in the same run."""

    what: str
    title: str
    most_ms: float | None
    peer: str = ""


TARGETS = (
    Target("import", "import horo.torch over import torch", 50.0),
    Target("help", "hororun --help", 150.0),
    Target("first cycle", "first init + shutdown", 50.0),
    Target("cycle", "later init + shutdown", 50.0),
    Target("hororun to ready", "hororun to ready", None, "torchrun to ready"),
)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time until training can begin.")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of everybody (default: %(default)s)")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=1,
        metavar="N",
        help="rounds before, not counted: they compile bytecode and fill the page cache (default: %(default)s)",
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=0,
        metavar="N",
        help="instead: what so many ranks read from the job's store while they start, as threads of one process",
    )
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    for name, least in (("np", 1), ("rounds", 1), ("warm_up", 0), ("clients", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least {least}")
    return arguments


def measure_help(_ranks: int) -> dict[str, float]:
    begin_s = time.monotonic()
    launching.run([sys.executable, "-m", "horo.runner", "--help"], limit_s=LIMIT_S)
    return {"help": (time.monotonic() - begin_s) * 1e3}


def measure_import(_ranks: int) -> dict[str, float]:
    (said,) = launching.run([sys.executable, RANK, "import"], limit_s=LIMIT_S)
    return {"import": said["import_ms"]}


def measure_cycles(ranks: int) -> dict[str, float]:
    """The first cycle of the rank that came last, which waited for nobody; of later ones the slowest rank's median."""
    said = launching.run(launching.hororun(ranks, [RANK, "cycle", str(1 + CYCLES)]), limit_s=LIMIT_S)
    by_rank = [rank["cycles_ms"] for rank in said]
    later = [max(rank[number] for rank in by_rank) for number in range(1, 1 + CYCLES)]
    return {"first cycle": min(rank[0] for rank in by_rank), "cycle": statistics.median(later)}


def measure_ready(launcher: str, ranks: int) -> dict[str, float]:
    """From before the launcher starts to the last rank that is ready, and what of that lies outside horo and gloo."""
    launch, library = (launching.hororun, "horo") if launcher == "hororun" else (launching.torchrun, "gloo")
    command = launch(ranks, [RANK, library])
    begin_s = time.monotonic()
    said = launching.run(command, limit_s=LIMIT_S)
    imported_s = max(rank["imported_s"] for rank in said)
    started_s = max(rank["started_s"] for rank in said)
    ready_s = max(rank["ready_s"] for rank in said)
    return {
        f"{launcher} to ready": (ready_s - begin_s) * 1e3,
        f"{launcher} to the first line": (started_s - begin_s) * 1e3,
        f"{launcher}, imports": (imported_s - started_s) * 1e3,
        f"{launcher}, {library} init": (ready_s - imported_s) * 1e3,
    }


def measure(ranks: int, rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Milliseconds by what was measured, one value per round.

    Raises:
        ContestError: something that was started failed.
    """
    turns: list[Callable[[int], dict[str, float]]] = [
        measure_help,
        measure_import,
        measure_cycles,
        lambda n: measure_ready("hororun", n),
        lambda n: measure_ready("torchrun", n),
    ]
    values: dict[str, list[float]] = {}
    for number in range(warm_up + rounds):
        for turn in turns if number % 2 == 0 else turns[::-1]:
            measured = turn(ranks)
            if number >= warm_up:
                for what, value in measured.items():
                    values.setdefault(what, []).append(round(value, 2))
    return values


def as_rows(values: dict[str, list[float]], ranks: int) -> list[dict[str, Any]]:
    return [
        {
            "what": what,
            "ranks": ranks,
            "min_ms": min(measured),
            "median_ms": statistics.median(measured),
            "max_ms": max(measured),
            "rounds_ms": measured,
        }
        for what, measured in values.items()
    ]


def as_table(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """The table that people read."""
    width = max(len(row["what"]) for row in rows)
    lines = [f"startup with {ranks} rank(s), in ms", f"{'':{width}}  {'min':>8} {'median':>8} {'max':>8}"]
    lines += [
        f"{row['what']:{width}}  {row['min_ms']:8.1f} {row['median_ms']:8.1f} {row['max_ms']:8.1f}" for row in rows
    ]
    return "\n".join(lines)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """The lines of `make bench-check`."""
    # In a hurry, what was measured before has warmed the caches.
    values = measure(2, 2, warm_up=0) if quick else measure(2, 7)
    return [_check_row(target, values) for target in TARGETS]


def _check_row(target: Target, values: dict[str, list[float]]) -> report.CheckRow:
    figure = statistics.median(values[target.what])
    if target.most_ms is not None:
        wanted = f"<= {target.most_ms:g} ms"
        return report.CheckRow(target.title, figure, "ms", "", None, None, wanted, figure <= target.most_ms)
    ratio = statistics.median(
        theirs / ours for theirs, ours in zip(values[target.peer], values[target.what], strict=True)
    )
    peer = statistics.median(values[target.peer])
    return report.CheckRow(target.title, figure, "ms", "torchrun", peer, ratio, ">= 1x", ratio >= 1)


def run_clients(arguments: argparse.Namespace) -> int:
    row = measure_clients(arguments.clients)
    read, each = row["reply_bytes"] / 1e6, row["reply_bytes"] / row["clients"] / 1e3
    print(f"{row['clients']} clients start in {row['wall_s']:.1f} s; replies: {read:.1f} MB, {each:.1f} KB for each")
    report.save(arguments, "startup", [row])
    return 0


def run(arguments: argparse.Namespace) -> int:
    if arguments.clients:
        return run_clients(arguments)
    rows = as_rows(measure(arguments.np, arguments.rounds, arguments.warm_up), arguments.np)
    print(as_table(rows, arguments.np))
    report.save(arguments, "startup", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
