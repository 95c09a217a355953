"""What share of the rate of copies between host and GPU the way through pinned host memory reaches.

    python benchmarks/gpu_staging.py                      one rank, and two that share the GPU
    python benchmarks/gpu_staging.py --np 1 --sizes 64M,1G --json out.json

The ceiling copies the same tensors to pinned memory and back, in as many processes at once. A rank by itself has
nothing to add up, so all of horo's time is copies and what surrounds them; two ranks also add up in host memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gpus
import models
import report
from contest import start
from gpus import BASE, Round, Shown
from report import CheckRow
from rounds import Case, Result
from workloads.gradients import shapes_of

TARGET = 0.8
TARGET_FROM_BYTES = 16 << 20
"""Below, starting a copy takes as long as the copy."""


def parse_sizes(text: str) -> list[int]:
    """``1M,64M``; for argparse."""
    sizes = [report.parse_size(word) for word in text.split(",")]
    if any(size % 4 for size in sizes):
        raise argparse.ArgumentTypeError(f"'{text}': float32 takes 4 bytes each")
    return sizes


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Staged sums on one GPU, as a share of what copies reach.")
    gpus.add(parser, rounds=11, turn_ms=150)
    parser.add_argument("--np", choices=("1", "2", "1,2"), default="1,2", help="ranks (default: %(default)s)")
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default="1M,16M,64M,256M",
        metavar="LIST",
        help="of a tensor (default: %(default)s)",
    )
    parser.add_argument("--model", default="resnet50", help="whose gradients are sent, too (default: %(default)s)")
    arguments = gpus.parse(parser, words)
    models.check_known(parser, "--model", [arguments.model])
    return arguments


def contests(arguments: argparse.Namespace) -> list[Round]:
    device = arguments.device
    who = [gpus.one_gpu(peer, device) for peer in (BASE, gpus.horo(device))]
    cases = [Case(report.size_text(size), {"counts": [size // 4], "device": device}) for size in arguments.sizes]
    counts = [shape.numel() for shape in shapes_of(arguments.model)]
    cases.append(Case(f"{len(counts)} gradients", {"counts": counts, "device": device}))
    return [gpus.measure(who, int(ranks), "staging", cases, arguments) for ranks in arguments.np.split(",")]


def bytes_of(result: Result) -> int:
    """Of the tensors of one rank, once."""
    counts: list[int] = result.case.parameters["counts"]
    return 4 * sum(counts)


def rows(rounds: Sequence[Round]) -> list[CheckRow]:
    """Of ranks by themselves, which do nothing but copy."""
    alone = [result for each in rounds if each.ranks == 1 for result in each.results]
    return [row_for(result) for result in alone if bytes_of(result) >= TARGET_FROM_BYTES]


def row_for(result: Result) -> CheckRow:
    shares = result.ratios(BASE.name)
    share = result.ratio(BASE.name) or 0.0
    return CheckRow(
        what=f"{result.case.name} through pinned memory, 1 rank",
        figure=100 * share,
        unit="%",
        peer="",
        peer_figure=None,
        ratio=None,
        target=f">= {TARGET:.0%}",
        ok=share >= TARGET,
        note=f"of the rate of copies; {min(shares):.0%} to {max(shares):.0%}",
    )


SHOWN = Shown(
    "Sums that pass through pinned memory beside copies to the host and back (ceiling); GB/s: both ways together",
    rows,
    moved=lambda result: 2 * bytes_of(result),
)


def check_rows(quick: bool = True) -> list[CheckRow]:
    """For check.py, see gpus.check_rows."""
    words = ["--np", "1", "--rounds", "5" if quick else "31"]
    return gpus.check_rows("gpu_staging", parse_arguments(words), contests, SHOWN)


if __name__ == "__main__":
    start(parse_arguments, lambda arguments: gpus.main("gpu_staging", arguments, contests, SHOWN))
