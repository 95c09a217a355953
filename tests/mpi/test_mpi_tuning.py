"""What operations run with, changed by records while data goes by MPI."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from known_answers import SIZES, Proposals, collectives
from mpi_job import MODES, SEGMENT_BYTES, MpiRank, join
from ranks import NUMPY_OF_DTYPE

pytestmark = pytest.mark.mpi(min_size=2)

STEPS = 40
SEED = random.SystemRandom().getrandbits(31) | 1


@pytest.fixture(params=MODES, ids=str)
def tuned(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """A rank of a job whose values may change."""
    with join(request.param, {"sockets": 1, "segment": SEGMENT_BYTES // 4, "cycle": 200, "overlap": 2}) as joined:
        print("seed", joined.comm.bcast(SEED))
        yield joined


@pytest.fixture
def others() -> Proposals:
    return Proposals(SEED, SEGMENT_BYTES, 1)


def values_of(rank: MpiRank) -> tuple[int, ...]:
    """What the next operation runs with: between two operations, the same on all ranks."""
    values = tuple(rank.context.tuning()[0].values())
    assert rank.everybody(values) == [values] * rank.size
    return values


def test_all_ranks_change_over_at_one_place_and_results_are_right(tuned: MpiRank, others: Proposals) -> None:
    seen = set()
    for step in range(STEPS):
        others.propose(tuned)
        collectives(tuned, step)
        seen.add(values_of(tuned))
    assert len(seen) > STEPS / 4


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_ranks_hold_the_same_bits(tuned: MpiRank, others: Proposals, dtype: str) -> None:
    chance = np.random.default_rng(tuned.rank)
    for step in range(STEPS):
        others.propose(tuned)
        array = chance.standard_normal(SIZES[step % len(SIZES)]).astype(NUMPY_OF_DTYPE[dtype])
        tuned.allreduce(array, name=f"x{step % len(SIZES)}")
        assert len(set(tuned.everybody(array.tobytes()))) == 1


def test_process_sets_come_work_and_go_while_values_change(tuned: MpiRank, others: Proposals) -> None:
    for step in range(8):
        members = sorted(random.Random(step).sample(range(tuned.size), 1 + step % tuned.size))
        team = tuned.job.add_team(members)
        for turn in range(5):
            others.propose(tuned)
            collectives(tuned, 5 * step + turn)
            if tuned.rank in members:
                array = np.full(SIZES[turn + 1], tuned.rank + 1, np.float32)
                assert set(tuned.allreduce(array, "t", team=team)) == {sum(members) + len(members)}
        tuned.context.remove_team(team)
