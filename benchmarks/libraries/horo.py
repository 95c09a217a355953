"""horo, started by hororun."""

from __future__ import annotations

from pathlib import Path

import torch
from forks import core_of

import horo.torch as hvd
from horo import __version__, errors
from libraries import Exchange, check_place


class Opened:
    kind = "horo"
    module = hvd

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        del exchange
        torch.set_num_threads(1)
        hvd.init()
        check_place((hvd.rank(), hvd.size()), rank, size)
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        hvd.barrier()

    def versions(self) -> dict[str, str]:
        return {
            "horo": __version__,
            "core": core_of(Path(errors.__file__).parents[1]).version(),
            "torch": str(torch.__version__),
        }

    def close(self) -> None:
        hvd.shutdown()
