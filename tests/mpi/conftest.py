"""Fixtures of the tests that run under mpirun: `mpirun -np 4 python -m pytest --with-mpi tests/mpi`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))  # ranks.py

from mpi_job import MODES, MpiRank, join
from mpi_jobs import MpiJobs


@pytest.fixture(scope="module", params=MODES, ids=str)
def rank(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """This process as a rank of a job, in each of MODES."""
    with join(request.param) as joined:
        yield joined


@pytest.fixture
def mpi_jobs(tmp_path: Path) -> MpiJobs:
    return MpiJobs(tmp_path)
