"""A rank that needs no torch and sums with the others until one of them, RANK, is killed; -1: none is.

Usage: lost_rank.py RANK [FOLDER]. The others end with the error that they get, and write it to ``FOLDER/error.N``
before: launchers lose some of what a rank prints last.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from plain_rank import Rank

from horo.errors import HoroError


def main() -> None:
    """Does it."""
    rank = Rank()
    rank.start()
    rank.allreduce("before")
    if rank.job.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            rank.allreduce("after")
    except HoroError as error:
        for folder in sys.argv[2:]:
            Path(folder, f"error.{rank.job.rank}").write_text(str(error))
        raise


if __name__ == "__main__":
    main()
