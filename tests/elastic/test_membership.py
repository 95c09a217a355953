"""A worker's side of an elastic job: what it reports, and how it takes its seats."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from horo.bootstrap.elastic import Change, WorkerMembership
from horo.bootstrap.generations import Seat, change_key, seat_entries, seats_of
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.server import StoreServer
from horo.config.table import LaunchVariables, read_variables
from horo.errors import AbortedError, PeerLostError, ResourceError, StalledError, UsageError

SECRET = b"s" * 32
JOB = "j"


class Job:
    """The driver's side: a store, and the pipe of worker 5."""

    def __init__(self, generation: int = 1) -> None:
        self.server = StoreServer(["127.0.0.1"], SECRET)
        endpoint = self.server.endpoints[0]
        self.store = StoreClient(*endpoint, SECRET, 10.0)
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        variables = {
            "HORO_WORKER": "5",
            "HORO_GENERATION": str(generation),
            "HORO_RANK": "2",
            "HORO_SIZE": "3",
            "HORO_LOCAL_RANK": "2",
            "HORO_LOCAL_SIZE": "3",
            "HORO_STORE": str(endpoint),
            "HORO_SECRET": SECRET.hex(),
            "HORO_JOB_ID": JOB,
            "HORO_END_PIPE": f"{self.write_fd}:{os.fstat(self.write_fd).st_ino}",
        }
        self.member = WorkerMembership(read_variables(LaunchVariables, variables))

    def seat(self, number: int, generation: int, workers: list[int]) -> None:
        for key, value in seat_entries(JOB, generation, workers, [0] * len(workers), [number] * len(workers)):
            self.store.set(key, value)

    def reports(self) -> list[dict[str, Any]]:
        try:
            data = os.read(self.read_fd, 65536)
        except BlockingIOError:
            return []
        return [json.loads(line)["elastic"] for line in data.splitlines()]

    def close(self) -> None:
        self.store.close()
        self.server.close()
        os.close(self.read_fd)
        os.close(self.write_fd)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_a_worker_reports_takes_its_seat_and_enters_the_generation(job: Job) -> None:
    launches = []

    def begin() -> None:
        launches.append(job.member.launch())
        job.member.joined()

    job.member.begin_with(begin, lambda: None)
    job.seat(1, 4, [3, 5])
    job.member.join()
    (launch,) = launches
    assert (launch.rank, launch.size, launch.generation, launch.local, launch.ranks) == (1, 2, 4, (1, 2), (3, 5))
    assert job.reports() == [{"ready": True}, {"within": 4}]
    assert job.member.has_joined
    job.member.join()  # nothing
    assert job.reports() == []


def test_a_generation_that_fails_is_left_and_the_next_seat_taken(job: Job) -> None:
    def begin() -> None:
        if job.member.launch().generation == 1:
            raise PeerLostError("init() was given up because another rank failed: rank 0 (h) died")
        job.member.joined()

    job.member.begin_with(begin, lambda: None)
    job.seat(1, 1, [3, 5])
    job.seat(2, 2, [5, 6])
    job.member.join()
    waits = {"waits": 1, "culprit": 3, "commit": None, "steps": 0}
    assert job.reports() == [{"ready": True}, waits, {**waits, "ready": True}, {"within": 2}]


def test_an_error_that_is_no_fault_of_the_group_comes_out_of_join(job: Job) -> None:
    def begin() -> None:
        raise ResourceError("no memory")

    job.member.begin_with(begin, lambda: None)
    job.seat(1, 1, [5])
    with pytest.raises(ResourceError):
        job.member.join()
    assert not job.member.has_joined


@pytest.mark.parametrize(
    ("error", "culprit"),
    [
        (StalledError("rank 1 (h) did not submit x"), 7),
        (AbortedError("rank 1 (h) has shut horo down"), None),  # it waits as well, and does not hang
        (PeerLostError("rank 9 (h) was lost"), None),  # no rank of this generation
        (None, None),
    ],
)
def test_leave_names_the_worker_that_the_error_names(job: Job, error: Exception | None, culprit: int | None) -> None:
    ended = []
    job.member.begin_with(job.member.joined, lambda: ended.append(True))
    job.seat(1, 1, [5, 7])
    job.member.join()
    job.member.committed(3)
    job.reports()
    job.member.leave(error, 4)
    assert ended == [True]
    assert job.reports() == [{"waits": 1, "culprit": culprit, "commit": 3, "steps": 4}]
    assert not job.member.has_joined


def test_the_last_change_of_the_generation_counts(job: Job) -> None:
    assert job.member.change() is None
    job.member.begin_with(job.member.joined, lambda: None)
    job.seat(1, 2, [5])
    job.member.join()
    assert job.member.change() is None
    job.store.set(change_key(JOB, 2, 1), Change(added=True).encode())
    assert _until(job, Change(added=True))
    job.store.set(change_key(JOB, 2, 2), Change().encode())  # the newcomer is gone again
    assert _until(job, None)
    job.store.set(change_key(JOB, 2, 3), Change(removed=True).encode())
    assert _until(job, Change(removed=True))
    job.seat(2, 3, [5])
    job.member.leave(None)
    job.member.join()
    assert job.member.change() is None


def _until(job: Job, expected: Change | None) -> bool:
    for _ in range(1000):
        if job.member.change() == expected:
            return True
        job.store.add("turns", 1)  # the store has answered earlier requests by then
    return False


def test_commits_are_reported_once_per_second(job: Job) -> None:
    for number in range(1, 50):
        job.member.committed(number)
    assert job.reports()[0] == {"commit": 1}


def test_a_newcomer_has_a_forecast_and_no_seat() -> None:
    job = Job(generation=3)
    try:
        assert job.member.is_newcomer
        assert job.member.forecast == Seat(3, 2, (0, 1, 2), (2, 3), (0, 1))
        with pytest.raises(UsageError, match="no seat"):
            job.member.launch()
        with pytest.raises(UsageError, match="has not called init"):
            job.member.join()
    finally:
        job.close()


def test_seats_count_ranks_by_host() -> None:
    seats = seats_of(2, [4, 6, 9], [0, 0, 1])
    assert [seat.local for seat in seats] == [(0, 2), (1, 2), (0, 1)]
    assert [seat.cross for seat in seats] == [(0, 2), (0, 1), (1, 2)]
    assert [Seat.decode(seat.encode(), lambda _: b"[4, 6, 9]") for seat in seats] == seats
