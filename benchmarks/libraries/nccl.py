"""torch.distributed over NCCL, in plain processes, each with a GPU of its own."""

from __future__ import annotations

import torch

from libraries import Exchange, gloo


class Opened(gloo.Opened):
    kind = backend = "nccl"

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        torch.cuda.set_device(rank)
        super().__init__(rank, size, exchange)

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
