"""A rank whose fit ends by a fault: ``lightning_faults.py FOLDER STRATEGY FAULT``.

Rank 1 dies by SIGKILL or by an exception in its third step, is stopped there, or calls what the other one does not, or
all ranks wait there for Ctrl-C; or it has fewer batches. A rank that gets an error writes it to ``FOLDER/error.RANK``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jobs import wait_until
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
            elif self.fault == "stop":
                torch.distributed.barrier()
                torch.distributed.group.WORLD._set_default_timeout(timedelta(seconds=1))
            if self.global_rank == 1:
                self.fail()
        return super().training_step(batch, number)

    def fail(self) -> None:
        if self.fault in {"kill", "stop"}:
            (self.folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)
        elif self.fault == "order":
            self.trainer.strategy.reduce(torch.ones(3))
        elif self.fault == "raise":
            raise ValueError("bad sample in shard 7")


def main() -> None:
    folder, name, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert horo.lightning.HoroStrategy
    own = {"strategy": name}
    if name == "ddp":
        own = {"strategy": DDPStrategy(process_group_backend="horo"), "plugins": LightningEnvironment()}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    module = Faulty(folder, fault)
    rows = 8 if fault == "uneven" and os.environ["RANK"] == "1" else 64
    quiet["use_distributed_sampler"] = fault != "uneven"
    trainer = pl.Trainer(accelerator="cpu", devices=2, max_epochs=1, enable_progress_bar=False, **own, **quiet)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(rows, 1)), batch_size=4))
    except BaseException as error:
        (folder / f"error.{trainer.global_rank}").write_text(f"{type(error).__name__}: {error}")
        if fault == "stop" and trainer.global_rank == 0:
            os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
            wait_until((folder / "error.1").exists, "rank 1 has its error")
        raise


if __name__ == "__main__":
    main()
