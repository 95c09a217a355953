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


def _pool_with_overlap(size: int, overlap: str) -> Iterator[RankPool]:
    pool = RankPool(size, environment={"HORO_OVERLAP": overlap})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks2_always() -> Iterator[RankPool]:
    """Two ranks that reduce gradients while backward runs."""
    yield from _pool_with_overlap(2, "always")


@pytest.fixture(scope="session")
def ranks2_never() -> Iterator[RankPool]:
    """Two ranks that reduce gradients after backward."""
    yield from _pool_with_overlap(2, "never")


@pytest.fixture(scope="session")
def ranks4_always() -> Iterator[RankPool]:
    """Four ranks that reduce gradients while backward runs."""
    yield from _pool_with_overlap(4, "always")


@pytest.fixture(scope="session")
def ranks4_never() -> Iterator[RankPool]:
    """Four ranks that reduce gradients after backward."""
    yield from _pool_with_overlap(4, "never")


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks, then four."""
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool
