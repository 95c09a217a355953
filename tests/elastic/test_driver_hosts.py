"""The driver of elastic jobs on several hosts, which are lost, found and not found any more, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from drivers import A2_B2, Driver, found, killed, of, running, waits, within

from horo.bootstrap.generations import Change
from horo.runner.elastic.driver import deadline_s
from horo.runner.elastic.state import (
    Announce,
    Committed,
    Connect,
    Disconnect,
    Dismiss,
    Done,
    Ended,
    Fail,
    Finish,
    HostLost,
    HostsFound,
    HostUp,
    Kill,
    Leave,
    Phase,
    Reach,
    Ready,
    Slot,
    StartWorker,
    Tick,
    Waits,
    WriteSeats,
)

# Begin


def test_only_hosts_that_are_needed_get_agents() -> None:
    driver = Driver(3, hosts={"a": 2, "b": 2, "c": 2}, is_reached=False)
    assert driver.actions == [Connect("a"), Connect("b")]
    assert driver.on(HostUp("b", 0)) == []
    actions = driver.on(HostUp("a", 0))
    assert [action.slot for action in actions] == [Slot("a", 0), Slot("a", 1), Slot("b", 0)]


def test_a_host_without_a_number_of_slots_reports_it() -> None:
    driver = Driver(2, hosts={"a": 0}, is_reached=False)
    assert len(of(StartWorker, driver.on(HostUp("a", 8)))) == 2
    assert driver.state.hosts["a"].slots == 8


def test_a_host_that_cannot_be_reached_is_made_up_for_by_others() -> None:
    driver = Driver(2, hosts={"a": 2, "b": 2}, is_reached=False)
    assert driver.on(HostLost("a", "cannot be reached")) == [Connect("b")]
    assert driver.words.startswith("a cannot be reached; it is tried again after ")
    assert [action.slot.host for action in driver.on(HostUp("b", 0))] == ["b", "b"]


def test_hosts_that_are_not_reached_do_not_end_a_job_that_has_enough_slots() -> None:
    driver = Driver(4, 2, hosts=A2_B2, is_reached=False)
    driver.on(HostUp("b", 0))
    assert len(driver.on(HostLost("a", "cannot be reached"))) == 2
    assert driver.on(Ready(0), Ready(1)) == [WriteSeats(1, (0, 1))]


def test_without_enough_slots_a_job_on_fixed_hosts_ends() -> None:
    driver = Driver(4, 3, hosts=A2_B2, is_reached=False)
    driver.on(HostUp("b", 0))
    (finish,) = driver.on(HostLost("a", "cannot be reached"))
    assert finish == Finish("2 slots for ranks, of at least 3 (--min-np)", 69)


def test_where_hosts_are_discovered_others_are_awaited() -> None:
    driver = Driver(4, 3, hosts={"a": 2}, script="s", elastic_timeout_s=500.0)
    assert driver.phase is Phase.CONNECTING
    while driver.phase is Phase.CONNECTING:
        actions = driver.tick()
    assert driver.now_s == 600.0 and "within 500 s (--elastic-timeout)" in actions[0].reason and actions[0].code == 75


def test_a_job_may_begin_without_any_host() -> None:
    driver = Driver(2, hosts={"a": 2}, script="s", is_reached=False)
    driver.on(HostsFound(()))
    assert driver.on(found(b=2)) == [Connect("b")]
    assert len(driver.on(HostUp("b", 0))) == 2


def test_a_host_that_does_not_answer_is_given_up() -> None:
    driver = Driver(2, hosts=A2_B2, is_reached=False)
    assert driver.tick() == [Disconnect("a"), Connect("b")]
    assert driver.on(HostUp("a", 0)) == []  # too late
    assert driver.state.hosts["a"].reach is Reach.AWAY


# Lost hosts


def test_the_others_go_on_when_a_host_is_lost() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(*waits(1, 2, 3, culprit=0))
    assert driver.phase is Phase.GATHERING
    actions = driver.on(HostLost("a", "is silent"))
    assert actions == [WriteSeats(2, (2, 3))]
    assert driver.words.startswith("a is silent; it is tried again after ")


def test_a_lost_host_is_reached_again_after_its_cooldown() -> None:
    driver = running(4, hosts=A2_B2, cooldown_s=(10.0, 100.0))
    driver.on(HostLost("a", "is silent"), *waits(1, 2, 3, culprit=0), *within(2, 2, 3))
    pauses = []
    for _ in range(6):
        before_s = driver.now_s
        assert driver.tick() == [Connect("a")]
        pauses.append(driver.now_s - before_s)
        driver.on(HostLost("a", "cannot be reached"))
    assert all(10 * 2**count <= pause <= 10 * 2**count + 10 for count, pause in enumerate(pauses[:3]))
    assert pauses[-2:] == [100.0, 100.0]
    assert driver.tick() == [Connect("a")]
    assert [action.slot.host for action in of(StartWorker, driver.on(HostUp("a", 0)))] == ["a", "a"]


def test_a_job_whose_hosts_are_all_lost_ends() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(HostLost("a", "is silent"))
    (finish,) = driver.on(HostLost("b", "is silent"))
    assert isinstance(finish, Finish)


def test_commits_of_a_lost_host_are_lost() -> None:
    driver = running(2, 2, hosts={"a": 1, "b": 1})
    driver.on(Committed(0, 8, True), Committed(1, 7, True), HostLost("a", "is silent"), killed(1))
    assert "no rank is left: others go on from commit 7" in driver.words
    assert driver.phase is Phase.SHORT


def test_a_lost_host_whose_training_is_over_ends_the_job() -> None:
    driver = running(2, hosts={"a": 1, "b": 1})
    driver.on(Done(0, 1), Done(1, 1), HostLost("a", "is silent"))
    assert driver.on(Ended(1, False)) == [Finish()]


def test_ranks_of_a_host_follow_each_other() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(killed(1), *waits(1, 0, 2, 3, culprit=1), *within(2, 0, 2, 3), Ready(4))
    assert driver.on(*waits(2, 0, 2, 3)) == [WriteSeats(3, (0, 4, 2, 3))]


def test_rank_0_is_the_oldest_with_the_state() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(HostLost("a", "is silent"), *waits(1, 2, 3, culprit=0), *within(2, 2, 3))
    driver.tick()
    driver.on(HostUp("a", 0), Ready(4), Ready(5))
    assert driver.on(*waits(2, 2, 3)) == [WriteSeats(3, (2, 3, 4, 5))]


# Discovery


def grown(**limits: Any) -> Driver:
    """Two ranks on a, and a host b with two newcomers that wait."""
    driver = running(2, 1, 4, {"a": 2}, script="s", **limits)
    assert driver.on(found(a=2, b=2)) == [Connect("b")]
    assert driver.words == "b was found"
    assert [action.slot for action in driver.on(HostUp("b", 0))] == [Slot("b", 0), Slot("b", 1)]
    return driver


def test_ranks_come_with_a_host() -> None:
    driver = grown()
    assert driver.on(Ready(2)) == [Announce(1, 1, Change(added=True))]
    assert driver.on(Ready(3)) == []
    assert driver.on(*waits(1, 0, 1)) == [WriteSeats(2, (0, 1, 2, 3))]


def test_now_ranks_are_interrupted_when_newcomers_are_started() -> None:
    driver = running(2, 1, 4, {"a": 2}, script="s", join="now")
    driver.on(found(a=2, b=2))
    assert of(Announce, driver.on(HostUp("b", 0))) == [Announce(1, 1, Change(added=True))]
    assert driver.on(*waits(1, 0, 1)) == []
    assert driver.on(Ready(2)) == []
    assert driver.on(Ready(3)) == [WriteSeats(2, (0, 1, 2, 3))]


def test_newcomers_that_do_not_come_are_not_awaited_for_long() -> None:
    driver = running(2, 1, 4, {"a": 2}, script="s", join="now")
    driver.on(found(a=2, b=2), HostUp("b", 0), *waits(1, 0, 1), Ready(2))
    before_s = driver.now_s
    while driver.phase is Phase.GATHERING:
        actions = driver.tick()
    assert actions == [WriteSeats(2, (0, 1, 2))] and driver.now_s == before_s + 60.0


def test_replacements_are_not_awaited() -> None:
    driver = running(2, join="now")
    assert driver.on(killed(0), *waits(1, 1, culprit=0))[-1] == WriteSeats(2, (1,))
    assert driver.on(*within(2, 1)) == []


def test_a_host_that_is_not_found_any_more_loses_its_ranks_in_order() -> None:
    driver = running(4, hosts=A2_B2, script="s")
    assert driver.on(found(a=2)) == [Announce(1, 1, Change(removed=True))]
    assert driver.words == "b is not found any more: its workers leave"
    assert driver.on(*waits(1, 0, 1, 2, 3)) == [WriteSeats(2, (0, 1))]
    assert driver.on(*within(2, 0, 1)) == [Dismiss(2), Dismiss(3)]
    driver.on(Ended(2, True))
    assert driver.on(Ended(3, True)) == [Disconnect("b")]
    assert "b" not in driver.state.hosts and driver.phase is Phase.RUNNING


def test_a_change_that_is_undone_is_withdrawn() -> None:
    driver = running(4, hosts=A2_B2, script="s")
    driver.on(found(a=2))
    assert driver.on(found(a=2, b=2)) == [Announce(1, 2, Change())]
    assert driver.words == "b was found"


def test_fewer_slots_are_fewer_ranks() -> None:
    driver = running(4, hosts=A2_B2, script="s")
    assert driver.on(found(a=2, b=1)) == [Announce(1, 1, Change(removed=True))]
    assert driver.on(*waits(1, 0, 1, 2, 3)) == [WriteSeats(2, (0, 1, 2))]
    assert driver.on(*within(2, 0, 1, 2)) == [Dismiss(3)]
    assert driver.on(Ended(3, True)) == []  # the host stays


def test_ranks_stay_until_their_replacements_are_ready_if_too_few_were_left() -> None:
    driver = running(4, 4, hosts=A2_B2, script="s")
    assert driver.on(found(a=2, c=2)) == [Connect("c")]
    driver.on(HostUp("c", 0))
    assert driver.on(Ready(4)) == []
    assert driver.on(Ready(5)) == [Announce(1, 1, Change(added=True, removed=True))]
    assert driver.on(*waits(1, 0, 1, 2, 3)) == [WriteSeats(2, (0, 1, 4, 5))]


def test_one_rank_of_a_host_that_goes_gives_the_state_to_the_next_ones() -> None:
    driver = running(2, 2, hosts={"a": 2}, script="s")
    driver.on(found(b=2), HostUp("b", 0), Ready(2), Ready(3), *waits(1, 0, 1))
    assert driver.state.members == (0, 2)
    driver.on(*within(2, 0, 2))
    assert driver.on(Committed(2, 5)) == [Announce(2, 2, Change(added=True, removed=True)), Dismiss(1)]
    driver.on(*waits(2, 0, 2))
    assert driver.state.members == (2, 3)
    assert driver.on(*within(3, 2, 3), Ended(0, True), Ended(1, True)) == [Dismiss(0), Disconnect("a")]


def test_others_leave_a_generation_with_workers_that_cannot_be_reached_and_may_answer_them() -> None:
    driver = running(3, hosts={"a": 1, "b": 2})
    assert driver.on(HostLost("b", "is lost")) == [Announce(1, 1, Change(removed=True))]
    assert driver.on(Waits(0, 1, None, has_state=True)) == [WriteSeats(2, (0,))]


def test_ranks_leave_a_host_even_if_nobody_takes_over() -> None:
    driver = running(2, hosts={"a": 2}, script="s")
    assert driver.on(found()) == [Announce(1, 1, Change(removed=True))]
    assert driver.on(*waits(1, 0, 1)) == []
    assert driver.phase is Phase.SHORT
    assert driver.on(found(a=2)) == [WriteSeats(2, (0, 1))]


def test_newcomers_on_a_host_that_is_not_found_any_more_end() -> None:
    driver = grown()
    driver.on(Ready(2))
    assert driver.on(found(a=2)) == [Announce(1, 2, Change()), Dismiss(2), Dismiss(3)]


def test_a_host_that_is_being_reached_is_let_go_at_once() -> None:
    driver = running(2, 1, 4, {"a": 2}, script="s")
    driver.on(found(a=2, b=2))
    assert driver.on(found(a=2)) == [Disconnect("b")]


# Failures


def test_a_host_on_which_three_workers_fail_is_left_alone() -> None:
    driver = running(2, hosts={"a": 2, "b": 1}, cooldown_s=(50.0, 100.0))
    driver.on(killed(1), *waits(1, 0, culprit=1), *within(2, 0))
    assert of(StartWorker, driver.on(killed(2), after_s=100.0))
    assert driver.on(killed(3), after_s=100.0) == [Connect("b")]
    assert driver.words.splitlines()[1].startswith("3 workers have failed on a: it gets no other one for ")
    assert [action.slot.host for action in driver.on(HostUp("b", 0))] == ["b"]


def test_on_one_host_workers_start_again_however_often_they_fail() -> None:
    driver = running(2, cooldown_s=(50.0, 100.0))
    driver.on(killed(0), *waits(1, 1, culprit=0), *within(2, 1))
    for worker in range(2, 8):
        assert of(StartWorker, driver.on(killed(worker), after_s=100.0))
    assert driver.state.hosts["h"].cooldowns == 0


def test_a_host_is_left_alone_at_the_first_failure_if_the_user_wants_that() -> None:
    driver = running(4, hosts=A2_B2, on_failure="host")
    assert driver.on(killed(0)) == [Dismiss(1)]
    assert "a worker has failed on a: it gets no other one for " in driver.words
    driver.on(*waits(1, 2, 3, culprit=0))
    assert driver.on(Ended(1, True)) == [WriteSeats(2, (2, 3))]
    assert driver.state.hosts["a"].cooldowns == 1


def test_but_not_the_only_one() -> None:
    driver = running(2, on_failure="host")
    assert driver.on(killed(0)) == [StartWorker(2, Slot("h", 0), 2, 1, 2)]


# Leaving


def test_all_leave_by_a_change() -> None:
    driver = running(2)
    assert driver.on(Leave(None, 30.0)) == [Announce(1, 1, Change(leave=True))]
    assert driver.words == "the job has to end within 30 s"
    driver.on(Ended(0, False))
    assert driver.on(Ended(1, False)) == [Finish()]


def test_nobody_is_started_when_all_have_to_leave() -> None:
    driver = running(2)
    driver.on(Leave(None, 30.0))
    assert driver.on(killed(0)) == []
    assert driver.on(*waits(1, 1, culprit=0)) == [Finish("", 0)]


def test_the_job_ends_when_the_time_to_leave_is_over() -> None:
    driver = running(2)
    driver.on(Leave(None, 30.0))
    assert deadline_s(driver.state) == driver.now_s + 30.0
    assert driver.tick() == [Finish("the time to leave is over, and workers 0, 1 still run", 143)]


def test_ranks_that_have_kept_their_commit_in_time_may_still_be_about_to_end() -> None:
    driver = running(2)
    driver.on(Leave(None, 60.0), Done(0, 1, is_kept=True))
    assert driver.on(Tick(), after_s=59.0) == []  # 1 may still write the file
    driver.on(Done(1, 1, is_kept=True))
    assert driver.tick() == [Finish("", 0)]


def test_ranks_that_have_not_done_so_are_named() -> None:
    driver = running(2)
    driver.on(Leave(None, 30.0), Done(0, 1, is_kept=True))
    assert driver.tick() == [Finish("the time to leave is over, and worker 1 still runs", 143)]


def test_so_are_ranks_that_still_save_what_they_have_trained() -> None:
    driver = running(2)
    driver.on(Done(0, 1), Leave(None, 30.0), Done(1, 1))
    assert driver.tick() == [Finish("the time to leave is over, and workers 0, 1 still run", 143)]


def test_ranks_that_are_about_to_begin_leave_their_host_at_once() -> None:
    driver = Driver(4, hosts=A2_B2)
    assert driver.on(Leave("b", 30.0)) == [Dismiss(2), Dismiss(3)]
    assert driver.on(Ended(2, False), Ended(3, True)) == [Disconnect("b")]
    assert driver.on(Ready(0), Ready(1)) == [WriteSeats(1, (0, 1))]


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_that_has_not_begun_ends_at_once(size: int) -> None:
    assert Driver(size).on(Leave(None, 30.0)) == [Finish("", 143)]


def test_ranks_of_a_host_leave_it_in_time() -> None:
    driver = running(4, hosts=A2_B2)
    assert driver.on(Leave("b", 30.0)) == [Announce(1, 1, Change(removed=True))]
    driver.on(*waits(1, 0, 1, 2), after_s=1.0)
    assert driver.tick() == [Kill(2), Kill(3), WriteSeats(2, (0, 1))]  # the host may be gone by now
    assert driver.now_s == 130.0
    assert driver.on(killed(2), killed(3)) == [Disconnect("b")]
    assert driver.state.hosts["b"].free_s > driver.now_s


def test_the_only_host_takes_the_job_with_it() -> None:
    driver = running(2, keeps=True)
    assert driver.on(Leave("h", 30.0, "SIGTERM")) == [Announce(1, 1, Change(leave=True))]
    assert driver.words == "the job has to end within 30 s (SIGTERM)"


def test_where_no_commit_is_kept_the_end_of_the_last_host_is_that_of_the_job() -> None:
    driver = running(4, hosts=A2_B2)
    driver.on(Leave("a", 30.0))
    (finish,) = driver.on(Leave("b", 30.0, "SIGTERM has come to its agent"))
    assert finish.code == 143
    assert finish.reason.startswith("the last host, b, has to end (SIGTERM has come to its agent); with --elastic-dir")


def test_a_host_that_has_left_is_not_used_again_soon() -> None:
    driver = running(4, hosts=A2_B2, cooldown_s=(10.0, 300.0))
    driver.on(Leave("b", 30.0), *waits(1, 0, 1, 2, 3), *within(2, 0, 1))
    assert driver.on(Ended(2, True)) == [] and driver.on(Ended(3, True)) == [Disconnect("b")]
    assert driver.tick() == [Connect("b")]
    assert driver.now_s == 400.0


def test_others_make_room_for_the_slot_with_the_latest_commit_when_its_host_is_found_again() -> None:
    driver = running(2, hosts=A2_B2, script="s")
    driver.on(Committed(0, 9, True), Committed(1, 7, True), killed(1), killed(0))
    assert driver.phase is Phase.SHORT and driver.state.workers.keys() == {2, 3}
    assert driver.state.workers[3].slot == Slot("a", 0)
    driver.on(found(b=2), HostUp("b", 0), killed(3), Ready(2), Ready(4), Ready(5))
    made_room = driver.on(found(a=2, b=2), after_s=2.0)
    assert made_room == [Dismiss(5), Dismiss(4), StartWorker(6, Slot("a", 0), 2, 3, 4)]
    assert driver.on(Ended(5, False), Ended(4, False), Ready(6)) == [WriteSeats(2, (2, 6))]


def test_nobody_makes_room_while_one_with_the_latest_commit_is_about_to_come() -> None:
    driver = running(3, hosts={"h": 8})
    driver.on(*(Committed(worker, 9, True) for worker in range(3)))
    driver.on(killed(0), killed(3), killed(1), killed(5), killed(2))
    assert {each.number: each.slot.number for each in driver.state.workers.values()} == {4: 3, 6: 4, 7: 2}
    assert driver.on(Ready(4), after_s=9.0) == []
    assert driver.on(Ready(6), Ready(7)) == [WriteSeats(2, (4, 6, 7))]


def test_a_generation_of_which_all_were_sent_away_before_they_were_in_it_is_no_more() -> None:
    driver = running(2, 1, 3, hosts={"b": 1, "a": 2}, script="s", on_failure="host")
    driver.on(found(a=2), *waits(1, 0, 1))
    assert driver.state.members == (1,)
    assert driver.on(found(a=2, b=1), killed(2)) == [Dismiss(1)]
    ended = Ended(1, True, "was killed by SIGTERM")
    assert driver.on(ended) == [Fail(2, "worker 1 (rank 0) on a was killed by SIGTERM"), WriteSeats(3, (0,))]
