"""The driver of elastic jobs and hosts that do not answer: others go on, not beside those that may still train."""

from __future__ import annotations

from drivers import A2_B2, Driver, found, killed, of, running, waits, within

from horo.bootstrap.generations import Change
from horo.runner.elastic.driver import lost_s
from horo.runner.elastic.state import (
    Announce,
    Committed,
    Connect,
    Disconnect,
    Fail,
    HostLost,
    HostUp,
    Kill,
    Phase,
    Ready,
    Standing,
    Tick,
    WriteSeats,
)


def test_ranks_that_may_still_run_are_waited_for_if_no_member_has_left() -> None:
    driver = running(2, hosts=A2_B2)
    assert driver.state.workers[0].slot.host == "a"
    driver.on(Committed(0, 7, True), Committed(1, 7, True), Ready(2))
    assert not of(WriteSeats, driver.on(HostLost("a", "is silent", 5.0)))
    assert driver.phase is Phase.GATHERING
    driver.on(Tick(), after_s=4.9)
    assert driver.phase is Phase.GATHERING and driver.state.workers[0].standing is Standing.ADRIFT
    driver.on(Tick(), after_s=0.2)
    assert driver.phase is Phase.OVER  # its commits were there


def test_others_train_on_with_ranks_of_a_host_that_does_not_answer_until_their_commit() -> None:
    driver = running(4, hosts=A2_B2, elastic_timeout_s=500.0)
    assert driver.on(HostLost("a", "is silent")) == [Announce(1, 1, Change(removed=True))]
    assert driver.on(Tick(), after_s=400.0) == []  # no agent, which would end them; nobody is killed
    assert driver.on(waits(1, 2)[0]) == [Connect("a")]
    assert lost_s(driver.state) == 0.0
    assert driver.on(waits(1, 3)[0]) == [WriteSeats(2, (2, 3))]


def test_but_not_for_ever() -> None:
    driver = running(4, hosts=A2_B2, elastic_timeout_s=500.0)
    driver.on(HostLost("a", "is silent"))
    assert driver.tick() == [] and driver.tick() == [Kill(2), Kill(3)]
    assert driver.now_s == 600.0


def test_once_one_has_left_the_others_have_the_usual_time() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(HostLost("a", "is silent"))
    driver.on(waits(1, 2)[0], after_s=100.0)
    assert driver.on(Tick(), after_s=29.0) == []
    assert of(Kill, driver.on(Tick(), after_s=1.0)) == [Kill(3)]


def test_they_are_not_waited_for_if_another_member_has_left() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(HostLost("a", "is silent", 5.0), *waits(1, 2, culprit=0))
    assert driver.on(*waits(1, 3, culprit=0)) == [WriteSeats(2, (2, 3))]
    assert driver.on(*waits(1, 0), Committed(0, 9)) == []  # what they report is of no account any more


def test_nobody_begins_anew_beside_a_generation_that_may_train_on_where_no_agent_answers() -> None:
    driver = Driver(2, hosts={"a": 1, "b": 1}, is_reached=False, elastic_timeout_s=500.0)
    driver.on(HostUp("a", 1), HostLost("b", "cannot be reached"), Ready(0))
    assert driver.tick() == [Connect("b")]
    driver.on(HostUp("b", 1), Ready(1))
    assert driver.on(HostLost("a", "is silent", None)) == [
        Announce(1, 1, Change(removed=True)),
        Fail(1, "worker 0 (rank 0) on a was lost: its host is silent"),
    ]
    assert "may still train on a: new ranks wait until a answers, for at most 500 s" in driver.words
    assert driver.phase is Phase.SHORT
    assert driver.tick() == [Connect("a")]
    assert of(WriteSeats, driver.on(HostUp("a", 1))) == [WriteSeats(2, (1,))]  # its agent has ended worker 0


def one_alone_with_an_older_commit_elsewhere() -> Driver:
    """Worker 1 is the only one; the commit of worker 0, before its own, is in the memory of another host."""
    driver = running(2, hosts={"a": 1, "b": 1}, elastic_timeout_s=500.0)
    driver.on(Committed(0, 7, True), Committed(1, 7, True), killed(0), *waits(1, 1, culprit=0), *within(2, 1))
    driver.on(Committed(1, 9, True))
    return driver


def test_nobody_goes_on_from_an_older_commit_either() -> None:
    driver = one_alone_with_an_older_commit_elsewhere()
    assert driver.on(HostLost("b", "is silent", None), Ready(2)) == [Announce(2, 1, Change(removed=True))]
    begin_s = driver.now_s
    while driver.phase is Phase.SHORT:
        actions = driver.tick()
    assert actions == [WriteSeats(3, (2,))] and driver.now_s == begin_s + 500.0


def test_unless_the_generation_is_known_to_have_ended() -> None:
    driver = one_alone_with_an_older_commit_elsewhere()
    assert driver.on(HostLost("b", "is lost", 0.0), Ready(2))[-1] == WriteSeats(3, (2,))


def all_on_a_silent_host() -> Driver:
    """Worker 1, alone in its generation, has been on b, which does not answer; worker 2 could begin anew on a."""
    driver = one_alone_with_an_older_commit_elsewhere()
    driver.on(HostLost("b", "is silent", None), Ready(2))
    assert driver.phase is Phase.SHORT
    return driver


def test_a_silent_host_that_is_not_found_any_more_is_reached_once_to_end_what_may_train_there() -> None:
    driver = all_on_a_silent_host()
    assert driver.on(found(a=1)) == [Connect("b")]
    assert driver.words == "b is not found any more: what may still run there is ended, if it answers"
    assert driver.on(HostUp("b", 1)) == [Disconnect("b"), WriteSeats(3, (2,))]


def test_if_it_does_not_answer_then_the_others_begin_without_it() -> None:
    driver = all_on_a_silent_host()
    driver.on(found(a=1))
    assert driver.on(HostLost("b", "cannot be reached")) == [WriteSeats(3, (2,))]
    assert driver.words == "b cannot be reached"


def test_nor_is_it_awaited_for_longer_than_a_start() -> None:
    driver = all_on_a_silent_host()
    driver.on(found(a=1), after_s=1.0)
    while driver.phase is Phase.SHORT:
        actions = driver.tick()
    assert actions == [Disconnect("b"), WriteSeats(3, (2,))]
    assert driver.now_s == 161.0


def test_a_host_that_is_not_found_any_more_and_does_not_answer_holds_nobody_up() -> None:
    driver = running(4, hosts=A2_B2, script="s")
    driver.on(found(a=2), *waits(1, 0, 1))
    assert driver.tick() == [Kill(2), Kill(3), WriteSeats(2, (0, 1))]
    assert driver.now_s == 105.0
    driver.on(*within(2, 0, 1))
    assert driver.on(HostLost("b", "is silent", None)) == []
    assert driver.phase is Phase.RUNNING


def test_but_those_on_it_are_awaited_if_they_alone_have_the_state() -> None:
    driver = running(2, hosts={"a": 1, "b": 1}, script="s")
    driver.on(killed(0), *waits(1, 1, culprit=0), *within(2, 1), Committed(1, 5))
    driver.on(found(a=1), Ready(2))
    assert driver.on(Tick(), after_s=29.0) == [] and driver.phase is Phase.RUNNING
    assert driver.on(*waits(2, 1)) == [WriteSeats(3, (1, 2))]
