"""The checks that tests/gpu makes on a GPU hold on CPUs, so that what fails there is not the check."""

from __future__ import annotations

from collections.abc import Callable

import gpu_checks
import pytest
import torch
from rank_pool import RankPool

BY_NAME = {check.__name__: check for check in gpu_checks.ON_A_TORCH_DEVICE}


def on_cpu(check: Callable[[torch.device], None]) -> None:
    check(torch.device("cpu"))


@pytest.mark.parametrize("name", BY_NAME)
def test_it_holds_on_cpus(ranks: RankPool, name: str) -> None:
    ranks.run(on_cpu, BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_it_holds_for_one_rank(ranks1_always: RankPool, name: str) -> None:
    ranks1_always.run(on_cpu, BY_NAME[name])
