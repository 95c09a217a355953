"""Fixtures of the tests that run under mpirun: `mpirun -np 4 python -m pytest --with-mpi tests/mpi`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))  # ranks.py

from mpi_job import MODES, MpiRank, join


@pytest.fixture(scope="module", params=MODES, ids=str)
def rank(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """This process as a rank of a job, in each of MODES."""
    with join(request.param) as joined:
        yield joined


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """How the chosen MPI starts two ranks, for tests that start jobs of their own and are not started by mpirun."""
    if not os.environ.get("MPI4PY_LIBMPI"):
        pytest.skip("MPI4PY_LIBMPI names no MPI; `make test-mpi` runs this with several")
    return ["mpirun", "-np", "2"]
