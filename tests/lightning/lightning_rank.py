"""A rank on one of several hosts: fits with each strategy, and writes how it went to ``FOLDER/rank.NUMBER``.

lightning_rank.py FOLDER NODES STRATEGY...
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horo.lightning


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(name: str, folder: Path, nodes: int) -> dict[str, Any]:
    strategy = DDPStrategy(process_group_backend="horo") if name == "ddp" else name
    kept = ModelCheckpoint(folder / name, filename="only")
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1,
        num_nodes=nodes,
        max_epochs=1,
        callbacks=[kept],
        logger=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(8.0).view(8, 1)), batch_size=4))
    place = [trainer.world_size, trainer.global_rank, trainer.node_rank, trainer.local_rank, socket.gethostname()]
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
    weights = [parameter.item() for parameter in module.parameters()]
    shows = trainer.progress_bar_callback.is_enabled
    return {"place": place, "backend": backend, "weights": weights, "saved": kept.best_model_path, "shows": shows}


def main() -> None:
    folder, nodes, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    assert horo.lightning.HoroStrategy
    MPIEnvironment.detect = staticmethod(lambda: False)  # its own is an error where mpi4py finds no MPI
    done = {name: fit(name, folder, nodes) for name in names}
    rank = done[names[0]]["place"][1]
    (folder / f"rank.{rank}").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
