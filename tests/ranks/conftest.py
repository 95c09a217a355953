"""Fixtures: jobs of real rank processes, started once per test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks on this host."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks on this host."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks, then four."""
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool
