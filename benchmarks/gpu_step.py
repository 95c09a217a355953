"""What DistributedOptimizer costs a training step on a GPU, where there is nobody to exchange gradients with.

    python benchmarks/gpu_step.py                         ResNet-50 and a transformer in bfloat16, one rank
    python benchmarks/gpu_step.py --models resnet50-128 --rounds 21 --json out.json

The ceiling is a plain step in a process of its own. A second such process shows how far two that do the same are apart:
a difference that is not larger says nothing. DDP over NCCL takes part for comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import gpus
import models
from contest import start
from gpus import BASE, Round, Shown
from report import CheckRow
from rounds import Case, Result

TARGET = 1.01
AGAIN = replace(BASE, name=f"{BASE.name}, again")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a training step on one GPU, with horo and without.")
    gpus.add(parser, rounds=9, turn_ms=1000)
    known = ", ".join(models.RECIPES)
    default = "resnet50-128,transformer-large"
    parser.add_argument("--models", default=default, help=f"some of {known} (default: %(default)s)")
    arguments = gpus.parse(parser, words)
    arguments.models = arguments.models.split(",")
    models.check_known(parser, "--models", arguments.models)
    return arguments


def contests(arguments: argparse.Namespace) -> list[Round]:
    """One model after another, so that all contestants fit into the memory of the GPU."""
    device = arguments.device
    who = [BASE, AGAIN, gpus.horo(device), gpus.ddp(device)]
    cases = [Case(name, {"model": name, "device": device, "autocast": True}) for name in arguments.models]
    return [gpus.measure(who, 1, "training_step", [case], arguments) for case in cases]


def rows(rounds: Sequence[Round]) -> list[CheckRow]:
    return [row_for(result) for each in rounds for result in each.results]


def row_for(result: Result) -> CheckRow:
    mine, theirs, again = (result.ratio(name, BASE.name) or 0.0 for name in ("horo", "DDP", AGAIN.name))
    return CheckRow(
        what=f"{result.case.name} in bfloat16 on one GPU, 1 rank",
        figure=100 * (mine - 1),
        unit="%",
        peer="DDP",
        peer_figure=100 * (theirs - 1),
        ratio=result.ratio("DDP"),
        target=f"<= {TARGET - 1:.0%}",
        ok=mine <= TARGET,
        note=f"more than a plain step; a second plain one {100 * (again - 1):+.2f} %",
    )


SHOWN = Shown("Training step in bfloat16 on one GPU beside plain steps (ceiling)", rows)


def check_rows(quick: bool = True) -> list[CheckRow]:
    """For check.py, see gpus.check_rows."""
    words = ["--rounds", "5", "--models", "resnet50-128"] if quick else ["--rounds", "21"]
    return gpus.check_rows("gpu_step", parse_arguments(words), contests, SHOWN)


if __name__ == "__main__":
    start(parse_arguments, lambda arguments: gpus.main("gpu_step", arguments, contests, SHOWN))
