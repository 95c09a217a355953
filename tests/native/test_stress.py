"""Random schedules over the whole core, checked by arithmetic: fixed seeds, and a fresh one each time."""

from __future__ import annotations

import random

import pytest
from native_build import FLAVOUR
from stress import Schedule, play

OPERATIONS = {"": 400, "address": 120, "thread": 80}[FLAVOUR]
SCHEDULES = 2 if FLAVOUR else 3
DEADLINE_S = 150 if FLAVOUR else 100
"""Of a schedule, which takes a second or two; where other programs have the cores, each wait takes their turns, too."""


@pytest.mark.parametrize("seed", [*range(0, 8 * SCHEDULES, SCHEDULES), pytest.param(None, id="fresh")])
def test_ranks_get_what_arithmetic_says_whatever_happens(seed: int | None) -> None:
    first = random.randrange(1 << 30) if seed is None else seed
    for each in range(first, first + SCHEDULES):
        play(Schedule(each, OPERATIONS), DEADLINE_S)


@pytest.mark.parametrize("seed", [1000, 2000])
def test_one_host_gets_what_arithmetic_says(seed: int) -> None:
    for each in range(seed, seed + SCHEDULES):
        play(Schedule(each, OPERATIONS, hosts=1, together=True), DEADLINE_S)
