"""Trains a small residual network as one trains ResNet on ImageNet: warm-up, a schedule, checkpoints, resume.

    hororun -np 2 imagenet.py --checkpoint run.pt                two ranks
    hororun -np 4 imagenet.py --checkpoint run.pt --epochs 8     goes on where the first job has stopped

The images are made up, so that nothing has to be fetched: each class has a pattern, each image the pattern of its
class under noise. Put your own ``Dataset`` in their place. The lines marked (horo) make the script distributed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horo.torch as hvd  # (horo)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a residual network on made-up images.")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the images, those of a resumed job included")
    parser.add_argument("--warmup-epochs", type=int, default=2, help="epochs in which the learning rate rises")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--base-lr", type=float, default=0.005, help="learning rate for one rank")
    parser.add_argument("--images", type=int, default=512, help="how many images to make")
    parser.add_argument(
        "--checkpoint", type=Path, help="file to write after each epoch, and to go on from if it is there"
    )
    arguments = parser.parse_args()
    for option in ("epochs", "batch_size", "images"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option.replace('_', '-')} {getattr(arguments, option)}: at least 1")
    if arguments.warmup_epochs < 0:
        parser.error(f"--warmup-epochs {arguments.warmup_epochs}: at least 0")
    if not arguments.base_lr > 0:
        parser.error(f"--base-lr {arguments.base_lr}: more than 0")
    if arguments.checkpoint is not None and not arguments.checkpoint.parent.is_dir():
        parser.error(f"--checkpoint {arguments.checkpoint}: there is no folder {arguments.checkpoint.parent}")
    return arguments


def make_images(count: int, classes: int = 10) -> TensorDataset:
    """Images [count, 3, 16, 16] and labels [count], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, 3, 16, 16, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 2 * torch.randn(count, 3, 16, 16, generator=generator), labels)


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images + self.path(images))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), Block(16), nn.MaxPool2d(4), Block(16), nn.Flatten(), nn.Linear(16 * 16, 10)
    )


def learning_rate(progress: float, arguments: argparse.Namespace) -> float:
    """After ``progress`` epochs: up from that of one rank to that of all, which suits the larger batch, then down."""
    base, warmup, epochs = float(arguments.base_lr), int(arguments.warmup_epochs), int(arguments.epochs)
    peak = base * hvd.size()  # (horo) N ranks take a batch N times as large in each step
    if progress < warmup:
        return base + (peak - base) * progress / warmup
    return peak * (1 - 0.9 * (progress - warmup) / max(1, epochs - warmup))


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Rank 0 reads the checkpoint, if there is one, and all ranks get what it holds. Returns the epochs done."""
    done = 0
    if hvd.rank() == 0 and path is not None and path.exists():  # (horo)
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (horo)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # (horo)
    return int(hvd.broadcast_object(done, root_rank=0))  # (horo)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Writes a checkpoint that is whole or not there: a job that is ended while writing leaves the one before."""
    unfinished = path.with_name(path.name + ".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}, unfinished)
    unfinished.replace(path)


def train_epoch(
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    arguments: argparse.Namespace,
) -> float:
    """Returns the mean loss over all images of all ranks."""
    model.train()
    averages = hvd.MetricAverage("loss")  # (horo)
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + step / len(loader), arguments)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        averages.update(len(labels), loss=loss)  # (horo)
    return averages.compute()["loss"]  # (horo)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()  # (horo)
    torch.manual_seed(0)
    images = make_images(arguments.images)
    sampler: DistributedSampler[Any] = DistributedSampler(  # (horo)
        images, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True
    )
    loader: DataLoader[Any] = DataLoader(images, batch_size=arguments.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        sys.exit(f"imagenet.py: --images {arguments.images} is less than one batch of {arguments.batch_size} per rank")
    model = build_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=arguments.base_lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (horo)
    first = resume(arguments.checkpoint, model, optimizer)
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same one in a resumed job
        loss = train_epoch(epoch, model, optimizer, loader, arguments)
        hvd.average_buffers(model)  # (horo) the running statistics of BatchNorm, which are each rank's own until here
        if hvd.rank() == 0:  # (horo)
            print(f"epoch {epoch + 1}/{arguments.epochs}  loss {loss:.6f}", flush=True)
            if arguments.checkpoint is not None:
                save(arguments.checkpoint, model, optimizer, epoch + 1)


if __name__ == "__main__":
    main()
