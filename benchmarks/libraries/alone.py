"""No library: processes that know nothing of each other, started together. The ceiling of a training step."""

from __future__ import annotations

import torch

from libraries import Exchange


class Opened:
    kind = "alone"
    module = None

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        del exchange
        torch.set_num_threads(1)
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """The driver has told all ranks at once; there is nothing else to wait with."""

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__)}

    def close(self) -> None:
        """Nothing was opened."""
