"""Collectives by NCCL on the devices of this machine, a rank on each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import horo.torch as hvd

SCRIPT = """
import torch
import horo.torch as hvd
hvd.init()
torch.cuda.set_device(hvd.local_rank())
n, r = hvd.size(), hvd.rank()
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64):
    x = torch.full((100_003,), r + 1, dtype=dtype, device="cuda")
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum), torch.full_like(x, n * (n + 1) // 2)), dtype
    assert torch.equal(hvd.allreduce(x, op=hvd.Max), torch.full_like(x, n)), dtype
x = torch.arange(1000.0, device="cuda") * (r + 1)
torch.testing.assert_close(hvd.allreduce(x), torch.arange(1000.0, device="cuda") * (n + 1) / 2)
half = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5)
torch.testing.assert_close(half, torch.arange(1000.0, device="cuda") * n * (n + 1) / 4)
group = [torch.full((i,), float(r), device="cuda") for i in range(300)]
assert all(torch.equal(one, torch.full_like(one, (n - 1) / 2)) for one in hvd.grouped_allreduce(group))
assert torch.equal(hvd.broadcast(torch.full((7,), r, device="cuda"), n - 1), torch.full((7,), n - 1, device="cuda"))
rows = hvd.reducescatter(torch.ones(2 * n + 1, 3, device="cuda"), op=hvd.Sum)
assert torch.equal(rows, torch.full((3 if r == 0 else 2, 3), float(n), device="cuda"))
for _ in range(1000):
    hvd.allreduce_(x, op=hvd.Average)
torch.cuda.synchronize()
print("rank", r, "done")
"""


def test_all_that_nccl_does(tmp_path: Path) -> None:
    if not hvd.nccl_built():
        pytest.skip("this process finds no NCCL; `pytest tests/gpu` with the package nvidia-nccl runs this")
    script = tmp_path / "nccl.py"
    script.write_text(SCRIPT)
    count = str(torch.cuda.device_count())
    words = [sys.executable, "-m", "horo.runner", "-np", count, "--gpu-operations", "nccl", sys.executable, str(script)]
    environment = {**os.environ, "HORO_LOG_LEVEL": "info"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == int(count)
    assert "NCCL does what it can of tensors on GPU 0" in done.stdout + done.stderr
