"""Fixtures: ranks that are in a process group of the backend "horo", started once per session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import RankPool, one_of


def begin(store: str) -> None:
    """Makes the default group of a rank."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    dist.init_process_group("horo", init_method=f"file://{store}", rank=rank, world_size=size)


class GroupPool(RankPool):
    """Ranks that are in a process group, whenever they are started again."""

    def _start(self) -> None:
        super()._start()
        assert self._folder is not None
        self.run(begin, f"{self._folder.name}/store")


def _group(size: int, scope: Any = "session", *, ranks_per_host: int = 0, **environment: str) -> Any:
    @pytest.fixture(scope=scope)
    def pool() -> Iterator[RankPool]:
        with GroupPool(size, init=False, ranks_per_host=ranks_per_host, environment=environment) as ranks:
            yield ranks

    return pool


group2, group3, group2_on_hosts = _group(2), _group(3), _group(2, ranks_per_host=1)
fresh_group2, fresh_group3 = _group(2, "function"), _group(3, "function")
fresh_group4, fresh_group8 = _group(4, "function"), _group(8, "function")
group = one_of("group2", "group3", "group2_on_hosts")
impatient_group2 = _group(2, "function", HORO_DEADLOCK_TIME_SECONDS="0.4")
warned_group2 = _group(2, "function", HORO_STALL_CHECK_TIME_SECONDS="1")
warned_group2_on_hosts = _group(2, "function", ranks_per_host=1, HORO_STALL_CHECK_TIME_SECONDS="1")
warned_group = one_of("warned_group2", "warned_group2_on_hosts")
