"""Two ranks that share a GPU train ResNet-50 to the parameters of one rank with the batches of both.

    python benchmarks/gpu_shared.py                       through pinned memory, since NCCL refuses it
    python benchmarks/gpu_shared.py --np 4 --batch 8 --json out.json

All ranks normalize by the whole batch (SyncBatchNorm). The comparison is made in float64, after two steps: parameters
may differ by a thousandth of the farthest that one has moved. Steps are timed in float32 beside as many processes that
share the GPU and exchange nothing (ceiling).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gpus
import models
from contest import start
from gpus import BASE, Round, Shown
from report import CheckRow
from rounds import Case, Result


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ranks that share a GPU, beside one that has the batches of all.")
    gpus.add(parser, rounds=5, turn_ms=1000)
    parser.add_argument("--np", type=int, default=2, help="ranks on the GPU (default: %(default)s)")
    parser.add_argument(
        "--model", default="resnet50", help=f"one of {', '.join(models.RECIPES)} (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=16, help="examples per rank (default: %(default)s)")
    arguments = gpus.parse(parser, words)
    for name in ("np", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: at least 1")
    models.check_known(parser, "--model", [arguments.model])
    return arguments


def contests(arguments: argparse.Namespace) -> list[Round]:
    device = arguments.device
    who = [gpus.one_gpu(peer, device) for peer in (BASE, gpus.horo(device))]
    parameters = {"model": arguments.model, "batch": arguments.batch, "synced": True, "device": device}
    return [gpus.measure(who, arguments.np, "training_step", [Case(arguments.model, parameters)], arguments)]


def rows(rounds: Sequence[Round]) -> list[CheckRow]:
    return [row_for(result, each.ranks) for each in rounds for result in each.results]


def row_for(result: Result, ranks: int) -> CheckRow:
    return CheckRow(
        what=f"{result.case.name} on one GPU, {ranks} ranks",
        figure=result.median("horo"),
        unit="us",
        peer="",
        peer_figure=None,
        ratio=None,
        target="parameters of one rank",
        ok=not result.wrong,
        note=f"a step; {result.ratio('horo', BASE.name) or 0.0:.2f} times that of processes that exchange nothing",
    )


SHOWN = Shown("Training step of ranks that share one GPU, beside processes that exchange nothing (ceiling)", rows)


def check_rows(quick: bool = True) -> list[CheckRow]:
    """For check.py, see gpus.check_rows."""
    return gpus.check_rows("gpu_shared", parse_arguments(["--rounds", "3" if quick else "11"]), contests, SHOWN)


if __name__ == "__main__":
    start(parse_arguments, lambda arguments: gpus.main("gpu_shared", arguments, contests, SHOWN))
