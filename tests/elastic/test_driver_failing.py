"""The driver of elastic jobs and scripts that fail again and again: they are not tried for ever."""

from __future__ import annotations

from typing import Any

import pytest
from drivers import Driver, killed, of, running, waits, within

from horo.runner.elastic.state import Committed, Ended, Finish, Phase, Ready, Waits, Within

ALIKE = [f"ValueError: shard {number} (train.py, line 7)" for number in range(4)]


def failed(*errors: str, commits: int = 1) -> Driver:
    """The only rank fails after so many commits, and so do those that go on from its memory."""
    driver = running(1)
    for generation, error in enumerate(errors, 1):
        worker = max(driver.state.workers)
        driver.on(Ready(worker), Within(worker, generation), Committed(worker, generation * commits, True))
        driver.on(Ended(worker, True, f"ended with {error}", is_error=True), after_s=100.0)
    return driver


def test_a_script_that_always_fails_after_a_commit_is_not_tried_for_ever() -> None:
    assert failed(*ALIKE[:3]).phase is Phase.SHORT
    (finish,) = failed(*ALIKE).actions
    assert finish.reason == (
        "3 times in a row, ranks that went on from the last commit ended with ValueError: shard 3 (train.py, line 7), "
        "and no generation of them came further than one commit: mend the script"
    )


def test_one_that_gets_further_or_fails_otherwise_is() -> None:
    assert failed(*ALIKE, *ALIKE, commits=2).phase is Phase.SHORT
    assert failed(*["ValueError: a", "OSError: b"] * 3).phase is Phase.SHORT


def failed_beside_others(*errors: str, commits: int = 0, **limits: Any) -> Driver:
    """Ranks fail one after the other, and others are always left; they commit so often before each failure."""
    size = len(errors) + 1
    driver = running(size, **limits)
    for number, error in enumerate(errors):
        driver.on(Ended(number, True, f"ended with {error}", is_error=True))
        others, commit = range(number + 1, size), (number + 1) * commits
        driver.on(*(Waits(each, number + 1, number, True, commit=commit) for each in others))
        if driver.phase is not Phase.OVER:
            driver.on(*within(number + 2, *others))
    return driver


BATCHES = [f"ValueError: batch {number} (train.py, line 7)" for number in range(5)]


def test_a_script_that_always_fails_without_a_commit_beside_others_is_not_tried_for_ever() -> None:
    assert failed_beside_others(*BATCHES[:4]).phase is Phase.RUNNING
    (finish,) = of(Finish, failed_beside_others(*BATCHES).actions)
    assert finish.reason == (
        "5 generations in a row ended since a rank ended with ValueError: batch 4 (train.py, line 7), without a commit "
        "in between: mend the script, or set another limit with --reset-limit"
    )


@pytest.mark.parametrize("limits", [{"commits": 1}, {"reset_limit": 100}])
def test_one_that_commits_in_between_or_has_another_limit_is(limits: dict[str, int]) -> None:
    assert failed_beside_others(*BATCHES, *BATCHES, **limits).phase is Phase.RUNNING


def test_one_whose_commits_are_numbered_anew_by_another_state_is() -> None:
    driver = running(12)
    driver.on(Committed(11, 1000, True))
    for number in range(10):
        commit = 10 * (number + 1)
        driver.on(Committed(number, commit, True), Ended(number, True, f"ended with {BATCHES[0]}", is_error=True))
        others = range(number + 1, 12)
        driver.on(*(Waits(each, number + 1, number, True, commit=commit) for each in others))
        assert driver.phase is not Phase.OVER, driver.actions
        driver.on(*within(number + 2, *others))
    assert driver.phase is Phase.RUNNING


def test_generations_that_end_otherwise_in_between_do_not_count() -> None:
    assert failed_beside_others(*["ValueError: a", "OSError: b"] * 5).phase is Phase.RUNNING
    driver = failed_beside_others(*BATCHES[:4])
    driver.on(Ready(5), *waits(5, 4), *within(6, 4, 5))
    assert driver.phase is Phase.RUNNING


def test_a_kill_is_no_error_of_the_script() -> None:
    driver = failed(*ALIKE[:3])
    driver.on(Ready(3), Within(3, 4), Committed(3, 4, True), killed(3))
    assert driver.phase is Phase.SHORT
