"""What a commit of an elastic state costs, beside one copy of as many bytes and a training step.

    python benchmarks/elastic_commit.py                        ResNet-50 with momentum, 205 MB, batches of 8
    python benchmarks/elastic_commit.py --batch 32 --rounds 21 --json out.json

One rank, one thread. In each round a copy and a commit come one directly after the other, in an order that alternates;
ratios are taken within rounds. Commits go into the memory that outlives a worker. A few steps follow, at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import models
import report
import torch
from contest import start

import horo.torch as hvd
from horo.elastic import commits
from horo.torch.elastic import TorchState

COPY_TARGET = 1.2
"""A commit takes at most this much of the time of one copy of its bytes."""
STEP_TARGET = 0.01
"""Commits take at most this share of the time of training, one every so many steps:"""
EVERY = 10


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a commit beside a copy of as many bytes.")
    parser.add_argument("--model", default="resnet50", help=f"one of {', '.join(models.RECIPES)} (default: resnet50)")
    parser.add_argument("--batch", type=int, default=8, help="examples of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="commits (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    for name, least in (("batch", 1), ("rounds", 2), ("steps", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: at least {least}")
    models.check_known(parser, "--model", [arguments.model])
    return arguments


def micros(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    recipe = models.RECIPES[arguments.model]
    generator = torch.Generator().manual_seed(1)
    model = recipe.make()
    inputs = recipe.inputs(arguments.batch, generator)
    targets = torch.randint(recipe.classes, (arguments.batch,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    step()
    state = TorchState(model, optimizer, epoch=0)
    state._adopt(commits.CommitMemory(commits.create(), bytes(16)))
    tensors: list[torch.Tensor] = []
    state._capture(tensors)
    size = sum(tensor.nbytes for tensor in tensors)
    source = torch.ones(size, dtype=torch.uint8)
    target = source.clone()
    timed = {"copy_us": lambda: target.copy_(source), "commit_us": state.save}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(arguments.rounds + 2):  # the first commits of both slots get memory
        for name in sorted(timed, reverse=number % 2 == 0):
            times[name].append(micros(timed[name]))
    step_us = statistics.median(micros(step) for _ in range(arguments.steps))
    times = {name: each[2:] for name, each in times.items()}
    ratios = [mine / floor for mine, floor in zip(times["commit_us"], times["copy_us"], strict=True)]
    return {
        "model": arguments.model,
        "bytes": size,
        **times,
        "step_us": step_us,
        "ratio": statistics.median(ratios),
        "share": statistics.median(times["commit_us"]) / (EVERY * step_us),
    }


def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    hvd.init()
    row = measure(arguments)
    hvd.shutdown()
    copy, commit = (report.time_text(statistics.median(row[name])) for name in ("copy_us", "commit_us"))
    ratio, share, step = row["ratio"], row["share"], report.time_text(row["step_us"])
    print(f"{row['model']}, {report.size_text(row['bytes'])} of state, {arguments.rounds} commits")
    print(f"a copy {copy}, a commit {commit}: {ratio:.2f} of it, {verdict(ratio <= COPY_TARGET)}")
    print(f"a step {step}: a commit every {EVERY} steps takes {share:.2%} of it, {verdict(share <= STEP_TARGET)}")
    report.save(arguments, "elastic_commit", [row])
    return 0


def verdict(is_reached: bool) -> str:
    return "ok" if is_reached else "short"


if __name__ == "__main__":
    start(parse_arguments, run)
