"""A rank that runs the piece of ``docs/how-to/trainers.md`` with the name ``sys.argv[1]``, and checks what it learned.

Each rank takes half of the samples as one batch, so each step is one of gradient descent on all of them.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from document_blocks import ROOT, python_blocks
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

EPOCHS, RATE = 3, 0.1
INPUTS = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
LABELS = INPUTS.sum(1, keepdim=True)
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


class Model(nn.Module):
    """One layer; with labels it also gives the loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        found = self.layer(inputs)
        return found if labels is None else {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Named(Dataset[Any]):
    """The samples as Hugging Face's Trainer takes them."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": INPUTS[index], "labels": LABELS[index]}


class OwnSamples:
    """Of this rank, which is in a process group once it takes them."""

    def __iter__(self) -> Any:
        samples = TensorDataset(INPUTS, LABELS)
        return iter(DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, shuffle=False)))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(model: nn.Module, batches: Any, lr: float = RATE) -> float:
    """The last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
    return loss.item()


def has_learned_as_one_process(model: nn.Module) -> None:
    alone = Model()
    train(alone, [(INPUTS, LABELS)])
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def train_in_ray(model: nn.Module) -> None:
    assert dist.get_backend() == "horo"
    train(model, OwnSamples())
    has_learned_as_one_process(model)


def given(name: str) -> dict[str, Any]:
    """What a script has before the piece."""
    model = Model()
    samples = TensorDataset(INPUTS, LABELS)
    everything: dict[str, Any] = {
        **{"torch": torch, "model": model, "loss_of": loss_of, "inputs": INPUTS.numpy(), "labels": LABELS.numpy()},
        "optimizer": torch.optim.SGD(model.parameters(), lr=RATE),
        "dataset": Named() if name in {"transformers", "hvd"} else samples,
        "loader": OwnSamples() if name == "timm" else DataLoader(samples, batch_size=4),
        "options": {
            **{"output_dir": "out", "num_train_epochs": EPOCHS, "per_device_train_batch_size": 4, "optim": "sgd"},
            **{"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "report_to": "none"},
        },
    }
    if name == "optuna":
        everything["train"] = lambda lr: train(nn.parallel.DistributedDataParallel(model), OwnSamples(), lr)
    elif name == "ray":
        everything["train"] = train_in_ray
    elif name.endswith("hvd"):
        everything["hvd"] = importlib.import_module("horo.torch")
    elif name == "loggers":
        everything |= given_with_lightning(model)
    return everything


def given_with_lightning(model: nn.Module) -> dict[str, Any]:
    lightning = importlib.import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.save_hyperparameters({"width": 1})

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    options = {"max_epochs": EPOCHS, "log_every_n_steps": 1, "accelerator": "cpu", "enable_progress_bar": False}
    horo = importlib.import_module("horo")
    importlib.import_module("horo.lightning")
    return {"L": lightning, "horo": horo, "module": Module(), "options": options}


def check_logs(folder: Path, trainer: Any) -> None:
    """Each logger has one log, of rank 0."""
    hvd = importlib.import_module("horo.torch")
    hvd.barrier()
    own = Path("logs")
    runs = [*own.glob("wandb/offline-run-*/*.wandb"), *own.glob("mlflow/*/*/metrics/loss"), *own.rglob("metrics.csv")]
    runs += [*own.rglob("events.out.tfevents*"), *folder.glob(".neptune/offline/run__*")]
    assert len(runs) == 5, runs
    assert trainer.loggers[-1].version == "offline"
    hvd.shutdown()


def change_members(group: Any) -> None:
    """As torchft's manager does: a group with another prefix for each quorum, while the old one may be in use."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    ones = torch.ones(4)

    def meet(where: str) -> None:
        """As the manager's votes on each step."""
        store.set(f"{where}{rank}", "")
        store.wait([f"{where}{each}" for each in range(size)])

    for quorum in range(4):
        group.configure(f"127.0.0.1:{port}/quorum/{quorum}", f"replica{rank}", rank, size, quorum)
        value = ones.clone()
        group.allreduce([value], dist.AllreduceOptions()).wait()
        assert value.tolist() == [size] * 4
        meet(f"done{quorum}.")
        if quorum == 2 and rank == 0:
            work = group.allreduce([ones.clone()], dist.AllreduceOptions())  # the other one never comes
            group.abort()
            try:
                work.wait()
            except RuntimeError as error:
                assert "abort" in str(error)
        meet(f"quorum{quorum}.")
    group.configure(f"127.0.0.1:{port}/alone/{rank}", f"replica{rank}", 0, 1, 5)
    group.allreduce([ones], dist.AllreduceOptions()).wait()
    assert ones.tolist() == [1.0] * 4
    group.abort()
    meet("done.")


def main() -> None:
    warnings.simplefilter("ignore")
    name = sys.argv[1]
    page = ROOT / "docs" / "how-to" / "trainers.md"
    (block,) = (block for block in python_blocks(page) if block.mark == f"script={name}")
    import_torchvision()
    variables = given(name)
    exec(block.compiled(), variables)
    if name == "optuna":
        assert dist.get_rank() != 0 or len(variables["study"].trials) == 5
    elif name == "torchft":
        change_members(variables["ProcessGroupHoro"]())
    elif name == "loggers":
        check_logs(Path.cwd(), variables["trainer"])
    elif name != "ray":  # whose ranks have checked it
        assert name.endswith("hvd") or dist.get_backend() == "horo"
        has_learned_as_one_process(variables["net"].module_ if name.startswith("skorch") else variables["model"])
    if dist.is_initialized():
        dist.destroy_process_group()
    print("ok", flush=True)


def import_torchvision() -> None:
    """For CPUs torch and torchvision are often of different builds: then the names of two operations are missing."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


if __name__ == "__main__":
    main()
