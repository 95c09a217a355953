"""What ``horo.torch`` does with tensors on GPUs (tests/gpu_checks.py), and with their memory."""

import gpu_checks
import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import RankPool, on

import horo.torch as hvd

BY_NAME = {check.__name__: check for check in gpu_checks.ON_A_TORCH_DEVICE}
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


@pytest.mark.parametrize("on_gpu", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("check", ["reductions", "moves", "large_reductions"])
@on("shared2")
def test_all_functions_with_some_ranks_on_gpus(on_gpu: tuple[int, ...], check: str) -> None:
    getattr(gpu_checks, check)(RealGpu(), on_gpu)


@pytest.mark.parametrize("name", BY_NAME)
@on("ranks", deadline_s=120.0)
def test_what_torch_does(name: str) -> None:
    BY_NAME[name](RealGpu().device)


@on("ranks", deadline_s=120.0)
def test_all_dtypes_and_sizes() -> None:
    gpu, n, r = RealGpu(), hvd.size(), hvd.rank()
    for dtype in DTYPES:
        for count in (0, 1, 7, 4097, 300_001):
            x = gpu.put(torch.full((count,), r + 1, dtype=dtype))
            assert torch.equal(hvd.allreduce(x, op=hvd.Sum), torch.full_like(x, n * (n + 1) // 2)), (dtype, count)
            assert torch.equal(hvd.allreduce(x, op=hvd.Min), torch.ones_like(x)), (dtype, count)
            assert torch.equal(hvd.broadcast(x, n - 1), torch.full_like(x, n)), (dtype, count)
            assert hvd.allgather(x).shape == (n * count,)
    for dtype in (torch.bool, torch.complex64):
        x = gpu.put(torch.ones(5, dtype=dtype))
        assert torch.equal(hvd.allgather(x), torch.ones(5 * n, dtype=dtype, device=gpu.device))
    for dtype in (torch.complex64, torch.complex128):  # of which NCCL has no product
        for count in (5, 600_001):
            x = gpu.put(torch.full((count,), 1j, dtype=dtype))
            assert torch.equal(hvd.allreduce(x, op=hvd.Product), torch.full_like(x, 1j**n)), (dtype, count)


@on("ranks", deadline_s=180.0)
def test_large_tensors_and_many() -> None:
    """More than a piece of pinned memory has; and a group of thousands, which NCCL gets as one."""
    gpu, n, r = RealGpu(), hvd.size(), hvd.rank()
    large = (torch.arange(1 << 24, device=gpu.device) % 1000).float()
    assert torch.equal(hvd.allreduce(large * (r + 1), op=hvd.Sum), large * (n * (n + 1) // 2))
    many = [torch.full((1 + number % 50,), float(r), device=gpu.device) for number in range(3000)]
    results = hvd.grouped_allreduce(many)
    assert all(torch.equal(one, torch.full_like(one, (n - 1) / 2)) for one in results)
    handles = [hvd.allreduce_async_(one, op=hvd.Sum, name=f"many.{index}") for index, one in enumerate(many[:500])]
    for handle in handles:
        hvd.synchronize(handle)
    assert all(one.eq(n * (n - 1) / 2).all() for one in many[:500])


@on("shared4")
def test_process_sets() -> None:
    gpu, r = RealGpu(), hvd.rank()
    evens, others = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
    mine = evens if r % 2 == 0 else others
    x = torch.full((1000,), float(r), device=gpu.device)
    assert hvd.allreduce(x, op=hvd.Sum, process_set=mine).eq(2 + 2 * (r % 2)).all()
    assert hvd.allgather(x[:1], process_set=mine).tolist() == [r % 2, r % 2 + 2]
    assert hvd.remove_process_set(evens) and hvd.remove_process_set(others)


@on("shared2")
def test_a_rank_that_has_joined_stands_in() -> None:
    gpu, r = RealGpu(), hvd.rank()
    for _ in range(1 + 2 * r):
        hvd.allreduce(torch.ones(100, device=gpu.device), op=hvd.Sum, name="uneven")
    assert hvd.join() == 1


@on("ranks")
def test_it_works_again_after_shutdown_and_init() -> None:
    gpu, n = RealGpu(), hvd.size()
    for _ in range(2):
        handle = hvd.allreduce_async(gpu.put(torch.ones(1 << 20)), op=hvd.Sum, name="before")
        assert hvd.synchronize(handle).eq(n).all()
        hvd.allreduce_async(gpu.put(torch.ones(1 << 20)), op=hvd.Sum, name="left")
        hvd.barrier()
        hvd.shutdown()
        hvd.init()
    assert hvd.allreduce(gpu.put(torch.ones(2)), op=hvd.Sum).tolist() == [n, n]


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
