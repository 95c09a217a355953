"""Where ranks are: what ``rank_program.py`` has written, and what it must have."""

import json
import sys
from pathlib import Path
from typing import Any

from namespaces import Cluster

PROGRAM = [str(Path(__file__).with_name("rank_program.py")), "place"]
LOSE = [sys.executable, PROGRAM[0], "lose"]
PLACE = [sys.executable, *PROGRAM]
Place = dict[str, Any]


def written(folder: Path) -> dict[int, Place]:
    """By rank, what the ranks of one job have written."""
    return {int(file.suffix[1:]): json.loads(file.read_text()) for file in folder.glob("rank.*")}


def expected(layout: str, cluster: Cluster, mpi: str = "") -> dict[int, Place]:
    """What they must have written; ``layout``: a letter per rank for its host, ``a`` for the first of the cluster.

    ``mpi``: the first word of the version of the MPI through which they have started.
    """
    size = len(layout)
    places = {}
    for rank, letter in enumerate(layout):
        local_rank = layout[:rank].count(letter)
        # hosts are numbered by their lowest rank; those with too few ranks are left out
        across = [host for host in dict.fromkeys(layout) if layout.count(host) > local_rank]
        places[rank] = {
            "size": size, "local": [local_rank, layout.count(letter)], "cross": [across.index(letter), len(across)],
            "host": cluster.hosts["ab".index(letter)].name, "mpi": mpi, "sum": [size * (size + 1) / 2] * 2,
        }  # fmt: skip
    return places
