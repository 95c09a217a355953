"""All collectives with data between hosts by MPI; expected values come from arithmetic."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_answers import adasum_rows, adasums
from mpi_job import MODES, SEGMENT_BYTES, Mode, MpiRank, join
from stress import Operation, Player, Run, Schedule
from trace_events import parse_timeline, rows_of

pytestmark = pytest.mark.mpi(min_size=2)


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
