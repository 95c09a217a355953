"""A rank of a job that ends in some way: `mpirun -np 2 python ending_rank.py HOW [EAR]`; see test_mpi_endings.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi_job import WHOLE, MpiRank, join

from horo.errors import GroupError

DEADLINE_S = 60

kept: list[Any] = []


def work(rank: MpiRank) -> None:
    for step in range(3):
        array = np.full(200_000, rank.rank, np.float32)
        rank.allreduce(array, name=f"step {step}")
        assert array[0] == sum(range(rank.size))


def die(rank: MpiRank) -> None:
    """Rank 1 is killed; what the other is told goes to the socket EAR if there is one, and it leaves without MPI."""
    # mpirun does not end a survivor that has left its process group.
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    try:
        while True:
            work(rank)
            if rank.rank == 1:  # which the other may hear in the middle of what is done here
                os.kill(os.getpid(), signal.SIGKILL)
    except GroupError as error:
        if len(sys.argv) > 2:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
                mouth.sendto(str(error).encode(), sys.argv[2])
        os._exit(3)


def finalize_first(rank: MpiRank) -> None:
    """MPI is finalized while the job is still there."""
    work(rank)
    MPI.Finalize()
    rank.job.close()


def leave_it(rank: MpiRank) -> None:
    """The program ends with its context alive, and mpi4py finalizes MPI."""
    work(rank)


def main(how: str) -> None:
    joined = join(WHOLE)
    rank = joined.__enter__()
    {"die": die, "finalize": finalize_first, "leave": leave_it}[how](rank)
    print(f"rank {rank.rank} done", flush=True)
    if how == "leave":
        kept.append(joined)  # else the end of its generator would close the job


if __name__ == "__main__":
    main(sys.argv[1])
