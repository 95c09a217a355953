"""horo's own kernels on the devices of this machine: they calculate as the host does, between all ranks by NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import RankPool

import horo.torch as hvd

SCRIPT = """
import torch
import horo.torch as hvd
hvd.init()
torch.cuda.set_device(hvd.local_rank())
n, r = hvd.size(), hvd.rank()
for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
    for dtype in (torch.float32, torch.float64):
        group = [torch.full((i * 37,), r + 1.0, dtype=dtype, device="cuda") for i in range(200)]
        for one in hvd.grouped_allreduce(group, op=hvd.Sum, compression=compression):
            assert torch.equal(one, torch.full_like(one, n * (n + 1) / 2)), (compression, dtype)
for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
    x = torch.full((100_003,), 6 * (r + 1), dtype=dtype, device="cuda")
    assert torch.equal(hvd.allreduce(x), torch.full_like(x, 6 * n * (n + 1) // 2 // n)), dtype
    assert torch.equal(hvd.allreduce(x, op=hvd.Max, prescale_factor=0.5), torch.full_like(x, 3 * n)), dtype
flags = torch.arange(1000, device="cuda") % (r + 2) == 0
assert torch.equal(hvd.allreduce(flags, op=hvd.Max), (torch.stack([
    torch.arange(1000, device="cuda") % (s + 2) == 0 for s in range(n)]).any(dim=0)))
rows = hvd.reducescatter(torch.full((2 * n + 1, 3), 4, device="cuda"), op=hvd.Average)
assert torch.equal(rows, torch.full((3 if r == 0 else 2, 3), 4, device="cuda"))
for dtype in (torch.float16, torch.float32, torch.float64):
    own = [torch.randn(i * 3001, generator=torch.Generator().manual_seed(10 * i + r)).to(dtype) for i in range(9)]
    for a, b in zip(hvd.grouped_allreduce([x.cuda() for x in own], op=hvd.Adasum),
                    hvd.grouped_allreduce(own, op=hvd.Adasum)):
        # sums have another order there, and each level rounds once
        assert torch.allclose(a.cpu().double(), b.double(), atol=n * 8 * torch.finfo(dtype).eps), dtype
        assert torch.equal(a, hvd.broadcast(a, 0)), dtype
torch.cuda.synchronize()
print("rank", r, "done")
"""


def test_all_ranks_convert_by_kernels(tmp_path: Path) -> None:
    if not hvd.nccl_built():
        pytest.skip("this process finds no NCCL; `pytest tests/gpu` with the package nvidia-nccl runs this")
    script = tmp_path / "kernels.py"
    script.write_text(SCRIPT)
    count = str(torch.cuda.device_count())
    words = [sys.executable, "-m", "horo.runner", "-np", count, "--gpu-operations", "nccl", sys.executable, str(script)]
    environment = {**os.environ, "HORO_LOG_LEVEL": "info"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == int(count)
    assert "NCCL does what it can of tensors on GPU 0" in done.stdout + done.stderr
    assert "host memory" not in done.stdout + done.stderr, "the driver has not taken the kernels"


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_floats_are_rounded_as_on_the_host(nccl1: RankPool, narrow: torch.dtype) -> None:
    def check() -> None:
        gpu = RealGpu()
        compression = hvd.Compression.fp16 if narrow is torch.float16 else hvd.Compression.bf16
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(narrow).float()
        between = (every[:-1] + every[1:]) / 2
        drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), dtype=torch.int64).to(torch.int32).view(torch.float32)
        for x in (every, between, drawn, drawn.double() * 1.000001):
            for factors in ({}, {"prescale_factor": 0.3, "postscale_factor": -1.7}):
                options = {"op": hvd.Sum, "compression": compression, **factors}
                found = hvd.allreduce(x.to(gpu.device), **options).cpu()
                wanted = hvd.allreduce(x, **options)
                assert torch.equal(found.isnan(), wanted.isnan())
                assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))

    nccl1.run(check)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_scaled_as_on_the_host(nccl1: RankPool, dtype: torch.dtype) -> None:
    def check() -> None:
        gpu, limits = RealGpu(), torch.iinfo(dtype)
        x = torch.randint(limits.min, limits.max, (100_003,), dtype=dtype)
        x[:2] = torch.tensor([limits.min, limits.max], dtype=dtype)
        for op in (hvd.Average, hvd.Sum, hvd.Min):
            for factors in ((1.0, 1.0), (0.3, 1.0), (1.0, -2.5), (1e9, 1e-9)):
                options = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1]}
                found = hvd.allreduce(x.to(gpu.device), **options).cpu()
                assert torch.equal(found, hvd.allreduce(x, **options)), (op, factors)

    nccl1.run(check)
