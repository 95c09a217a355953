"""One step of training: zero_grad, forward, backward, step.

Ways through torch.distributed: DDP, also with a sharded optimizer (ZeRO), and fully sharded (FSDP2).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import models
import torch
from contestant import Unsupported, Work
from devices import Place, place_of
from libraries import Library
from torch import nn

RATE = 0.001
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=RATE),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATE, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=RATE, foreach=False),
}
"""For the CPU torch takes the loop by itself; ``plain`` has no state."""
SHARDING = "CONTEST_SHARDING"
"""The variable with the ``sharding=`` of a contestant's optimizers."""
CHECKED_STEPS = 2
CHECKED_BATCH_ON_GPU = 16  # it computes in float64 then
LONELY = ("alone", "in_step")  # kinds of libraries that exchange no gradients


@dataclass(frozen=True)
class Way:
    """How gradients are exchanged through torch.distributed.

    Attributes:
        kind: "ddp"; "views", which is DDP whose gradients lie in its buckets; "fsdp2"; or "zero", which is DDP with an
            optimizer whose steps are shared out among ranks.
        bucket_mb: of DDP's buckets; 0: torch's own choice.
    """

    kind: str = "ddp"
    bucket_mb: int = 0


DDP = Way()


class Training:
    """A model, its optimizer as the library wants them, and this rank's part of the data.

    Args:
        library: exchanges gradients.
        recipe: what is trained.
        place: where.
        batch: examples per rank; 0: as many as the recipe says.
        synced: layers that look at their batch look at that of all ranks.
        way: of torch.distributed.
        optimizer: one of OPTIMIZERS.
    """

    def __init__(
        self,
        library: Library,
        recipe: models.Recipe,
        place: Place,
        *,
        batch: int = 0,
        synced: bool = False,
        way: Way = DDP,
        optimizer: str = "plain",
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
        self.forward = wrap(library, self.model, way)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        if way.kind == "zero" and self.forward is not self.model:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - half a second

            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.SGD, lr=RATE)
        if library.kind in ("horo", "horovod"):
            hvd = library.module
            sharding = {"sharding": os.environ[SHARDING]} if SHARDING in os.environ else {}
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.model.named_parameters(), **sharding
            )
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


def wrap(library: Library, model: nn.Module, way: Way = DDP) -> Callable[[torch.Tensor], torch.Tensor]:
    if library.kind in ("gloo", "nccl"):
        if way.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - a second, and older torches lack it

            for part in parts_of(model):
                fully_shard(part)
            fully_shard(model)
            return model
        sizes: dict[str, Any] = {"bucket_cap_mb": way.bucket_mb} if way.bucket_mb else {}
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=way.kind == "views", **sizes)
    if library.kind in LONELY:
        return model
    if library.kind in ("horo", "horovod"):
        if way.kind not in (DDP.kind, "views"):
            raise Unsupported(f"{library.kind} has no {way.kind}")
        return model
    raise Unsupported(f"the library '{library.kind}' trains nothing")


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that are gathered one after the other."""
    for child in model.children():
        for part in getattr(child, "layers", [child]):
            if any(True for _ in part.parameters()):
                yield part


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters; those of shards are gathered."""
    wholes = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters())
    return torch.cat([whole.detach().flatten() for whole in wholes])


def check_learning(
    library: Library,
    recipe: models.Recipe,
    place: Place,
    *,
    synced: bool = False,
    way: Way = DDP,
    optimizer: str = "plain",
) -> str:
    """Trains a copy and, where batches add up, compares it with one process that has the batches of all ranks."""
    batch = min(recipe.batch, CHECKED_BATCH_ON_GPU) if place.is_gpu else recipe.batch
    magnifies = place.is_gpu or synced or optimizer != "plain"  # what is normalized does, in Adam, too
    with place.exact(in_float64=magnifies) as exact:
        training = Training(library, recipe, exact, batch=batch, synced=synced, way=way, optimizer=optimizer)
        for _ in range(CHECKED_STEPS):
            training.step()
        adds_up = recipe.adds_up or synced or library.size == 1
        if not adds_up or library.kind in LONELY:
            return ""
        alone = Training(ALONE_HERE, recipe, exact, batch=batch * library.size, optimizer=optimizer)
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


def learn(training: Training) -> float:
    """Takes two steps. Returns how far they moved the parameters in a random direction, the same for all."""
    begun = flat(training.model)
    for _ in range(CHECKED_STEPS):
        training.step()
    moved = (flat(training.model) - begun).cpu().double()
    direction = torch.rand(len(moved), generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 0.5
    return float(moved @ direction)


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """Makes the training.

    Args:
        library: exchanges gradients.
        parameters: model, one of models.RECIPES; way and bucket_mb, see Way; batch, synced and optimizer, see Training;
            device, autocast: see devices.
    """
    recipe, place = models.RECIPES[parameters["model"]], place_of(parameters, library.rank)
    batch, synced = int(parameters.get("batch", 0)), bool(parameters.get("synced"))
    way = Way(parameters.get("way", DDP.kind), int(parameters.get("bucket_mb", 0)))
    torch.set_flush_denormal(True)  # a model that has learnt its batch by heart must not become ten times slower
    optimizer = parameters.get("optimizer", "plain")
    training = Training(library, recipe, place, batch=batch, synced=synced, way=way, optimizer=optimizer)
    learnt = learn(training)

    def check() -> str:
        wrong = check_learning(library, recipe, place, synced=synced, way=way, optimizer=optimizer)
        return wrong or differing_ranks(library, training.model)

    return Work(training.step, check, figures=lambda: {"learnt": learnt}, finish=place.finish)
