"""torch.distributed over gloo, in plain processes; what NCCL has in common with it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from libraries import Exchange

TIMEOUT = timedelta(seconds=120)


class Opened:
    kind = "gloo"
    backend = "gloo"
    module = dist

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        torch.set_num_threads(1)
        own = os.environ.get("CONTEST_ADDRESS", "127.0.0.1")
        store = TCPStore(own, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        address, port = exchange([own, store.port if store is not None else 0])[0]
        if store is None:
            store = TCPStore(address, port, is_master=False)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        dist.barrier()

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__)}

    def close(self) -> None:
        dist.barrier()  # rank 0 keeps the store that the others still need
        dist.destroy_process_group()
