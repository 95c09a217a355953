"""Tests on real devices; where there is none, they are skipped with the reason.

Ranks of one machine share the GPUs that it has: one is enough for all tests but those that say how many they need.
"""

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RankPool


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The first device of this process."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU; `pytest tests/gpu` on a machine with one runs this")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def shared2(device: torch.device) -> Iterator[RankPool]:
    """Two ranks, on one GPU where there is one, whose tensors are staged."""
    pool = RankPool(2, environment={"HORO_OVERLAP": "always"})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared4(device: torch.device) -> Iterator[RankPool]:
    """Four ranks, on one GPU where there is one, whose tensors are staged."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nccl1(device: torch.device) -> Iterator[RankPool]:
    """One rank, whose tensors NCCL takes."""
    pool = RankPool(1, environment={"HORO_GPU_OPERATIONS": "nccl", "HORO_LOG_LEVEL": "info"})
    yield pool
    pool.close()


@pytest.fixture(params=["staged-2", "staged-4", "nccl-1"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks and four that share a GPU, then one of NCCL."""
    names = {"staged-2": "shared2", "staged-4": "shared4", "nccl-1": "nccl1"}
    pool: RankPool = request.getfixturevalue(names[request.param])
    return pool
