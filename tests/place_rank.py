"""A rank that needs no torch: joins the job and writes its place, and a sum over all ranks, to ``FOLDER/rank.N``.

Usage: place_rank.py FOLDER [COUNT]: the sum is of COUNT numbers, by default 100000, on each rank its number plus one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from plain_rank import Rank


def main() -> None:
    """Does it."""
    rank = Rank()
    rank.start()
    job = rank.job
    place = {
        "size": job.size,
        "local": [job.local_rank, job.local_size],
        "cross": [job.cross_rank, job.cross_size],
        "host": os.uname().nodename,
        "mpi": job.mpi.library.split()[0] if job.mpi else "",
        "sum": rank.allreduce("x", int(sys.argv[2]) if len(sys.argv) > 2 else 100_000),
    }
    draft = Path(sys.argv[1]) / f"draft.{job.rank}"
    draft.write_text(json.dumps(place))
    draft.rename(draft.with_name(f"rank.{job.rank}"))
    rank.close()


if __name__ == "__main__":
    main()
