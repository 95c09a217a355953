"""Trains with 16-bit arithmetic: autocast to bfloat16, or to float16 with a GradScaler; clips gradients, too.

    hororun -np 2 mixed_precision.py                          bfloat16, which needs no scaling
    hororun -np 2 mixed_precision.py --dtype float16          with a GradScaler (torch 2.3 or newer)

Gradients are averaged when ``backward()`` returns, so ``unscale_``, clipping and ``scaler.step`` stand where they stand
in a script for one process. The lines marked (horo) make the script distributed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import horo.torch as hvd  # (horo)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network with 16-bit arithmetic.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    if arguments.dtype == "float16" and not hasattr(torch.amp, "GradScaler"):
        sys.exit(f"mixed_precision.py: torch {torch.__version__} has no GradScaler for the CPU: use --dtype bfloat16")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # (horo)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (horo)
    optimizer = hvd.DistributedOptimizer(  # (horo)
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16,  # gradients are float32; half the bytes travel
    )
    scaler = torch.amp.GradScaler("cpu") if arguments.dtype == "float16" else None

    rule = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    data = torch.Generator().manual_seed(2 + hvd.rank())  # (horo) each rank has data of its own
    losses = []
    for _ in range(arguments.steps):
        inputs = torch.randn(32, 16, generator=data)
        labels = (inputs @ rule).argmax(dim=1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=getattr(torch, arguments.dtype)):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.detach().float())

    begin, end = (hvd.allreduce(torch.stack(part).mean()) for part in (losses[:5], losses[-5:]))  # (horo)
    if hvd.rank() == 0:  # (horo)
        print(f"{arguments.dtype}: loss {begin:.3f} at the beginning, {end:.3f} at the end", flush=True)


if __name__ == "__main__":
    main()
