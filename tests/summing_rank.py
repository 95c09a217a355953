"""A rank that needs no torch and makes large sums with the others for ever.

Usage: summing_rank.py FOLDER. It writes its pid to ``FOLDER/pid.N``, N its rank, and how many sums it has made to
``FOLDER/sums.N``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from plain_rank import Rank

_COUNT = 8 << 20
"""Numbers of four bytes: far more than the buffers of a connection hold."""


def main() -> None:
    """Does it."""
    rank = Rank()
    number, _ = rank.start()
    folder = Path(sys.argv[1])
    (folder / f"pid.{number}").write_text(str(os.getpid()))
    sums = 0
    while True:
        rank.allreduce("large", _COUNT)
        sums += 1
        (folder / f"sums.{number}").write_text(str(sums))


if __name__ == "__main__":
    main()
