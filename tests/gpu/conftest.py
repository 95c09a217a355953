"""Tests on real devices; where there is none, they are skipped with the reason.

Ranks of one machine share the GPUs that it has: one is enough for all tests but those that say how many they need.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool, one_of


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The first device of this process."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU; `pytest tests/gpu` on a machine with one runs this")
    return torch.device("cuda", 0)


def _pool(size: int, **environment: str) -> Any:
    """A fixture: ranks on one GPU where there is one."""

    @pytest.fixture(scope="session")
    def pool(device: torch.device) -> Iterator[RankPool]:
        with RankPool(size, environment=environment) as ranks:
            yield ranks

    return pool


shared2, shared4 = _pool(2, HORO_OVERLAP="always"), _pool(4)
nccl1 = _pool(1, HORO_GPU_OPERATIONS="nccl", HORO_LOG_LEVEL="info")
ranks = one_of("shared2", "shared4", "nccl1")
