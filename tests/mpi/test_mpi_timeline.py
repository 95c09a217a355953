"""Timelines of a job whose data goes by MPI: strictly valid, and their phases have the names of the documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpi_job import MpiRank
from trace_events import parse_timeline, rows_of

from horo import _core

pytestmark = pytest.mark.mpi(min_size=2)

LEVEL = ["    ADASUM_DOT_PRODUCTS", "    ADASUM_SUM_OF_PRODUCTS", "    ADASUM_COMBINE"]


def test_an_adasum_has_its_phases_on_each_rank(rank: MpiRank, tmp_path: Path) -> None:
    """The ranks' own files: all have what they have done together."""
    path = tmp_path / f"timeline-{rank.rank}.json"
    op = _core.REDUCE_OPS["adasum"]
    rank.context.start_timeline(str(path))
    rank.barrier("begun")
    ones, one = np.ones((50, 1000), np.float32), np.ones(1, np.float16)
    rank.finish(rank.submit("allreduce", "alone", [ones], outputs=[np.empty_like(ones)], reduce_op=op))
    rank.finish(rank.submit("allreduce", "two", [ones, ones], outputs=[ones * 0, ones * 0], reduce_op=op))
    rank.finish(rank.submit("allreduce", "mixed", [ones, one], outputs=[ones * 0, one * 0], reduce_op=op))
    rank.allreduce(ones, "alone")
    rank.context.stop_timeline()
    levels = (rank.size - 1).bit_length()
    head = ["NEGOTIATE_ADASUM", "ADASUM", "  MPI_ADASUM_ALLREDUCE"]
    work = ["    ADASUM_ALLTOALL", *LEVEL * levels, "    ADASUM_ALLGATHER"]
    packed = ["    MEMCPY_IN_FUSION_BUFFER", *work, "    MEMCPY_OUT_FUSION_BUFFER"]
    rows = rows_of(parse_timeline(path))
    assert rows["alone"] == [*head, *work, "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "  MPI_ALLREDUCE"]
    assert rows["two"] == [*head, *packed]
    assert rows["mixed"] == [*head, *work, *work]
