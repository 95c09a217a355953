"""How long it takes to average the gradients of ResNet-50 (161 tensors, 100 MB) by NCCL, beside DDP.

    python benchmarks/gpu_gradients.py                    a rank on each GPU
    python benchmarks/gpu_gradients.py --np 1 --rounds 21 --json out.json

A call is a backward pass that makes nothing but gradients, and their average: what DDP packs, reduces and unpacks
meanwhile, horo's grouped_allreduce_ does behind it ("grouped"), and with several ranks DistributedOptimizer meanwhile
("optimizer"; one rank has nobody to exchange gradients with). The ceiling is the backward pass alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gpus
import models
import torch
from contest import start
from gpus import BASE, Round, Shown
from report import CheckRow
from rounds import Case, Result


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to average 161 gradients by NCCL, beside DDP.")
    gpus.add(parser, rounds=15, turn_ms=200)
    parser.add_argument("--np", type=int, default=0, help="ranks, each on a GPU of its own (default: one for each)")
    parser.add_argument("--model", default="resnet50", help="whose gradients (default: %(default)s)")
    arguments = gpus.parse(parser, words)
    there = torch.cuda.device_count() if arguments.device == "cuda" else 2
    arguments.np = arguments.np or max(1, there)
    if not 1 <= arguments.np <= max(1, there):
        parser.error(f"--np {arguments.np}: there is a GPU each for 1 to {there} ranks")
    models.check_known(parser, "--model", [arguments.model])
    return arguments


def contests(arguments: argparse.Namespace) -> list[Round]:
    device = arguments.device
    who = [BASE, gpus.horo(device, by_nccl=True), gpus.ddp(device)]
    forms = ["grouped", *(["optimizer"] if arguments.np > 1 else [])]
    cases = [Case(form, {"model": arguments.model, "form": form, "device": device}) for form in forms]
    return [gpus.measure(who, arguments.np, "gradients", cases, arguments)]


def rows(rounds: Sequence[Round]) -> list[CheckRow]:
    return [row_for(result, each.ranks) for each in rounds for result in each.results]


def row_for(result: Result, ranks: int) -> CheckRow:
    ratios = result.ratios("DDP")
    beyond = [result.median(name) - result.median(BASE.name) for name in ("horo", "DDP")]
    return CheckRow(
        what=f"gradients of {result.case.parameters['model']}, {result.case.name}, {ranks} ranks",
        figure=result.median("horo"),
        unit="us",
        peer="DDP",
        peer_figure=result.median("DDP"),
        ratio=result.ratio("DDP"),
        target=">= 1x",
        ok=(result.ratio("DDP") or 0.0) >= 1.0,
        note=f"{min(ratios):.2f} to {max(ratios):.2f}; beyond backward {beyond[0]:.0f} us, DDP {beyond[1]:.0f} us",
    )


SHOWN = Shown("Average of gradients on GPUs, by NCCL, with a backward pass that makes nothing else (ceiling)", rows)


def check_rows(quick: bool = True) -> list[CheckRow]:
    """For check.py, see gpus.check_rows."""
    return gpus.check_rows("gpu_gradients", parse_arguments(["--rounds", "7" if quick else "31"]), contests, SHOWN)


if __name__ == "__main__":
    start(parse_arguments, lambda arguments: gpus.main("gpu_gradients", arguments, contests, SHOWN))
