"""Trains the network of digits.py, and goes on when ranks die or others come.

    hororun -np 2 --min-np 1 elastic.py            goes on with one rank when the other one dies
    python elastic.py                              one process, as ever

The lines marked (elastic) are new in a script that is distributed already. What must outlive a rank is in the state.
Kill a rank to see it: the others go on from the last commit.
"""

from __future__ import annotations

import argparse

import torch
from digits import build_model, count_correct, load
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horo.torch as hvd

BATCH_SIZE = 32
COMMIT_EVERY = 5


@hvd.elastic.run  # (elastic)
def train(state: hvd.elastic.TorchState, loader: DataLoader[tuple[torch.Tensor, ...]], epochs: int) -> None:
    """Goes on where the state is: at its epoch, and within it at the samples that its sampler has not recorded."""
    while state.epoch < epochs:
        for step, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            nn.functional.cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            state.sampler.record_batch(step, BATCH_SIZE)  # (elastic)
            if step % COMMIT_EVERY == 0:
                state.commit()  # (elastic)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()  # (elastic)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch:2d}/{epochs} on {hvd.size()} rank(s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train handwritten digits, whoever dies.")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images (default: %(default)s)")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    sampler = hvd.elastic.ElasticSampler(range(len(labels)))  # (elastic)
    loader = DataLoader(TensorDataset(images, labels), BATCH_SIZE, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)  # (elastic)

    def fit_learning_rate() -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * hvd.size()

    state.register_reset_callbacks([fit_learning_rate])  # (elastic)
    train(state, loader, arguments.epochs)
    accuracy = count_correct(model, test_images, test_labels) / len(test_labels)
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
