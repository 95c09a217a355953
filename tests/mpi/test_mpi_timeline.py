"""Timelines of a job whose data goes by MPI: strictly valid, and their phases have the names of the documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_answers import adasum_rows, adasums
from mpi_job import MpiRank
from trace_events import parse_timeline, rows_of

pytestmark = pytest.mark.mpi(min_size=2)


def test_an_adasum_has_its_phases_on_each_rank(rank: MpiRank, tmp_path: Path) -> None:
    """The ranks' own files: all have what they have done together."""
    path = tmp_path / f"timeline-{rank.rank}.json"
    rank.context.start_timeline(str(path))
    rank.barrier("begun")
    adasums(rank)
    rank.context.stop_timeline()
    rows = rows_of(parse_timeline(path))
    expected = adasum_rows("MPI", levels=(rank.size - 1).bit_length())
    assert {name: rows[name] for name in expected} == expected
