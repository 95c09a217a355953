"""Horovod over MPI, started by mpirun."""

from __future__ import annotations

import horovod
import horovod.torch as hvd
import torch

from libraries import Exchange, check_place


class Opened:
    kind = "horovod"
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
        return {"horovod": str(horovod.__version__), "torch": str(torch.__version__)}

    def close(self) -> None:
        hvd.shutdown()
