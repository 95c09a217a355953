"""The gradients of ResNet-50, averaged: 161 tensors, 100 MB. The backward pass is one product each: it costs little."""

from __future__ import annotations

from typing import Any

import models
import torch
from contestant import Unsupported, Work
from devices import place_of
from libraries import Library
from torch import nn

NAME = "gradients"


class Holder(nn.Module):
    """Parameters, and as its results the same values. The gradients of those, which the caller has, become the
    parameters' in new memory each time."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self) -> list[torch.Tensor]:
        return [value * 1.0 for value in self.values]


def shapes_of(model: str) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in models.RECIPES[model].make().parameters()]


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: model, one of models.RECIPES; form ("grouped": one call behind backward, "optimizer": during
    backward, of horo only); device, see devices."""
    place, hvd = place_of(parameters, library.rank), library.module
    holder = Holder([place.put(torch.zeros(shape)) for shape in shapes_of(parameters["model"])])
    values = list(holder.values)
    own = [torch.full_like(value, index % 7 + library.rank) for index, value in enumerate(values)]
    forward: Any = holder
    optimizer: Any = None  # its hooks live as long as it does
    if library.kind in ("gloo", "nccl"):
        forward = nn.parallel.DistributedDataParallel(holder)
    elif library.kind not in ("horo", "alone"):
        raise Unsupported(f"the library '{library.kind}' is not asked for this")
    elif library.kind == "horo" and parameters["form"] == "optimizer":
        named = [(f"{NAME}.{index}", value) for index, value in enumerate(values)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(values, lr=0.0), named_parameters=named)

    def call() -> None:
        for value in values:
            value.grad = None
        torch.autograd.backward(forward(), own)
        if library.kind == "horo" and optimizer is None:
            hvd.grouped_allreduce_([value.grad for value in values], name=NAME)

    def check() -> str:
        call()
        place.finish()
        others = library.rank if library.kind == "alone" else (library.size - 1) / 2
        wrong = sum(not bool((value.grad == index % 7 + others).all()) for index, value in enumerate(values))
        return f"{wrong} of {len(values)} gradients" if wrong else ""

    return Work(call, check, finish=place.finish)
