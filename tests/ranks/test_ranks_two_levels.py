"""Allreduces of tensors on GPUs in two levels, in processes: by NCCL in each host, through host memory between hosts.
Doubles stand for the CUDA driver and for NCCL: see ``gpu_double``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import gpu_double
import pytest
import torch
from doubles import CUDA, NCCL, build_double
from rank_pool import RankPool

import horo.torch as hvd
from horo.errors import PeerLostError

TWO_LEVELS = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}
pytestmark = pytest.mark.skipif(
    NCCL in Path("/proc/self/maps").read_text(),
    reason="this torch has loaded an NCCL of its own, which goes before the double "
    "(`make test TORCH=/path/of/a/build/for/CPUs.whl`)",
)


@pytest.fixture
def doubles(tmp_path: Path) -> tuple[str, str]:
    cuda = build_double(CUDA, tmp_path, DELAYS=20, DEVICES=3)
    return str(cuda), str(build_double(NCCL, tmp_path, CUDA_DOUBLE=f'"{cuda}"', DELAYS=5))


def begin(*paths: str) -> gpu_double.Gpu:
    """Two ranks on the first host, and the third one on another."""
    os.environ["HORO_HOST_ID"] = f"host {int(os.environ['HOROVOD_RANK']) // 2}"
    gpu = gpu_double.load(*paths)
    hvd.init()
    return gpu


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(3, init=False, environment=TWO_LEVELS)
    yield pool
    pool.close()


def test_a_host_reduces_first_where_that_is_asked_for(pool: RankPool, doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> None:
        gpu = begin(*paths)
        r, steps = hvd.rank(), torch.arange(5000.0)
        assert hvd.config()["hierarchical_allreduce"] is True
        assert torch.equal(gpu.read(hvd.allreduce(gpu.put(steps + r, r), op=hvd.Sum)), 3 * steps + 3)
        assert gpu.launched() == 2  # the rank's host reduces, and gathers
        group = hvd.grouped_allreduce([gpu.put(steps + r, r), gpu.put(steps[:7].double() + r, r)])
        assert torch.allclose(gpu.read(group[0]), steps + 1)
        assert torch.allclose(gpu.read(group[1]), steps[:7].double() + 1)
        assert gpu.read(hvd.broadcast(gpu.put(torch.full((3,), r), r), 2)).tolist() == [2, 2, 2]
        assert torch.equal(hvd.allreduce(steps + r, op=hvd.Sum), 3 * steps + 3)

    pool.run(check, *doubles)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_is_killed_in_the_middle_ends_the_call_of_the_others(
    pool: RankPool, doubles: tuple[str, str], victim: int
) -> None:
    def check(victim: int, *paths: str) -> str:
        gpu = begin(*paths)
        r = hvd.rank()
        x = gpu.put(torch.ones(5000), r)
        hvd.allreduce_(x, op=hvd.Sum)
        hvd.barrier()  # one without a part is further than the others
        if r == victim:
            gpu.hold()  # never opened: its part does not run
            hvd.allreduce_async_(x, op=hvd.Sum)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            hvd.allreduce_(x, op=hvd.Sum)
            if r == 1:  # it has no part: its call may be over when its kernels wait for rank 0
                hvd.barrier()
        gpu.read(x)
        return str(caught.value)

    for said in pool.run_each(check, [(victim, *doubles)] * 3, lost=[victim]):
        assert said is None or said.startswith(f"rank {victim} (")
