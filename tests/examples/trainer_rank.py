"""Trains by a trainer that clips and accumulates by itself: ``trainer_rank.py lightning|transformers``, on all ranks.

Each rank gives the trainer the distributed optimizer and its own part of each batch. Then it trains once more as one
process with whole batches. Prints by how much the parameters of the two differ, at most.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch  # noqa: E402
from torch import nn  # noqa: E402

import horo.torch as hvd  # noqa: E402

BATCH, SAMPLES = 8, 64
INPUTS = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizer(model: nn.Module, *, alone: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer if alone else hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def part(*, alone: bool) -> tuple[torch.Tensor, int]:
    """The samples in their order, and how many make a batch."""
    if alone:
        return INPUTS, BATCH
    return INPUTS.view(-1, hvd.size(), BATCH // hvd.size(), 4)[:, hvd.rank()].reshape(-1, 4), BATCH // hvd.size()


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))


def by_lightning(clip: float, passes: int, *, alone: bool) -> nn.Module:
    import lightning  # noqa: PLC0415
    from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: PLC0415

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = make_model()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model, alone=alone)

    inputs, batch_size = part(alone=alone)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        **quiet,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        gradient_clip_val=clip,
        accumulate_grad_batches=passes,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(inputs, batch_size))
    return model


def by_transformers(clip: float, passes: int, *, alone: bool) -> nn.Module:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.model, inputs)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = Model()
    optimizer = make_optimizer(model, alone=alone)
    inputs, batch_size = part(alone=alone)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=passes,
            max_grad_norm=clip,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        dataset = [{"inputs": sample} for sample in inputs]
        InOrder(model=model, args=arguments, train_dataset=dataset, optimizers=(optimizer, schedule)).train()
    return model


if __name__ == "__main__":
    hvd.init()
    train = {"lightning": by_lightning, "transformers": by_transformers}[sys.argv[1]]
    for clip, passes in ((0.0, 1), (0.1, 1), (0.1, 2)):
        together, one = (list(train(clip, passes, alone=alone).parameters()) for alone in (False, True))
        differ = max((a - b).abs().max().item() for a, b in zip(together, one, strict=True))
        moved = max((a - b).abs().max().item() for a, b in zip(one, make_model().parameters(), strict=True))
        if hvd.rank() == 0:
            print(f"differ by {differ:.3e}, moved by {moved:.3e}", flush=True)
