"""Trains two models against each other, each with an optimizer of its own: a GAN that learns a bell curve.

    python gan.py                 one process
    hororun -np 2 gan.py          two ranks

The losses of the two models use each other's parameters. Nothing in this needs care: a ``backward()`` averages the
gradients of both models, and the ``zero_grad()`` of the next turn drops those that nobody uses, as in one process. The
lines marked (horo) make the script distributed.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import horo.torch as hvd  # (horo)

MEAN, DEVIATION = 4.0, 0.5
LATENT = 4


def build(inputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.LeakyReLU(0.1), nn.Linear(32, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1)
    )


def distribute(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (horo)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (horo)


def judge(scores: torch.Tensor, is_real: bool) -> torch.Tensor:
    """How far the scores are from saying "real" or "made up"."""
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn a bell curve with mean 4 and standard deviation 0.5.")
    parser.add_argument("--steps", type=int, default=400, help="steps of each model (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step and rank (default: %(default)s)")
    arguments = parser.parse_args()
    for option in ("steps", "batch_size"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(arguments, option)}: at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # (horo)
    torch.manual_seed(0)
    generator, critic = build(LATENT), build(1)
    generator_optimizer, critic_optimizer = distribute(generator), distribute(critic)

    torch.manual_seed(1 + hvd.rank())  # (horo) from here on each rank draws its own samples
    for _ in range(arguments.steps):
        real = MEAN + DEVIATION * torch.randn(arguments.batch_size, 1)
        made_up = generator(torch.randn(arguments.batch_size, LATENT))

        critic_optimizer.zero_grad()
        loss = judge(critic(real), True) + judge(critic(made_up.detach()), False)
        loss.backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        judge(critic(made_up), True).backward()
        generator_optimizer.step()

    with torch.no_grad():
        samples = hvd.allgather(generator(torch.randn(1000, LATENT)))  # (horo) of all ranks
    if hvd.rank() == 0:  # (horo)
        print(f"{len(samples)} samples: mean {samples.mean():.2f}, deviation {samples.std():.2f}", flush=True)


if __name__ == "__main__":
    main()
