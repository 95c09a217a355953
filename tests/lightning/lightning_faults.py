"""A rank whose fit ends by a fault: ``lightning_faults.py FOLDER STRATEGY FAULT``.

Rank 1 dies by SIGKILL or by an exception in its third step, or all ranks wait there for Ctrl-C. A rank that gets an
error writes it to ``FOLDER/error.RANK``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning_rank import Module
from torch.utils.data import DataLoader, TensorDataset

import horo.lightning


class Faulty(Module):
    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__()
        self.folder, self.fault = folder, fault

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == 2:
            if self.fault == "interrupt":
                (self.folder / f"up.{self.global_rank}").touch()
                threading.Event().wait(60)
            elif self.global_rank == 1 and self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.global_rank == 1:
                raise ValueError("bad sample in shard 7")
        return super().training_step(batch, number)


def main() -> None:
    folder, name, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert horo.lightning.HoroStrategy
    own = {"strategy": name}
    if name == "ddp":
        own = {"strategy": DDPStrategy(process_group_backend="horo"), "plugins": LightningEnvironment()}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    module = Faulty(folder, fault)
    trainer = pl.Trainer(accelerator="cpu", devices=2, max_epochs=1, enable_progress_bar=False, **own, **quiet)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=4))
    except BaseException as error:
        (folder / f"error.{trainer.global_rank}").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
