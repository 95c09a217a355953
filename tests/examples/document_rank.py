"""A rank that runs the Python blocks of pages one after the other: ``document_rank.py PAGE...``.

Each block gets a namespace of its own with what a training script has at that place. Blocks of a page share a current
directory. The error of a block ends the rank with a traceback that names the page and the line.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from document_blocks import Block, python_blocks, runs_here
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import horo
import horo.torch as hvd


def namespace(block: Block) -> dict[str, Any]:
    """What a script has made before the block; ``optimizer`` is distributed unless the block distributes something."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    if "hvd.DistributedOptimizer(optimizer" not in block.code and "hvd.distribute(" not in block.code:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = torch.Generator().manual_seed(hvd.rank())
    loader: Any = [(torch.randn(6, 4, generator=data), torch.arange(6) % 2) for _ in range(8)]
    dataset = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    if "hvd.shard(loader" in block.code:
        loader = DataLoader(dataset, batch_size=2)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    given = {
        **{"torch": torch, "nn": nn, "hvd": hvd, "os": os, "contextlib": contextlib},
        "clip_grad_norm_": clip_grad_norm_,
        **{"model": model, "parameters": parameters, "optimizer": optimizer, "loader": loader, "loss_of": loss_of},
        "dataset": dataset,
    }
    if "scaler" in block.code:
        given["scaler"] = torch.amp.GradScaler("cpu")
        given["loss"] = loss_of(loader[0])
    return given


def run(block: Block) -> None:
    given = namespace(block)
    environment = dict(os.environ)
    exec(block.compiled(), given)
    os.environ.update(environment)  # a page shows how to hide variables from a trainer
    trained = [parameter.detach().flatten() for parameter in given["parameters"]]
    everyone = hvd.allgather(torch.cat(trained)[None])  # also: no rank goes on before the block is done on all
    if not torch.equal(everyone[0], everyone[-1]):
        raise SystemExit(f"{block.page}:{block.line}: ranks hold different parameters after this block")


def main() -> None:
    hvd.init()
    sys.modules["horovod"] = horo  # the line that a page replaces stands in it, too
    sys.modules["horovod.torch"] = hvd
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for page in map(Path, sys.argv[1:]):
            place = Path(hvd.broadcast_object(folder)) / page.stem
            place.mkdir(exist_ok=True)
            os.chdir(place)
            for block in python_blocks(page):
                if runs_here(block):
                    run(block)
                    count += 1
        os.chdir("/")
        hvd.barrier()
    if hvd.rank() == 0:
        print(f"{count} blocks", flush=True)


if __name__ == "__main__":
    main()
