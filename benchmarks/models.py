"""The models of the training steps, made of torch alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2015, version 1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        is_plain = stride == 1 and inputs == outputs
        project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if is_plain else project

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.body(images) + self.shortcut(images))


def resnet50(classes: int = 1000, width: int = 64) -> nn.Module:
    """161 parameter tensors, 25 557 032 elements for 1000 classes; ``width``: channels behind the first layer."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for times, blocks, stride in ((1, 3, 1), (2, 4, 2), (4, 6, 2), (8, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, times * width, stride if block == 0 else 1))
            inputs = 4 * times * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def mlp(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


class Transformer(nn.Module):
    """An encoder over tokens, without dropout so that a check can compute the same."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        one = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.encoder(self.embedding(tokens))).mean(1)
        return result


class Recommender(nn.Module):
    """The mean of a few rows of one large table, with a dense gradient, and some layers behind it."""

    def __init__(self, rows: int, width: int, classes: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, width, mode="mean")
        self.layers = mlp(3, width)
        self.head = nn.Linear(width, classes)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(self.table(items)))
        return result


@dataclass(frozen=True)
class Recipe:
    """A model and what it is trained on.

    Attributes:
        make: the model.
        inputs: so many examples from a seeded generator; a rank takes its part of them.
        classes: targets are drawn from so many.
        batch: examples per rank.
        adds_up: whether training on two batches is training on their union: not where a layer looks at its batch.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], torch.Tensor]
    classes: int
    batch: int
    adds_up: bool = True


def images(size: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda count, generator: torch.randn(count, 3, size, size, generator=generator)


def vectors(width: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda count, generator: torch.randn(count, width, generator=generator)


def tokens(length: int, words: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda count, generator: torch.randint(words, (count, length), generator=generator)


RECIPES = {
    "mlp": Recipe(lambda: mlp(24, 1024), vectors(1024), 1024, 128),
    "resnet50": Recipe(resnet50, images(224), 1000, 2, adds_up=False),
    "transformer": Recipe(lambda: Transformer(2000, 256, 4), tokens(64, 2000), 2000, 8),
    "recommender": Recipe(lambda: Recommender(40000, 128, 1000), tokens(26, 40000), 1000, 256),
    "mlp-8": Recipe(lambda: mlp(8, 1024), vectors(1024), 1024, 16),
    "resnet50-64": Recipe(resnet50, images(64), 1000, 2, adds_up=False),
    "transformer-2": Recipe(lambda: Transformer(2000, 256, 4), tokens(64, 2000), 2000, 2),
    "resnet50-128": Recipe(resnet50, images(224), 1000, 128, adds_up=False),
    "transformer-large": Recipe(lambda: Transformer(2000, 1024, 12), tokens(256, 2000), 2000, 32),
    "mlp-tiny": Recipe(lambda: mlp(2, 16), vectors(16), 16, 4),
    "resnet50-tiny": Recipe(lambda: resnet50(10, width=4), images(32), 10, 2, adds_up=False),
    "transformer-tiny": Recipe(lambda: Transformer(20, 8, 1), tokens(5, 20), 20, 2),
    "recommender-tiny": Recipe(lambda: Recommender(50, 8, 20), tokens(5, 50), 20, 2),
}
"""The ``recommender`` has nearly all its elements in one parameter. ``mlp-8`` to ``transformer-2`` have little to
compute, so that their exchange counts. ``resnet50-128`` and ``transformer-large`` are for GPUs. The tiny ones are for
tests: the same code in a moment."""


def check_known(parser: argparse.ArgumentParser, option: str, names: Iterable[str]) -> None:
    """Ends the program with a sentence if a name that came with the option is none of RECIPES."""
    for name in names:
        if name not in RECIPES:
            parser.error(f"{option}: no '{name}'; known are {', '.join(RECIPES)}")
