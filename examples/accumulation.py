"""Accumulates gradients over several batches before each step: large batches in little memory, and less traffic.

    python accumulation.py                                 one process
    hororun -np 2 accumulation.py --batches-per-step 8     two ranks, which average once per step

It fits a line, so that one sees the result. The lines marked (horo) make the script distributed.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from torch import nn

import horo.torch as hvd  # (horo)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit y = 3 x - 1 with accumulated gradients.")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batches-per-step", type=int, default=4, help="batches of each rank (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per batch (default: %(default)s)")
    arguments = parser.parse_args()
    for option in ("steps", "batches_per_step", "batch_size"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(arguments, option)}: at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # (horo)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (horo)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (horo)

    data = torch.Generator().manual_seed(1 + hvd.rank())  # (horo) each rank has data of its own
    for _ in range(arguments.steps):
        optimizer.zero_grad()
        for batch in range(arguments.batches_per_step):
            inputs = torch.randn(arguments.batch_size, 1, generator=data)
            targets = 3 * inputs - 1 + 0.1 * torch.randn(arguments.batch_size, 1, generator=data)
            is_last = batch == arguments.batches_per_step - 1
            # (horo) Before the last batch nothing is sent. Without this, the result is the same and traffic higher.
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets) / arguments.batches_per_step
                loss.backward()
        optimizer.step()

    if hvd.rank() == 0:  # (horo)
        samples = arguments.batches_per_step * arguments.batch_size * hvd.size()
        print(f"{samples} samples per step: y = {model.weight.item():.3f} x {model.bias.item():+.3f}", flush=True)


if __name__ == "__main__":
    main()
