"""What the benchmarks on GPUs have in common: their options, the contest, one table, and what they write down.

They need one GPU, and end with a sentence where there is none. With ``--device cpu`` they can be tried there; what they
measure then says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import check
import options
import peers
import report
import torch
from contest import Contest, ContestError
from report import CheckRow
from rounds import Case, Plan, Result, play

from horo.runner.agent.machine import visible_gpus
from horo.runner.job.forwarded_variables import KEEP_MEMORY

__all__ = [
    "BASE",
    "Round",
    "Shown",
    "add",
    "check_rows",
    "ddp",
    "horo",
    "main",
    "measure",
    "one_gpu",
    "parse",
    "why_not",
]

# What hororun sets is set for it, too: else horo would be compared with processes that lack it.
BASE = replace(peers.ALONE, environment=dict(KEEP_MEMORY))
LINE = "{:<24} {:<18} {:>9} {:>9} {:>9} {:>26} {:>10}  {}"
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Round:
    """What is measured in one contest.

    Attributes:
        results: of all cases.
        ranks: of each contestant.
        versions: of what contestants use.
    """

    results: list[Result]
    ranks: int
    versions: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """How results are shown.

    Attributes:
        title: above the table.
        rows: what was reached, beside the targets.
        moved: the bytes that a call moves, for a column with their rate; 0: there is none.
    """

    title: str
    rows: Callable[[Sequence[Round]], list[CheckRow]]
    moved: Callable[[Result], int] = lambda _result: 0


def add(parser: argparse.ArgumentParser, *, rounds: int, turn_ms: float) -> None:
    """Adds --device, --rounds, --turn-ms, --turn-limit-s and --json."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script (default: %(default)s)"
    )
    options.add_turns(parser, rounds=rounds, turn_ms=turn_ms)
    parser.add_argument("--json", metavar="FILE", help="write all values there")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parses and refuses what cannot be."""
    arguments = parser.parse_args(words)
    options.check_turns(parser, arguments)
    return arguments


def why_not(device: str) -> str:
    """Why nothing can be measured; empty: it can."""
    if device == "cpu" or torch.cuda.is_available():
        return ""
    return f"no GPU: torch {torch.__version__} sees none"


def one_gpu(peer: peers.Peer, device: str) -> peers.Peer:
    """The contestant with all of its ranks on the first GPU."""
    if device == "cpu":
        return peer
    first = (visible_gpus(os.environ) or ["0"])[0]
    return replace(peer, environment={**peer.environment, "CUDA_VISIBLE_DEVICES": first})


def horo(device: str, *, by_nccl: bool = False) -> peers.Peer:
    return replace(peers.HORO, launcher_options=("--gpu-operations", "nccl") if by_nccl and device == "cuda" else ())


def ddp(device: str) -> peers.Peer:
    """DDP over NCCL; over gloo, to try a script."""
    return replace(peers.NCCL if device == "cuda" else peers.GLOO, name="DDP", environment=dict(KEEP_MEMORY))


def measure(
    who: Sequence[peers.Peer], ranks: int, workload: str, cases: Sequence[Case], arguments: argparse.Namespace
) -> Round:
    """One contest; results are checked once, at the end.

    Raises:
        ContestError: a contestant died or is too slow to wait for.
    """
    plan = Plan(rounds=arguments.rounds, turn_ms=arguments.turn_ms, check_before=False)
    with Contest(who, ranks, turn_limit_s=arguments.turn_limit_s) as contest:
        versions = contest.versions()
        return Round(play(contest, workload, cases, plan), ranks, versions)


def as_table(rounds: Sequence[Round], shown: Shown) -> str:
    """The table that people read. Times are of a call; "of the ceiling" is a median over heats, with its ends."""
    titles = ("", "", "min", "median", "max", "of the ceiling", "GB/s", "check")
    lines = [shown.title, LINE.format(*titles).rstrip()]
    for each in rounds:
        for result in each.results:
            what = f"{result.case.name}, {each.ranks} rank{'s' if each.ranks > 1 else ''}"
            for name in result.calls:
                lines.append(_line(what, name, result, shown.moved(result)))
                what = ""
            lines += [f"{'':<24} {name:<18} {why}" for name, why in result.unsupported.items()]
    return "\n".join(lines)


def _line(what: str, name: str, result: Result, moved: int) -> str:
    values = result.micros(name)
    times = [report.time_text(value) for value in (min(values), result.median(name), max(values))]
    ratios = result.ratios(name, BASE.name)
    of_base = f"{result.ratio(name, BASE.name):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
    rate = f"{moved / result.median(name) / 1e3:.1f}" if moved else ""
    verdict = f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok"
    return LINE.format(what, name, *times, of_base, rate, verdict)


def describe() -> dict[str, str]:
    """The GPU, and what drives it."""
    if not torch.cuda.is_available():
        return {}
    found = re.search(r"Kernel Module\S*\s+(?:for \S+\s+)?([0-9.]+)", DRIVER.read_text()) if DRIVER.exists() else None
    return {
        "gpu": torch.cuda.get_device_name(0),
        "count": str(torch.cuda.device_count()),
        "driver": found[1] if found else "",
        "cuda": str(torch.version.cuda),
    }


def main(
    name: str,
    arguments: argparse.Namespace,
    contests: Callable[[argparse.Namespace], list[Round]],
    shown: Shown,
) -> int:
    """Measures, prints, writes. Returns 1 if a result was wrong."""
    if reason := why_not(arguments.device):
        print(f"{name}.py: skipped: {reason}")
        return 0
    rounds = contests(arguments)
    gpu = {} if arguments.device == "cpu" else describe()
    where = f"on {gpu['gpu']}, driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}" if gpu else "on no GPU"
    print(f"{as_table(rounds, shown)}\n{where}, torch {torch.__version__}")
    for row in shown.rows(rounds):
        print(check.as_line(row), flush=True)
    rows = [row for each in rounds for result in each.results for row in rows_of(result, each.ranks)]
    versions = {peer: texts for each in rounds for peer, texts in each.versions.items()}
    report.save(arguments, name, rows, versions=versions, gpu=gpu)
    return 1 if any(result.wrong for each in rounds for result in each.results) else 0


def rows_of(result: Result, ranks: int) -> list[dict[str, Any]]:
    """For the JSON: those of the result, with how many times the ceiling's time each takes."""
    rows = result.as_rows(ranks=ranks)
    return [{**row, "of_ceiling": result.ratio(row["contestant"], BASE.name)} for row in rows]


def check_rows(
    name: str,
    arguments: argparse.Namespace,
    contests: Callable[[argparse.Namespace], list[Round]],
    shown: Shown,
) -> list[CheckRow]:
    """For check.py; none, with a sentence, where there is no GPU.

    Raises:
        ContestError: a contestant died, or a result was wrong.
    """
    if reason := why_not(arguments.device):
        print(f"{name}.py: skipped: {reason}", file=sys.stderr)
        return []
    rounds = contests(arguments)
    wrong = [f"{result.case.name}: {result.wrong}" for each in rounds for result in each.results if result.wrong]
    if wrong:
        raise ContestError(f"wrong results of {'; '.join(wrong)}")
    return shown.rows(rounds)
