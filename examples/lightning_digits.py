"""Trains scikit-learn's handwritten digits with Lightning; the marked lines make the script distributed.

hororun -np 2 lightning_digits.py              two ranks; or by torchrun, srun, mpirun
python lightning_digits.py --devices 2         two ranks, which the Trainer starts
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning as L
    from sklearn.datasets import load_digits
    from torchmetrics.classification import MulticlassAccuracy
except ImportError as error:
    sys.exit(f"lightning_digits.py: {error}; run: pip install lightning scikit-learn")

import horo.lightning  # noqa: F401  (horo: it registers strategy="horo")

TEST_IMAGES = 360


class Digits(L.LightningModule):
    """A small network with BatchNorm, whose statistics are those of the batches of all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")  # over all ranks

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.accuracy.update(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def load(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of images [n, 1, 8, 8] in 0..1 with labels [n]: to train on, and to test on."""
    digits = load_digits()
    images = torch.tensor((digits.images / 16.0).tolist()).unsqueeze(1)
    samples = TensorDataset(images, torch.tensor(digits.target.tolist()))
    fixed = torch.Generator().manual_seed(0)
    train, test = torch.utils.data.random_split(samples, [len(samples) - TEST_IMAGES, TEST_IMAGES], fixed)
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train handwritten digits with Lightning.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: %(default)s)")
    parser.add_argument("--devices", default="auto", help="ranks to start, without a launcher (default: %(default)s)")
    arguments = parser.parse_args()

    L.seed_everything(0, verbose=False)
    module = Digits()
    trainer = L.Trainer(
        strategy="horo",  # (horo)
        sync_batchnorm=True,  # (horo) hvd.SyncBatchNorm
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, *load(arguments.batch_size))
    if trainer.is_global_zero:
        print(f"test accuracy: {float(trainer.callback_metrics['accuracy']):.4f} of {TEST_IMAGES} images", flush=True)


if __name__ == "__main__":
    main()
