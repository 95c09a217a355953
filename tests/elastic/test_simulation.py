"""Random schedules of the simulator of elastic jobs; ``simulate.py`` runs more of them."""

from __future__ import annotations

import pytest
from simulate import simulate

SCHEDULES = 50


@pytest.mark.parametrize("first", range(0, 250, SCHEDULES))
def test_no_two_generations_are_at_work_and_each_job_ends(first: int) -> None:
    for seed in range(first, first + SCHEDULES):
        simulate(seed)
