"""One step of training: zero_grad, forward, backward, step."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any

import models
import torch
from contestant import Unsupported, Work
from libraries import Library
from torch import nn

RATE = 0.001
CHECKED_STEPS = 2
LONELY = ("alone", "in_step")  # kinds of libraries that exchange no gradients


class Training:
    """A model, its optimizer as the library wants them, and this rank's part of the data."""

    def __init__(self, library: Library, recipe: models.Recipe) -> None:
        self.library, self.recipe = library, recipe
        generator = torch.Generator().manual_seed(1)
        self.inputs = recipe.inputs(recipe.batch * library.size, generator)
        self.targets = torch.randint(recipe.classes, (recipe.batch * library.size,), generator=generator)
        torch.manual_seed(0)
        self.model = recipe.make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.forward = wrap(library, self.model)
        if library.kind in ("horo", "horovod"):
            hvd = library.module
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=self.model.named_parameters())
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        begin = library.rank * recipe.batch
        self.mine = slice(begin, begin + recipe.batch)

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.forward(self.inputs[self.mine]), self.targets[self.mine]).backward()
        if self.library.kind == "in_step":
            self.library.barrier()  # where the others' gradients would be needed
        self.optimizer.step()


def wrap(library: Library, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    if library.kind == "gloo":
        return nn.parallel.DistributedDataParallel(model)
    if library.kind in ("horo", "horovod", *LONELY):
        return model
    raise Unsupported(f"the library '{library.kind}' trains nothing")


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check_learning(library: Library, recipe: models.Recipe) -> str:
    """Trains a copy and, where batches add up, compares it with one process that has the batches of all ranks."""
    training = Training(library, recipe)
    for _ in range(CHECKED_STEPS):
        training.step()
    if not recipe.adds_up or library.kind in LONELY:
        return ""
    torch.manual_seed(0)
    alone = recipe.make()
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    for _ in range(CHECKED_STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(training.inputs), training.targets).backward()
        optimizer.step()
    have, want = flat(training.model), flat(alone)
    begun = flat(Training(ALONE_HERE, recipe).model)
    error, moved = float((have - want).abs().max()), float((want - begun).abs().max())
    return "" if error <= 1e-3 * moved else f"parameters are {error:.2g} off after moving by {moved:.2g}"


class _AloneHere:
    kind = "alone"
    module = None
    rank, size = 0, 1

    def barrier(self) -> None:
        """Nobody else is here."""

    def versions(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """Nothing was opened."""


ALONE_HERE = _AloneHere()


def differing_ranks(library: Library, model: nn.Module) -> str:
    """Whether all ranks hold the same bits."""
    if library.kind in LONELY:
        return ""
    values = flat(model).contiguous()
    # Not by numpy: an older torch cannot use that of today.
    digest = hashlib.blake2b(ctypes.string_at(values.data_ptr(), values.nbytes), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "little")])
    if library.kind == "gloo":
        everyone = [torch.empty_like(own) for _ in range(library.size)]
        library.module.all_gather(everyone, own)
        gathered = torch.cat(everyone)
    else:
        gathered = library.module.allgather(own)
    others = [rank for rank, value in enumerate(gathered.tolist()) if value != int(own)]
    return f"parameters differ from those of rank {others[0]}" if others else ""


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: model, one of models.RECIPES."""
    recipe = models.RECIPES[parameters["model"]]
    torch.set_flush_denormal(True)  # a model that has learnt its batch by heart must not become ten times slower
    training = Training(library, recipe)

    def check() -> str:
        return check_learning(library, recipe) or differing_ranks(library, training.model)

    return Work(training.step, check)
