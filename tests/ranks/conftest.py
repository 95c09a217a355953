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


def _pool_with(size: int, overlap: str, ready: str = "backward") -> Iterator[RankPool]:
    pool = RankPool(size, environment={"HORO_OVERLAP": overlap, "HORO_GRADIENTS_READY": ready})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks1_always() -> Iterator[RankPool]:
    """One rank that treats gradients as several would while backward runs."""
    yield from _pool_with(1, "always")


@pytest.fixture(scope="session")
def ranks1_never() -> Iterator[RankPool]:
    """One rank that treats gradients as several would at the end of backward."""
    yield from _pool_with(1, "never")


@pytest.fixture(scope="session")
def ranks1_step() -> Iterator[RankPool]:
    """One rank in Horovod's order of calls."""
    yield from _pool_with(1, "always", "step")


@pytest.fixture(scope="session")
def ranks1_step_never() -> Iterator[RankPool]:
    """One rank in Horovod's order of calls, which looks at gradients at the step."""
    yield from _pool_with(1, "never", "step")


@pytest.fixture(scope="session")
def ranks2_always() -> Iterator[RankPool]:
    """Two ranks that reduce gradients while backward runs."""
    yield from _pool_with(2, "always")


@pytest.fixture(scope="session")
def ranks2_never() -> Iterator[RankPool]:
    """Two ranks that reduce gradients at the end of backward."""
    yield from _pool_with(2, "never")


@pytest.fixture(scope="session")
def ranks2_step() -> Iterator[RankPool]:
    """Two ranks in Horovod's order of calls, which reduce gradients from backward on."""
    yield from _pool_with(2, "always", "step")


@pytest.fixture(scope="session")
def ranks2_step_never() -> Iterator[RankPool]:
    """Two ranks in Horovod's order of calls, which reduce gradients at the step."""
    yield from _pool_with(2, "never", "step")


@pytest.fixture(scope="session")
def ranks4_always() -> Iterator[RankPool]:
    """Four ranks that reduce gradients while backward runs."""
    yield from _pool_with(4, "always")


@pytest.fixture(scope="session")
def ranks4_never() -> Iterator[RankPool]:
    """Four ranks that reduce gradients at the end of backward."""
    yield from _pool_with(4, "never")


@pytest.fixture(scope="session")
def ranks4_step_never() -> Iterator[RankPool]:
    """Four ranks in Horovod's order of calls, which reduce gradients at the step."""
    yield from _pool_with(4, "never", "step")


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks, then four."""
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool
