"""The driver of elastic jobs before training: scripts that fail at once, and workers that cannot be started."""

from __future__ import annotations

from typing import Any

import pytest
from drivers import Driver, killed, running

from horo.runner.elastic.state import (
    Committed,
    Connect,
    Ended,
    Finish,
    FoundHost,
    HostsFound,
    HostUp,
    Kill,
    Phase,
    Ready,
    Refused,
    StartWorker,
    Waits,
    Within,
    WriteSeats,
)


def failed(worker: int) -> Ended:
    """The end of a worker by an exception."""
    return Ended(worker, True, "ended with ImportError: no", is_error=True)


def refused(worker: int, host: str = "h") -> Refused:
    return Refused(worker, f"command not found on {host}: 'x'", 127)


def before(course: list[Any], **limits: Any) -> Driver:
    driver = Driver(2, **limits)
    driver.on(*course)
    return driver


@pytest.mark.parametrize(
    "course",
    [
        [],
        [Ready(1)],
        [Ready(0), Ready(1)],
        [Ready(0), Ready(1), Within(0, 1), Within(1, 1)],
        [Ready(0), Ready(1), Within(0, 1), Within(1, 1), Waits(1, 1, 0)],
    ],
)
def test_an_error_before_training_ends_the_job_and_replaces_nobody(course: list[Any]) -> None:
    assert before(course).on(failed(0)) == [Finish(failed=0)]


def test_so_does_that_of_a_worker_that_has_to_be_killed_after_it() -> None:
    driver = before([Ready(0), Ready(1), Within(0, 1), Within(1, 1), Waits(1, 1, 0, culprit_s=5.0)])
    assert driver.tick() == [Kill(0)]  # its exit handlers take longer than the grace time
    assert driver.on(failed(0)) == [Finish(failed=0)]


def test_so_does_that_of_a_replacement() -> None:
    driver = before([killed(0), Ready(1)])
    assert driver.on(failed(2)) == [Finish(failed=2)]


def test_an_error_after_the_begin_of_training_does_not() -> None:
    driver = running(2)
    assert driver.on(failed(0)) == [StartWorker(2, driver.state.workers[2].slot, 2, 1, 2)]
    driver.on(failed(2))
    assert driver.phase is Phase.GATHERING


def test_a_kill_before_training_does_not() -> None:
    driver = before([Ready(0), Ready(1), Within(0, 1), Within(1, 1)])
    assert driver.on(killed(0))
    assert driver.phase is Phase.GATHERING


def test_a_slot_whose_worker_cannot_be_started_is_left_out() -> None:
    driver = Driver(3, min_size=2, hosts={"a": 2, "b": 1})
    driver.on(Ready(0))
    assert driver.on(refused(2, "b")) == []
    assert driver.on(Ready(1)) == [WriteSeats(1, (0, 1))]
    assert driver.words == "1 slot is left out: command not found on b: 'x'"
    driver.on(Within(0, 1), Within(1, 1), Committed(0), Committed(1))
    assert [action.slot.host for action in driver.tick()] == ["b"]
    assert driver.now_s == 160.0
    driver.on(refused(3, "b"))
    assert "worker 3 on b could not be started: command not found on b" in driver.words
    assert driver.phase is Phase.RUNNING


def test_slots_of_another_host_take_their_place() -> None:
    driver = Driver(2, min_size=2, hosts={"a": 1, "b": 1, "c": 1})
    assert driver.on(refused(1, "b")) == [Connect("c")]
    assert [action.slot.host for action in driver.on(HostUp("c", 0), Ready(0))] == ["c"]
    assert driver.on(Ready(2)) == [WriteSeats(1, (0, 2))]


@pytest.mark.parametrize("min_size", [1, 2])
def test_without_enough_other_slots_the_job_ends_with_one_sentence(min_size: int) -> None:
    driver = Driver(2, min_size=min_size)
    assert driver.on(refused(0)) == ([] if min_size == 1 else [Finish("command not found on h: 'x'", 127)])
    if min_size == 1:
        assert driver.words == ""
        assert driver.on(refused(1)) == [Finish("command not found on h: 'x'", 127)]


def test_other_hosts_are_awaited_where_some_may_be_found() -> None:
    driver = Driver(2, min_size=2, script="s")
    assert driver.on(refused(0), refused(1)) == []
    assert driver.phase is Phase.STARTING
    driver.on(HostsFound((FoundHost("h", 2), FoundHost("b", 2))))
    assert [action.slot.host for action in driver.on(HostUp("b", 0))] == ["b", "b"]
    assert driver.on(Ready(2), Ready(3)) == [WriteSeats(1, (2, 3))]
