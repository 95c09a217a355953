"""The driver of elastic jobs: every row of its table, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from drivers import Driver, killed, running

from horo.bootstrap.generations import Change
from horo.runner.elastic.driver import deadline_s, lost_s
from horo.runner.elastic.state import (
    Announce,
    Committed,
    Dismiss,
    Done,
    Ended,
    Fail,
    Finish,
    Generation,
    Kill,
    Phase,
    Ready,
    Slot,
    Standing,
    StartWorker,
    Tick,
    Waits,
    Within,
    WriteSeats,
)

LOST = Finish("no rank is left that has the state of the training")


def test_a_job_starts_as_many_workers_as_it_has_ranks() -> None:
    driver = Driver(2, max_size=4)
    assert driver.actions == [StartWorker(0, Slot("h", 0), 1, 0, 2), StartWorker(1, Slot("h", 1), 1, 1, 2)]
    assert driver.phase is Phase.STARTING


def test_the_first_generation_is_seated_when_all_have_come() -> None:
    driver = Driver(2)
    assert driver.on(Ready(1)) == []
    assert driver.on(Ready(0)) == [WriteSeats(1, (0, 1))]
    assert driver.phase is Phase.FORMING
    driver.on(Within(0, 1))
    assert driver.phase is Phase.FORMING
    assert driver.on(Within(1, 1)) == []
    assert driver.phase is Phase.RUNNING
    assert driver.state.history == (Generation(1, (0, 1)),)


def test_enough_first_workers_are_seated_when_time_is_up() -> None:
    driver = Driver(3, min_size=2)
    driver.on(Ready(0), Ready(2))
    assert driver.tick() == [WriteSeats(1, (0, 2))]


def test_too_few_first_workers_end_the_job_when_time_is_up() -> None:
    driver = Driver(3, min_size=2)
    driver.on(Ready(0))
    (finish,) = driver.tick()
    assert (
        finish.code == 75
        and "1 rank of 3 called init() within 60 s (--start-timeout), of at least 2 (--min-np)" in finish.reason
    )


def test_first_workers_that_all_fail_end_the_job() -> None:
    driver = Driver(2)
    assert driver.on(killed(0)) == []
    assert driver.on(killed(1)) == [Finish()]


def test_a_first_worker_that_fails_is_replaced_when_another_one_has_come() -> None:
    driver = Driver(2)
    assert driver.on(killed(0)) == []
    assert driver.on(Ready(1)) == [StartWorker(2, Slot("h", 0), 1, 1, 2)]
    assert driver.on(Ready(2)) == [WriteSeats(1, (1, 2))]


def test_programs_without_init_may_all_end_well() -> None:
    driver = Driver(2)
    assert driver.on(Ended(0, False)) == []
    assert driver.on(Ended(1, False)) == [Finish()]


def test_a_member_that_ends_before_it_is_within_fails_the_generation() -> None:
    driver = Driver(3)
    driver.on(*(Ready(worker) for worker in range(3)), Within(1, 1))
    actions = driver.on(killed(0))
    assert isinstance(actions[0], Fail) and actions[0].generation == 1
    assert driver.phase is Phase.GATHERING
    actions = driver.on(Waits(1, 1, None, True), Waits(2, 1, None, True))
    assert actions == [WriteSeats(2, (1, 2))]


def test_a_generation_that_does_not_form_is_given_up_and_who_does_not_leave_it_is_killed() -> None:
    driver = Driver(3)
    driver.on(Ready(0), Ready(1), Ready(2), Within(0, 1))
    (fail,) = driver.tick()
    assert isinstance(fail, Fail)
    driver.on(Waits(0, 1, None, True), Waits(2, 1), after_s=1.0)  # 2 has only waited for 1
    assert driver.tick() == [Kill(1)]
    assert driver.now_s == pytest.approx(170.0)
    assert WriteSeats(2, (0, 2)) in driver.on(killed(1))


def test_a_worker_that_fails_is_replaced_and_the_others_go_on() -> None:
    driver = running(3)
    assert driver.on(killed(0)) == [StartWorker(3, Slot("h", 0), 2, 2, 3)]
    assert "worker 0 (rank 0) was killed by SIGKILL" in driver.words
    assert driver.on(Waits(1, 1, 0, True)) == []
    assert driver.on(Waits(2, 1, 0, True)) == [WriteSeats(2, (1, 2))]
    driver.on(Within(1, 2), Within(2, 2), after_s=0.5)
    assert driver.phase is Phase.RUNNING
    assert lost_s(driver.state) == 0.5


def test_the_most_steps_that_a_survivor_has_lost_are_those_of_the_generation() -> None:
    driver = running(3)
    driver.on(killed(0), Waits(1, 1, 0, True, steps_lost=4), Waits(2, 1, 0, True, steps_lost=5))
    driver.on(Within(1, 2), Within(2, 2), killed(1), Waits(2, 2, 1, True), Within(2, 3))
    assert [each.steps_lost for each in driver.state.history] == [None, 5, None]


def test_a_newcomer_is_announced_and_seated_once_members_have_left() -> None:
    driver = running(3)
    driver.on(killed(0), Waits(1, 1, 0, True), Waits(2, 1, 0, True), Within(1, 2), Within(2, 2))
    assert driver.on(Ready(3)) == [Announce(2, 1, Change(True))]
    assert driver.phase is Phase.RUNNING
    assert driver.on(Waits(2, 2, None, True)) == []
    assert driver.on(Waits(1, 2, None, True)) == [WriteSeats(3, (1, 2, 3))]


def test_an_announcement_is_withdrawn_when_the_newcomer_ends() -> None:
    driver = running(3)
    driver.on(killed(0), Waits(1, 1, 0, True), Waits(2, 1, 0, True), Within(1, 2), Within(2, 2), Ready(3))
    assert Announce(2, 2, Change(False)) in driver.on(killed(3))


def test_a_newcomer_waits_while_all_seats_are_taken() -> None:
    driver = running(2, max_size=3)
    driver.on(killed(0), Waits(1, 1, 0, True))
    assert driver.state.generation == 2
    driver.on(Within(1, 2))
    newcomers = sorted(set(driver.state.workers) - {1})
    assert len(newcomers) == 2
    driver.on(*(Ready(worker) for worker in newcomers))
    driver.on(Waits(1, 2, None, True))
    assert driver.state.members == (1, *newcomers)


def test_slots_beyond_the_first_ranks_are_filled_while_the_job_runs() -> None:
    driver = Driver(2, max_size=3)
    driver.on(Ready(0), Ready(1))
    assert StartWorker(2, Slot("h", 2), 2, 2, 3) in driver.actions


def test_the_oldest_worker_with_state_has_rank_0() -> None:
    driver = running(2)
    driver.on(killed(0), Waits(1, 1, None, True), Within(1, 2), Ready(2), Waits(1, 2, None, True))
    assert driver.state.members == (1, 2)
    driver.on(Within(1, 3), Within(2, 3), killed(1))
    assert driver.on(Waits(2, 3, 1, True)) == [WriteSeats(4, (2,))]


def test_a_job_whose_state_is_lost_ends() -> None:
    driver = running(2)
    driver.on(killed(0), Ready(2))
    assert driver.on(killed(1)) == [LOST]


def test_a_worker_that_has_not_synced_has_no_state() -> None:
    driver = running(2)
    driver.on(killed(0), Waits(1, 1, 0, True), Within(1, 2), Ready(2), Waits(1, 2, None, True), Within(1, 3))
    driver.on(Within(2, 3), killed(1))
    assert driver.on(Waits(2, 3, 1, False)) == [LOST]


def test_too_few_ranks_wait_for_replacements() -> None:
    driver = running(3, min_size=3)
    driver.on(killed(0), Waits(1, 1, 0, True))
    assert driver.on(Waits(2, 1, 0, True)) == []
    assert driver.phase is Phase.SHORT
    assert driver.on(Ready(3)) == [WriteSeats(2, (1, 2, 3))]


def test_too_few_ranks_end_the_job_when_time_is_up() -> None:
    driver = running(3, min_size=3, elastic_timeout_s=5.0)
    driver.on(killed(0), Waits(1, 1, 0, True), Waits(2, 1, 0, True))
    (finish,) = driver.tick()
    assert (finish.code, driver.phase) == (75, Phase.OVER)
    assert "2 ranks within 5 s (--elastic-timeout), of at least 3 (--min-np)" in finish.reason


def test_a_worker_named_as_hung_is_killed_unless_it_leaves() -> None:
    driver = running(3)
    driver.on(Waits(0, 1, 2, True), Waits(1, 1, 2, True))
    assert driver.phase is Phase.GATHERING
    assert driver.tick() == [Kill(2)]
    assert driver.on(Tick(), after_s=1.0) == []
    assert WriteSeats(2, (0, 1)) in driver.on(killed(2))


def test_a_worker_that_an_exception_ends_has_time_for_its_exit_handlers() -> None:
    driver = running(3)
    driver.on(Waits(0, 1, 2, True, culprit_s=5.0), Waits(1, 1, 2, True, culprit_s=5.0))
    begin_s = driver.now_s
    assert driver.tick() == [Kill(2)]
    assert driver.now_s == pytest.approx(begin_s + 5.0)


def test_a_worker_named_as_hung_that_leaves_is_seated_again() -> None:
    driver = running(3)
    driver.on(Waits(0, 1, 2, True), Waits(1, 1, 2, True))
    assert driver.on(Waits(2, 1, None, True)) == [WriteSeats(2, (0, 1, 2))]


def test_a_member_that_does_not_leave_is_killed_when_time_is_up() -> None:
    driver = running(2)
    driver.on(Waits(0, 1, None, True))
    assert driver.tick() == [Kill(1)]
    assert driver.now_s == pytest.approx(130.0)


@pytest.mark.parametrize("event", [Within(1, 1), Waits(1, 1, 2, True), Ready(1), Ready(2), Within(9, 2)])
def test_stale_events_change_nothing(event: Any) -> None:
    driver = running(3)
    driver.on(killed(0), Waits(1, 1, 0, True), Waits(2, 1, 0, True), Within(1, 2), Within(2, 2))
    before = driver.state
    assert driver.on(event) == []
    assert driver.state == before


def test_a_generation_from_the_future_changes_nothing() -> None:
    driver = running(3)
    assert driver.on(Waits(1, 2, None, True), Within(1, 2)) == []
    assert driver.phase is Phase.RUNNING


def test_a_slot_that_fails_again_and_again_waits_ever_longer() -> None:
    driver = running(2)
    driver.on(killed(0), Waits(1, 1, 0, True), Within(1, 2))
    pauses = []
    for worker in range(2, 12):
        assert not driver.on(killed(worker))
        before_s = driver.now_s
        (start,) = driver.tick()
        assert start.worker == worker + 1
        pauses.append(driver.now_s - before_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]


def test_a_slot_that_is_free_is_used_instead_of_one_that_waits() -> None:
    driver = running(2, hosts={"h": 3})
    driver.on(killed(0), Waits(1, 1, 0, True), Within(1, 2))
    assert driver.on(killed(2)) == [StartWorker(3, Slot("h", 2), 3, 1, 2)]


def test_the_reset_limit_ends_the_job() -> None:
    driver = running(3, reset_limit=1)
    driver.on(killed(0), Waits(1, 1, 0, True), Waits(2, 1, 0, True), Within(1, 2), Within(2, 2))
    assert driver.on(Ready(3)) == []  # to seat it would be the second one
    driver.on(killed(1))
    (finish,) = driver.on(Waits(2, 2, 1, True))
    assert "placed anew any more (--reset-limit 1)" in finish.reason


def test_the_job_ends_well_when_all_members_have() -> None:
    driver = running(2)
    assert driver.on(Ended(0, False)) == []
    assert driver.phase is Phase.FINISHING
    assert driver.on(Ended(1, False)) == [Finish()]


def test_nobody_is_started_or_seated_once_a_member_has_ended_well() -> None:
    driver = running(3)
    driver.on(Ended(0, False))
    assert driver.on(killed(1)) == []
    assert driver.on(Ended(2, False)) == [Finish()]


def test_newcomers_are_dismissed_once_a_member_has_ended_well() -> None:
    driver = running(2)
    driver.on(killed(0), Waits(1, 1, 0, True), Within(1, 2))
    assert driver.on(Ended(1, False)) == [Dismiss(2)]
    assert driver.on(killed(2)) == [Finish()]


def test_a_member_that_has_work_left_ends_the_job_with_an_error() -> None:
    driver = running(2)
    driver.on(Ended(0, False))
    (finish,) = driver.on(Waits(1, 1, 0, True))
    assert finish.code == 1 and "worker 1 has work left" in finish.reason


def test_nothing_comes_after_the_end() -> None:
    driver = Driver(1)
    driver.on(killed(0))
    assert driver.phase is Phase.OVER
    assert driver.on(Ready(0), Tick(), killed(0)) == []
    assert deadline_s(driver.state) is None


def test_a_step_leaves_the_state_before_it_as_it_was() -> None:
    driver = running(2)
    before = driver.state
    workers = dict(before.workers)
    driver.on(killed(0))
    assert before.workers == workers and before.phase is Phase.RUNNING
    assert workers[0].standing is Standing.WITHIN


def test_a_commit_in_training_only_enters_its_number() -> None:
    driver = running(2)
    due_s, now_s = deadline_s(driver.state), driver.state.now_s
    assert driver.on(Committed(0, 3, True), after_s=1.0) == []
    assert (deadline_s(driver.state), driver.state.now_s) == (due_s, now_s)
    assert (driver.state.kept, driver.state.committed) == ({Slot("h", 0): 3}, 3)


def all_killed(number: int, *, is_kept: bool = True) -> Driver:
    """Two workers with a commit of that number have died."""
    driver = running(2, min_size=2)
    driver.on(Committed(0, number, is_kept), Committed(1, number, is_kept))
    driver.on(killed(0))
    driver.on(killed(1))
    return driver


def test_a_job_whose_ranks_all_die_goes_on_from_the_memory_of_their_slots() -> None:
    driver = all_killed(7)
    assert driver.phase is Phase.SHORT
    assert driver.on(Ready(2)) == []
    assert driver.on(Ready(3)) == [WriteSeats(2, (2, 3))]


def test_without_such_a_memory_it_ends() -> None:
    assert all_killed(7, is_kept=False).phase is Phase.OVER


def test_a_job_whose_ranks_all_die_again_without_a_commit_in_between_ends() -> None:
    driver = all_killed(7)
    driver.on(Ready(2), Ready(3), Within(2, 2), Within(3, 2), Committed(2, 7, True), Committed(3, 7, True))
    driver.on(killed(2))
    driver.on(killed(3))
    assert driver.phase is Phase.OVER


def test_it_goes_on_again_after_a_commit() -> None:
    driver = all_killed(7)
    driver.on(Ready(2), Ready(3), Within(2, 2), Within(3, 2), Committed(2, 8, True))
    driver.on(killed(2))
    driver.on(killed(3))
    assert driver.phase is Phase.SHORT


def test_a_newcomer_without_the_state_is_not_seated_alone() -> None:
    driver = running(2, max_size=3)
    driver.on(Committed(0, 7, True), Ready(2), killed(0), killed(1))
    assert "no rank is left: others go on from commit 7" in driver.words
    assert driver.phase is Phase.SHORT
    assert driver.state.workers[3].slot == Slot("h", 0)
    assert driver.on(Ready(3)) == [WriteSeats(2, (2, 3))]


def behind(**limits: Any) -> Driver:
    """The slot of worker 1 has an older commit than that of worker 0; no worker is left."""
    driver = running(2, **limits)
    driver.on(Committed(0, 7, True), Committed(1, 7, True), killed(1), Waits(0, 1, 1, True), Within(0, 2))
    driver.on(Committed(0, 90, True), killed(0))
    assert driver.phase is Phase.SHORT and "others go on from commit 90" in driver.words
    return driver


def test_workers_with_an_older_commit_wait_for_the_one_with_the_latest() -> None:
    driver = behind()
    assert driver.on(Ready(2)) == []
    assert driver.on(Ready(3)) == [WriteSeats(3, (2, 3))]


def test_they_go_on_in_the_end_if_it_does_not_come() -> None:
    driver = behind()
    assert driver.on(Ready(2)) == []
    assert driver.tick() == [WriteSeats(3, (2,))]
    assert driver.words == "the slot with commit 90 has no worker: others go on from commit 7"
    assert driver.on(Within(2, 3), Committed(2, 8, True), killed(2))[0] == StartWorker(4, Slot("h", 1), 4, 1, 2)
    assert driver.phase is Phase.SHORT
    assert driver.on(Ready(4)) == [WriteSeats(4, (4,))]


def test_a_worker_whose_training_is_over_is_not_killed_when_another_fails_after_it() -> None:
    driver = running(2)
    driver.on(Done(0, 1), Done(1, 1))
    assert driver.on(killed(1)) == []
    assert driver.phase is Phase.FINISHING
    assert driver.on(Ended(0, False)) == [Finish()]


def test_a_worker_whose_training_is_over_has_its_time_while_others_wait() -> None:
    driver = running(3)
    driver.on(Done(0, 1), killed(2), Waits(1, 1, 2, True))
    assert driver.on(Tick(), after_s=100.0) == []
    *_, finish = driver.on(Ended(0, False))
    assert "worker 1 has work left" in finish.reason


def test_a_worker_that_does_not_come_to_the_end_of_a_training_is_killed() -> None:
    driver = running(2)
    driver.on(Done(0, 1))
    assert driver.tick() == [Kill(1)]
    assert driver.now_s == 130.0
    driver.on(killed(1))
    assert driver.on(Ended(0, False)) == [Finish()]


def test_a_worker_may_save_for_long_when_another_has_ended_within_its_training() -> None:
    driver = running(2)
    assert driver.on(Ended(0, False)) == []
    assert driver.on(Tick(), after_s=1000.0) == []
    assert driver.on(Ended(1, False)) == [Finish()]


def test_a_worker_in_the_next_training_may_wait_for_one_that_still_evaluates_the_one_before() -> None:
    driver = running(3)
    driver.on(Done(0, 1), Within(0, 1), Done(1, 1), Within(1, 1), Done(2, 1))
    assert driver.on(Tick(), after_s=1000.0) == []
    driver.on(Within(2, 1), Done(0, 1), Done(2, 1))
    assert driver.tick() == [Kill(1)]


def test_another_training_may_begin_after_one() -> None:
    driver = running(2)
    driver.on(Done(0, 1), Done(1, 1), Within(0, 1), Within(1, 1), killed(1))
    assert driver.phase is Phase.GATHERING
    assert driver.on(Waits(0, 1, 1, True)) == [WriteSeats(2, (0,))]


def test_those_whose_end_is_awaited_are_named_after_1_2_4_minutes() -> None:
    driver = running(3)
    driver.on(Ended(0, False))
    assert driver.tick() == []
    assert driver.now_s == 160.0
    assert driver.words == (
        "worker 1 (rank 1) and worker 2 (rank 2) still run, 60 s after another one has ended: hororun waits without a "
        "limit, since ranks may save or evaluate for long; kill one that hangs, or end the job with Ctrl-C"
    )
    driver.on(Tick(), after_s=1.0)
    assert driver.words == ""
    times = []
    for _ in range(3):
        driver.tick()
        assert "still run" in driver.words
        times.append(driver.now_s)
    assert times == [220.0, 340.0, 580.0]
