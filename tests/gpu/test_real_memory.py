"""A GPU that is full: an error that says so, on the rank where it is, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import RankPool, on

import horo.torch as hvd


@on("shared2")
def test_a_rank_without_memory_for_its_result_says_so_and_goes_on() -> None:
    gpu, r = RealGpu(), hvd.rank()
    x = torch.ones(1 << 24, device=gpu.device)
    torch.cuda.empty_cache()
    if r == 1:  # of what torch has now, there is no more
        total = torch.cuda.get_device_properties(gpu.device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total + 1e-6, gpu.device)
    try:
        if r == 1:
            with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
                hvd.allgather(x, name="no room")
        else:
            assert hvd.allgather(x, name="no room").numel() == 2 << 24
        hvd.allreduce_(x, op=hvd.Sum)  # needs no memory of torch
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu.device)
    assert x.eq(2).all()
    assert hvd.allgather(x[:2], name="room").tolist() == [2.0] * 4


def test_memory_that_horo_takes_comes_back(ranks: RankPool) -> None:
    def check() -> int:
        gpu = RealGpu()
        x = torch.ones(4 << 20, device=gpu.device)

        def exchange() -> None:
            for _ in range(10):
                hvd.allgather(x)
                hvd.allreduce(x)
            torch.cuda.synchronize()
            hvd.barrier()

        exchange()
        before = torch.cuda.mem_get_info(gpu.device)[0]
        exchange()
        hvd.barrier()
        return before - torch.cuda.mem_get_info(gpu.device)[0]

    taken = ranks.run(check)
    assert max(taken) < 64 << 20
