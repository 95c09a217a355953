"""A few random faults in a real job; ``chaos.py`` alone makes any number."""

from __future__ import annotations

import random

import chaos


def test_a_job_goes_on_and_ends_well_whatever_befalls_its_ranks() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    assert chaos.run(faults=4, seconds=60.0, seed=seed).total() > 0
