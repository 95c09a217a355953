"""A rank that needs no torch and writes to a folder what it finds.

    rank_program.py place FOLDER [COUNT]  its place, and the sum of COUNT numbers on each rank, to ``rank.N``
    rank_program.py lose RANK             sums until RANK, if there is one, is killed
    rank_program.py sum FOLDER            large sums for ever: its pid to ``pid.N``, how many to ``sums.N``

N is the rank. The numbers that are added are its own plus one.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from plain_rank import Rank

_LARGE = 8 << 20
"""Numbers of four bytes: far more than the buffers of a connection hold."""


def place(rank: Rank, folder: str, count: str = "100000") -> None:
    job = rank.job
    found = {
        "size": job.size, "local": [job.local_rank, job.local_size], "cross": [job.cross_rank, job.cross_size],
        "host": os.uname().nodename, "mpi": job.mpi.library.split()[0] if job.mpi else "",
        "sum": rank.allreduce("x", int(count)),
    }  # fmt: skip
    draft = Path(folder, f"draft.{job.rank}")
    draft.write_text(json.dumps(found))
    draft.rename(draft.with_name(f"rank.{job.rank}"))
    rank.close()


def lose(rank: Rank, victim: str) -> None:
    rank.allreduce("before")
    if rank.job.rank == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        rank.allreduce("after")


def large_sums(rank: Rank, folder: str) -> None:
    Path(folder, f"pid.{rank.job.rank}").write_text(str(os.getpid()))
    for sums in itertools.count(1):
        rank.allreduce("large", _LARGE)
        Path(folder, f"sums.{rank.job.rank}").write_text(str(sums))


def main(command: str, *words: str) -> None:
    commands: dict[str, Callable[..., None]] = {"place": place, "lose": lose, "sum": large_sums}
    rank = Rank()
    rank.start()
    commands[command](rank, *words)


if __name__ == "__main__":
    main(*sys.argv[1:])
