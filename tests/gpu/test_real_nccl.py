"""Collectives by NCCL on the devices of this machine, a rank on each; with one, NCCL's own ways of a single rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_checks import RealGpu
from rank_pool import RankPool, on

import horo.torch as hvd
from horo.errors import PeerLostError

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
    assert "NCCL does what it can of tensors on cuda:0" in done.stdout + done.stderr


@on("nccl1")
def test_results_follow_the_gpu_not_the_thread() -> None:
    """``synchronize`` returns while the GPU still computes what was asked for."""
    gpu = RealGpu()
    x = torch.ones(1 << 20, device=gpu.device)
    hvd.allreduce_(x, op=hvd.Sum)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1 << 31)
    done.record()
    hvd.allreduce_(x, op=hvd.Sum)
    assert not done.query()
    x += 1
    assert x.eq(2).all()


def test_a_rank_that_is_killed_while_kernels_wait_for_it_frees_the_gpus_of_others(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU; `pytest tests/gpu` on a machine with two runs this")

    def check() -> tuple[str, float]:
        gpu, r = RealGpu(), hvd.rank()
        x = torch.ones(1 << 20, device=gpu.device)
        hvd.allreduce_(x, op=hvd.Sum)
        torch.cuda.synchronize()
        hvd.barrier()
        if r == 1:
            torch.cuda._sleep(1 << 33)  # its part of the next call does not begin before it is killed
        hvd.allreduce_(x, op=hvd.Sum)
        if r == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        torch.cuda.synchronize()  # outside of horo
        with pytest.raises(PeerLostError) as caught:
            hvd.allreduce_(x, op=hvd.Sum)
        return str(caught.value), time.monotonic() - begin

    with RankPool(2, environment={"HORO_GPU_OPERATIONS": "nccl"}) as pool:
        said, took = pool.run_each(check, [()] * 2, lost=[1])[0]
    assert said.startswith("rank 1 (")
    assert took < 15.0


def test_process_sets_that_overlap_take_turns(device: torch.device) -> None:
    if torch.cuda.device_count() < 3:
        pytest.skip("there are fewer than three GPUs; `pytest tests/gpu` on a machine with three runs this")

    def check() -> None:
        gpu, r = RealGpu(), hvd.rank()
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        mine = [each for each in sets if each.included()]
        for step in range(200):
            order = mine if (step + r) % 2 else mine[::-1]
            xs = [torch.ones(1 << 14, device=gpu.device) for _ in order]
            handles = [
                hvd.allreduce_async_(x, op=hvd.Sum, name=f"set.{each.process_set_id}", process_set=each)
                for x, each in zip(xs, order, strict=True)
            ]
            for handle in handles:
                hvd.synchronize(handle)
            assert all(x.eq(2).all() for x in xs), step

    with RankPool(3, environment={"HORO_GPU_OPERATIONS": "nccl"}) as pool:
        pool.run(check, deadline_s=120.0)
