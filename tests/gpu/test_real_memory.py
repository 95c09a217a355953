"""A GPU that is full: an error that says so, on the rank where it is, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import RankPool

import horo.torch as hvd


def test_a_rank_without_memory_for_its_result_says_so_and_goes_on(shared2: RankPool) -> None:
    def check() -> None:
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

    shared2.run(check)


def _fill(device: torch.device, left_bytes: int) -> list[torch.Tensor]:
    """Tensors that leave about so many bytes of the GPU."""
    kept = []
    for piece in (1 << 30, 64 << 20, 4 << 20):
        while torch.cuda.mem_get_info(device)[0] > left_bytes + piece:
            try:
                kept.append(torch.empty(piece, dtype=torch.uint8, device=device))
            except torch.cuda.OutOfMemoryError:
                break
    return kept


def test_rows_of_a_full_gpu_pass_through_pinned_memory(nccl1: RankPool) -> None:
    """horo finds no memory of the driver's for the result of NCCL; torch still has some for the tensor."""

    def check() -> None:
        gpu = RealGpu()
        count = 32 << 20
        x = torch.arange(count, device=gpu.device, dtype=torch.float32)
        assert torch.equal(hvd.allgather(x[:100]), x[:100])
        block = torch.empty_like(x)  # torch keeps it when it is freed
        kept = _fill(gpu.device, 16 << 20)
        del block
        result = hvd.allgather(x, name="full")
        pieces = zip(result.split(1 << 20), x.split(1 << 20), strict=True)  # a comparison needs memory, too
        assert all(torch.equal(one, other) for one, other in pieces)
        received, splits = hvd.alltoall(x[:1000], torch.tensor([1000]))
        assert torch.equal(received, x[:1000]) and splits.tolist() == [1000]
        del kept, result, received
        torch.cuda.empty_cache()
        assert torch.equal(hvd.allgather(x), x)

    nccl1.run(check, deadline_s=120.0)


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
    assert max(taken) < 64 << 20  # a driver's pool may keep a piece
