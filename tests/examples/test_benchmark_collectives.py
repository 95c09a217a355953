"""The benchmark of the other collectives runs, and checks every element of every result."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from example_runs import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = ("reducescatter", "alltoall", "allgather", "broadcast")

sys.path.insert(0, str(FOLDER))
import sizes  # noqa: E402  (benchmarks/sizes.py)
from workloads.collectives import Job  # noqa: E402  (benchmarks/workloads/collectives.py)


def results_of(operation: str, jobs: list[Job], given: list[np.ndarray]) -> list[np.ndarray]:
    """What each rank gets, from what all give, by the definition of the operation."""
    if operation == "broadcast":
        return [given[0].copy() for _ in jobs]
    if operation == "allgather":
        return [np.concatenate(given) for _ in jobs]
    if operation == "reducescatter":
        return np.split(np.sum(given, axis=0), len(jobs))
    return [np.concatenate([np.split(array, len(jobs))[job.rank] for array in given]) for job in jobs]


@pytest.mark.parametrize("operation", NAMES)
@pytest.mark.parametrize(("ranks", "part"), [(2, 1), (2, 500), (3, 4), (4, 10)])
def test_every_element_of_a_result_is_compared(operation: str, ranks: int, part: int) -> None:
    jobs = [Job(operation, rank, ranks, part * ranks) for rank in range(ranks)]
    given = [np.zeros(job.given) for job in jobs]
    for job, array in zip(jobs, given, strict=True):
        job.fill(array)
    for job, result in zip(jobs, results_of(operation, jobs, given), strict=True):
        assert result.size == job.received
        assert job.count_wrong(result) == 0
        result[-1] += 1
        assert job.count_wrong(result) == 1
        assert job.count_wrong(np.zeros(job.received)) == job.received


def test_sizes_are_those_of_equal_parts() -> None:
    operation = sizes.OPERATIONS["alltoall"]
    cases = sizes.make_cases(sizes.sizes_of(4, 64, 2), "float32", 4, operation)
    assert [case.parameters["count"] for case in cases] == [4, 8, 16]


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"), [("alltoall", 4, 0.75), ("broadcast", 4, 1.0), ("broadcast", 1, 0.0)]
)
def test_rates_follow_the_formulas(operation: str, ranks: int, factor: float) -> None:
    rates = sizes.Rates.of(4_000_000, ranks, 2000.0, sizes.OPERATIONS[operation])
    assert (rates.algbw, rates.busbw) == (pytest.approx(2.0), pytest.approx(2.0 * factor))
