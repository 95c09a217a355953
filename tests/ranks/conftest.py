"""Fixtures: jobs of real rank processes, started once per test session."""

from collections.abc import Iterator
from typing import Any

import pytest
from rank_pool import RankPool, one_of


def _pool(size: int, overlap: str = "", ready: str = "", *, init: bool = True, scope: Any = "session") -> Any:
    """A fixture: ranks on this host; ``init``: they have called ``init()``. A test that ends the job has its own.

    ``overlap`` ``always``: they reduce gradients while backward runs; ``never``: at its end, or at the step. ``ready``
    ``step``: Horovod's order of calls.
    """

    @pytest.fixture(scope=scope)
    def pool() -> Iterator[RankPool]:
        environment = {"HORO_OVERLAP": overlap, "HORO_GRADIENTS_READY": ready or "backward"} if overlap else {}
        with RankPool(size, init=init, environment=environment) as ranks:
            yield ranks

    return pool


def _on_hosts(size: int, *ranks_per_host: int) -> Any:
    """A fixture: ranks in a job that begins without process sets, so many on each host."""

    @pytest.fixture(scope="module", params=ranks_per_host, ids=lambda count: f"{count} a host")
    def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
        with RankPool(size, ranks_per_host=request.param) as ranks:
            yield ranks

    return pool


three, four = _on_hosts(3, 3, 1), _on_hosts(4, 4, 2)
ranks2, ranks4 = _pool(2), _pool(4)
ranks = one_of("ranks2", "ranks4")
ranks1_always, ranks1_never = _pool(1, "always"), _pool(1, "never")
ranks1_step, ranks1_step_never = _pool(1, "always", "step"), _pool(1, "never", "step")
ranks2_always, ranks2_never = _pool(2, "always"), _pool(2, "never")
ranks2_step, ranks2_step_never = _pool(2, "always", "step"), _pool(2, "never", "step")
ranks4_always, ranks4_never, ranks4_step_never = _pool(4, "always"), _pool(4, "never"), _pool(4, "never", "step")
fresh2, fresh4 = _pool(2, init=False, scope="function"), _pool(4, scope="function")
ranks2_in_backward = one_of("ranks2_always", "ranks2_never")
ranks4_in_backward = one_of("ranks4_always", "ranks4_never")
ranks2_in_step = one_of("ranks2_step", "ranks2_step_never")
ranks2_in_each_order = one_of("ranks2_always", "ranks2_never", "ranks2_step", "ranks2_step_never")
ranks2_in_most_orders = one_of("ranks2_always", "ranks2_never", "ranks2_step")
