"""Trains a small convolutional network on scikit-learn's handwritten digits.

    python digits.py                               one process
    hororun -np 2 digits.py                        two ranks
    torchrun --nproc-per-node 2 digits.py          the same, started by torch

The batch size is that of the whole job: each rank takes its share of every batch, and gradients are averaged. So any
number of ranks takes the same steps and prints the same accuracy; the lines marked (horo) make the script distributed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import horo.torch as hvd  # (horo)

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("digits.py: scikit-learn, which brings the images, is not installed; run: pip install scikit-learn")

TEST_IMAGES = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=96, help="images per step, all ranks together (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1")
    if arguments.batch_size < 1:
        parser.error(f"--batch-size {arguments.batch_size}: at least 1")
    if not arguments.lr > 0:
        parser.error(f"--lr {arguments.lr}: more than 0")
    return arguments


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images [n, 1, 8, 8] in 0..1 with labels [n], then those to test on; shuffled by a fixed seed."""
    digits = load_digits()
    # by lists: older builds of torch cannot read arrays of numpy 2
    images = torch.tensor((digits.images / 16.0).tolist(), dtype=torch.float64).unsqueeze(1)
    labels = torch.tensor(digits.target.tolist())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return images[train], labels[train], images[test], labels[test]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, batch_size: int
) -> float:
    """One pass in the order given, a last incomplete batch left out. Returns the mean loss over all ranks."""
    losses = []
    for start in range(0, len(labels) - batch_size + 1, batch_size):
        mine = slice(start + hvd.rank(), start + batch_size, hvd.size())  # (horo) this rank's share of the batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(hvd.allreduce(torch.stack(losses).mean(), name="loss"))  # (horo)


def count_correct(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    """How many of the images all ranks together classify correctly, each looking at its share."""
    mine = slice(hvd.rank(), None, hvd.size())  # (horo)
    with torch.no_grad():
        correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    return int(hvd.allreduce(correct, op=hvd.Sum, name="correct"))  # (horo)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # (horo)
    is_first = hvd.rank() == 0  # (horo) one rank prints
    if arguments.batch_size % hvd.size() != 0:
        sys.exit(f"digits.py: --batch-size {arguments.batch_size} is not a multiple of the {hvd.size()} ranks")

    # Double precision, so that the order of additions, which depends on the number of ranks, shows in no printed digit.
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    if arguments.batch_size > len(labels):
        sys.exit(f"digits.py: --batch-size {arguments.batch_size} is more than the {len(labels)} training images")
    model = build_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (horo)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (horo)

    if is_first:
        share = arguments.batch_size // hvd.size()
        print(f"{len(labels)} images to train on, {hvd.size()} rank(s) with {share} images per step each", flush=True)
    shuffle = torch.Generator().manual_seed(1)
    for epoch in range(1, arguments.epochs + 1):
        order = torch.randperm(len(labels), generator=shuffle)
        loss = train_epoch(model, optimizer, images[order], labels[order], arguments.batch_size)
        correct = count_correct(model, test_images, test_labels)
        if is_first:
            print(
                f"epoch {epoch:2d}/{arguments.epochs}  loss {loss:.4f}  accuracy {correct / len(test_labels):.4f}",
                flush=True,
            )
    if is_first:
        print(f"test accuracy: {correct / len(test_labels):.4f} ({correct} of {len(test_labels)} images)", flush=True)


if __name__ == "__main__":
    main()
