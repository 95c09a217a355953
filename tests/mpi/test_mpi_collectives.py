"""All collectives with data between hosts by MPI; expected values come from arithmetic."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adasum_oracle import adasum, tolerance
from known_answers import adasum_rows, adasums
from mpi_job import MODES, SEGMENT_BYTES, Mode, MpiRank, join
from stress import Operation, Player, Run, Schedule
from trace_events import parse_timeline, rows_of

from horo.core import context

pytestmark = pytest.mark.mpi(min_size=2)


def assert_same_bits(rank: MpiRank, array: np.ndarray) -> None:
    assert len({bytes(told) for told in rank.everybody(array.tobytes())}) == 1


def test_large_floats_give_the_sum_and_the_same_bits_everywhere(rank: MpiRank) -> None:
    count = (1 << 20) + 3
    inputs = [np.random.default_rng(r).standard_normal(count, np.float32) for r in range(rank.size)]
    array = inputs[rank.rank].copy()
    rank.allreduce(array, name="large")
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    magnitude = np.sum(np.abs(inputs), axis=0, dtype=np.float64)
    assert np.all(np.abs(array - exact) <= magnitude * rank.size * 2.0**-24)
    assert_same_bits(rank, array)


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 11), ("float32", 24), ("float64", 52)])
def test_adasum_of_each_tensor(rank: MpiRank, dtype: str, digits: int) -> None:
    counts = [1, 7, 0, 1000, 70_001]
    seeds = [[[r, n] for n in counts] for r in range(rank.size)]
    inputs = [[np.random.default_rng(seed).standard_normal(seed[1]).astype(dtype) for seed in row] for row in seeds]
    arrays = [array.copy() for array in inputs[rank.rank]]
    rank.finish(rank.submit("allreduce", f"adasum {dtype}", arrays, reduce_op=context.REDUCE_OPS["adasum"]))
    for i, array in enumerate(arrays):
        vectors = [mine[i] for mine in inputs]
        assert np.abs(array - adasum(vectors)).max(initial=0) <= tolerance(vectors, digits)
        assert_same_bits(rank, array)
    lone = (1 + np.arange(5000) % 5).astype(dtype)  # equal on all ranks
    equal = lone / 2
    rank.allreduce(lone, name=f"adasum of equal {dtype}", op="adasum", prescale=2.0, postscale=0.25)
    assert np.array_equal(lone, equal)


def test_nothing_pending_means_no_wake_up(rank: MpiRank) -> None:
    rank.allreduce(np.ones(100_000, np.float32), name="before")
    rank.comm.Barrier()
    sleeps = []
    for _ in range(5):  # on a busy machine a thread may come to rest only in a later round
        before = rank.context.counters()["sleeps"]
        rank.comm.Barrier()  # a round of messages among all ranks: long for a leader that looks every 20 us
        for _ in range(50):
            rank.comm.Barrier()
        sleeps.append(rank.context.counters()["sleeps"] - before)
    assert min(sleeps) <= 2, sleeps


def test_an_adasum_has_its_phases_on_each_rank(rank: MpiRank, tmp_path: Path) -> None:
    """The ranks' own files: all have what they have done together."""
    path = tmp_path / f"timeline-{rank.rank}.json"
    rank.context.start_timeline(str(path))
    rank.barrier("begun")
    adasums(rank)
    rank.context.stop_timeline()
    rows = rows_of(parse_timeline(path))
    expected = adasum_rows("MPI", levels=(rank.size - 1).bit_length())
    assert {name: rows[name] for name in expected} == expected


class MpiPlayer(Player):
    """A rank in a schedule, by itself in its process."""

    rank: MpiRank

    def begin_add(self, operation: Operation, _: bool) -> Any:
        team = operation.other if operation.odd == self.me else operation.team
        self.ids[team] = self.rank.job.add_team(self.run.schedule.teams[team])
        return 0, [], []


class MpiRun(Run):
    player = MpiPlayer


SEED = random.SystemRandom().getrandbits(31)
TUNED = {"sockets": 1, "segment": SEGMENT_BYTES // 4, "cycle": 200, "overlap": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tuned", [None, TUNED], ids=["fixed", "tuned"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ranks_get_what_arithmetic_says_whatever_happens(mode: Mode, tuned: dict[str, int] | None) -> None:
    with join(mode, tuned) as rank:
        first, hosts = rank.comm.bcast(SEED), [other * 2 // rank.size for other in range(rank.size)]
        for seed in range(first, first + 2):
            print("seed", seed)
            options = {"segment_bytes": SEGMENT_BYTES, "tuned": tuned}
            MpiRun(Schedule(seed, 200, host_of_rank=hosts, together=True, **options)).play(rank)
            rank.barrier("between two schedules")
            values = tuple(rank.context.tuning()[0].values())
            assert rank.everybody(values) == [values] * rank.size
