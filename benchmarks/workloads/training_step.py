"""One step of training: zero_grad, forward, backward, step."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any

import models
import torch
from contestant import Unsupported, Work
from devices import Place, place_of
from libraries import Library
from torch import nn

RATE = 0.001
CHECKED_STEPS = 2
CHECKED_BATCH_ON_GPU = 16  # it computes in float64 then
LONELY = ("alone", "in_step")  # kinds of libraries that exchange no gradients


class Training:
    """A model, its optimizer as the library wants them, and this rank's part of the data.

    Args:
        library: exchanges gradients.
        recipe: what is trained.
        place: where.
        batch: examples per rank; 0: as many as the recipe says.
        synced: layers that look at their batch look at that of all ranks.
    """

    def __init__(
        self, library: Library, recipe: models.Recipe, place: Place, *, batch: int = 0, synced: bool = False
    ) -> None:
        self.library, self.place = library, place
        batch = batch or recipe.batch
        generator = torch.Generator().manual_seed(1)
        self.inputs = place.put(recipe.inputs(batch * library.size, generator))
        self.targets = place.put(torch.randint(recipe.classes, (batch * library.size,), generator=generator))
        torch.manual_seed(0)
        self.model = place.put_model(recipe.make())
        if synced and library.kind not in LONELY:
            self.model = library.module.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.forward = wrap(library, self.model)
        if library.kind in ("horo", "horovod"):
            hvd = library.module
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=self.model.named_parameters())
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        begin = library.rank * batch
        self.mine = slice(begin, begin + batch)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.place.computing():
            loss = nn.functional.cross_entropy(self.forward(self.inputs[self.mine]), self.targets[self.mine])
        loss.backward()
        if self.library.kind == "in_step":
            self.library.barrier()  # where the others' gradients would be needed
        self.optimizer.step()


def wrap(library: Library, model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    if library.kind in ("gloo", "nccl"):
        return nn.parallel.DistributedDataParallel(model)
    if library.kind in ("horo", "horovod", *LONELY):
        return model
    raise Unsupported(f"the library '{library.kind}' trains nothing")


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def check_learning(library: Library, recipe: models.Recipe, place: Place, *, synced: bool = False) -> str:
    """Trains a copy and, where batches add up, compares it with one process that has the batches of all ranks."""
    batch = min(recipe.batch, CHECKED_BATCH_ON_GPU) if place.is_gpu else recipe.batch
    with place.exact(in_float64=place.is_gpu or synced) as exact:  # what is normalized magnifies what is rounded
        training = Training(library, recipe, exact, batch=batch, synced=synced)
        for _ in range(CHECKED_STEPS):
            training.step()
        adds_up = recipe.adds_up or synced or library.size == 1
        if not adds_up or library.kind in LONELY:
            return ""
        alone = Training(ALONE_HERE, recipe, exact, batch=batch * library.size)
        begun = flat(alone.model)
        for _ in range(CHECKED_STEPS):
            alone.step()
        have, want = flat(training.model), flat(alone.model)
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
    values = flat(model).cpu()
    # Not by numpy: an older torch cannot use that of today.
    digest = hashlib.blake2b(ctypes.string_at(values.data_ptr(), values.nbytes), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "little")])
    if library.kind in ("gloo", "nccl"):
        own = own.to("cuda" if library.kind == "nccl" else "cpu")
        everyone = [torch.empty_like(own) for _ in range(library.size)]
        library.module.all_gather(everyone, own)
        gathered = torch.cat(everyone)
    else:
        gathered = library.module.allgather(own)
    others = [rank for rank, value in enumerate(gathered.tolist()) if value != int(own)]
    return f"parameters differ from those of rank {others[0]}" if others else ""


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: model, one of models.RECIPES; batch and synced, see Training; device, autocast: see devices."""
    recipe, place = models.RECIPES[parameters["model"]], place_of(parameters, library.rank)
    batch, synced = int(parameters.get("batch", 0)), bool(parameters.get("synced"))
    torch.set_flush_denormal(True)  # a model that has learnt its batch by heart must not become ten times slower
    training = Training(library, recipe, place, batch=batch, synced=synced)

    def check() -> str:
        return check_learning(library, recipe, place, synced=synced) or differing_ranks(library, training.model)

    return Work(training.step, check, finish=place.finish)
