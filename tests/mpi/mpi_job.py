"""A job of horo whose ranks mpirun has started, started through mpi4py and built from the parts of the bootstrap."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ranks import Rank

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


WHOLE = Mode("whole-messages")
MODES = (WHOLE, Mode("small-messages", 4096))


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
