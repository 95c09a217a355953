"""An MPI through mpi4py, started by its mpirun. Its environment has mpi4py and numpy, and no torch."""

from __future__ import annotations

import platform

import mpi4py
import numpy as np
from mpi4py import MPI

from libraries import Exchange, check_place


class Opened:
    kind = "mpi"
    module = MPI

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        del exchange
        self._world = MPI.COMM_WORLD
        check_place((self._world.Get_rank(), self._world.Get_size()), rank, size)
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        self._world.Barrier()

    def versions(self) -> dict[str, str]:
        # "Open MPI v5.0.11, package: ..." or "MPICH Version:      5.0.2\nMPICH Release date: ..."
        library = MPI.Get_library_version().splitlines()[0].partition(",")[0]
        return {
            "mpi": " ".join(library.replace("Version:", "").split()),
            "mpi4py": mpi4py.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }

    def close(self) -> None:
        """mpi4py finalizes at exit."""
