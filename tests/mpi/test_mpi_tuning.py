"""What operations run with, changed by records while data goes by MPI."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from known_answers import SIZES, collectives
from mpi_job import MODES, SEGMENT_BYTES, MpiRank, join
from ranks import NUMPY_OF_DTYPE

from horo._core_setup import Autotune

pytestmark = pytest.mark.mpi(min_size=2)

STEPS = 40
SEED = random.SystemRandom().getrandbits(31) | 1


@pytest.fixture(params=MODES, ids=str)
def shuffled(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """A rank of a job whose rank 0 draws other values after every batch."""
    start = {"sockets": 1, "segment": SEGMENT_BYTES // 4, "cycle": 200, "overlap": 2}
    with join(request.param, Autotune(start, {"segment": SEGMENT_BYTES}, shuffle=SEED)) as joined:
        print("seed", joined.comm.bcast(SEED))
        yield joined


@pytest.fixture(params=MODES, ids=str)
def searching(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """A rank of a job that really searches, for a few samples."""
    start = {"sockets": 1, "segment": 4096, "fusion": 0}
    search = Autotune(start, {"segment": SEGMENT_BYTES}, warmup_samples=1, steps_per_sample=2, max_samples=12)
    with join(request.param, search) as joined:
        yield joined


def values_of(rank: MpiRank) -> tuple[int, ...]:
    """What the next operation runs with: between two operations, the same on all ranks."""
    values = tuple(rank.context.tuning()[0].values())
    assert rank.everybody(values) == [values] * rank.size
    return values


def test_all_ranks_change_over_at_one_place_and_results_are_right(shuffled: MpiRank) -> None:
    seen = set()
    for step in range(STEPS):
        collectives(shuffled, step)
        seen.add(values_of(shuffled))
    assert len(seen) > STEPS / 4


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_ranks_hold_the_same_bits(shuffled: MpiRank, dtype: str) -> None:
    chance = np.random.default_rng(shuffled.rank)
    for step in range(STEPS):
        array = chance.standard_normal(SIZES[step % len(SIZES)]).astype(NUMPY_OF_DTYPE[dtype])
        shuffled.allreduce(array, name=f"x{step % len(SIZES)}")
        assert len(set(shuffled.everybody(array.tobytes()))) == 1


def test_process_sets_come_work_and_go_while_values_change(shuffled: MpiRank) -> None:
    for step in range(8):
        members = sorted(random.Random(step).sample(range(shuffled.size), 1 + step % shuffled.size))
        team = shuffled.job.add_team(members)
        for turn in range(5):
            collectives(shuffled, 5 * step + turn)
            if shuffled.rank in members:
                array = np.full(SIZES[turn + 1], shuffled.rank + 1, np.float32)
                assert set(shuffled.allreduce(array, "t", team=team)) == {sum(members) + len(members)}
        shuffled.context.remove_team(team)


def test_a_search_ends_everywhere_with_the_same_values_also_in_a_process_set(searching: MpiRank) -> None:
    """One that is there by then, and one that is made later."""
    members = [searching.size - 2, searching.size - 1]

    def work(teams: list[int]) -> None:
        for k in range(3):
            array = np.ones(20_000, np.float32)
            assert set(searching.allreduce(array, f"x{k}")) == {searching.size}
        for team in teams if searching.rank in members else []:
            array = np.full(50_000, searching.rank, np.float32)
            assert set(searching.allreduce(array, "t", team=team)) == {sum(members)}
        searching.barrier()

    teams = [searching.job.add_team(members)]
    for _ in range(1000):
        work(teams)
        is_over = searching.context.tuning()[1]
        assert searching.everybody(is_over) == [is_over] * searching.size
        if is_over:
            break
    assert is_over
    values_of(searching)
    teams.append(searching.job.add_team(members))
    for _ in range(5):
        work(teams)
