"""All collectives with data between hosts by MPI, by ranks that mpirun has started; expected values are arithmetic."""

import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_answers import adasum_rows, adasums
from ranks import Rank
from stress import Operation, Player, Run, Schedule
from trace_events import parse_timeline, rows_of

from horo.bootstrap.job import connect
from horo.bootstrap.launchers.variables import read_launch
from horo.bootstrap.mpi.calls import mpi_calls
from horo.bootstrap.running_rank import RunningRank
from horo.bootstrap.store.server import StoreServer
from horo.config.table import read_config
from horo.core.setup import MpiUse, Setup

SEGMENT_BYTES = 1 << 16


@dataclass(frozen=True)
class Mode:
    """How MPI carries the data between the two hosts of a job."""

    name: str
    message_bytes: int = 1 << 30

    def __str__(self) -> str:
        return self.name


MODES = (Mode("whole-messages"), Mode("small-messages", 4096))


class MpiRank(Rank):
    """One rank with numpy arrays instead of torch tensors, and mpi4py beside it to compare notes."""

    def __init__(self, job: RunningRank, comm: Any) -> None:
        super().__init__(job.context)
        self.job = job
        self.comm = comm

    def everybody(self, value: Any) -> list[Any]:
        """The values of all ranks, by mpi4py."""
        told: list[Any] = self.comm.allgather(value)
        return told


def _environ(comm: Any, server: StoreServer | None, secret: str) -> dict[str, str]:
    address = None if server is None else server.endpoints[0]
    host, port = comm.bcast(address)
    rank, size = comm.Get_rank(), comm.Get_size()
    return {
        "HORO_RANK": str(rank), "HORO_SIZE": str(size), "HORO_STORE": f"{host}:{port}",
        "HORO_SECRET": comm.bcast(secret), "HORO_JOB_ID": "mpi", "HORO_HOST_ID": str(rank * 2 // size),
        "HORO_SEGMENT_BYTES": str(SEGMENT_BYTES), "HORO_STALL_CHECK_TIME_SECONDS": "20",
    }  # fmt: skip


def _use(setup: Setup, mode: Mode, comm: Any) -> MpiUse:
    """Data goes to the ranks of equal local index, as the data sockets do."""
    hosts = list(setup.host_of_rank)
    members = [[rank for rank, host in enumerate(hosts) if host == other] for other in range(max(hosts) + 1)]
    own = members[hosts[setup.rank]]
    index = own.index(setup.rank)
    return MpiUse(
        mpi_calls(comm),
        rank_of_host=[m[index] if m is not own and index < len(m) else -1 for m in members],
        message_bytes=mode.message_bytes,
    )


@contextmanager
def join(mode: Mode, tuned: Mapping[str, int] | None = None) -> Iterator[MpiRank]:
    """This process as a rank of a job of all ranks that mpirun has started; leaves the job together with them."""
    from mpi4py import MPI  # noqa: PLC0415 - initializes MPI: not in a run of all tests

    world = MPI.COMM_WORLD
    server = StoreServer(["127.0.0.1"], secret := secrets.token_bytes(32)) if world.Get_rank() == 0 else None
    environ = _environ(world, server, secret.hex() if server else "")
    connection = connect(read_launch(environ), read_config(environ), 1, [])
    world.Barrier()
    if server:
        server.close()
    comm = world.Dup()
    setup = replace(connection.setup, mpi=_use(connection.setup, mode, comm), tuned=tuned)
    job = RunningRank(replace(connection, setup=setup))
    try:
        yield MpiRank(job, world)
    finally:
        job.close()


@pytest.fixture(scope="module", params=MODES, ids=str)
def rank(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """This process as a rank of a job, in each of MODES."""
    with join(request.param) as joined:
        yield joined


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
