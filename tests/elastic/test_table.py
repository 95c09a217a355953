"""The course of an elastic job: the table at its end, and the objects for JSON."""

from __future__ import annotations

from horo.runner.elastic.state import Generation
from horo.runner.elastic.table import courses, table


def test_who_came_and_who_went_is_beside_each_generation() -> None:
    history = [Generation(1, (0, 1, 2)), Generation(2, (0, 1), 0.21, 3), Generation(4, (0, 1, 4), 12.0)]
    failed = {2: "killed by SIGKILL", 3: "exited with code 7", 4: "exited with code 1"}
    assert table(history, failed, {}) == [
        "generation  ranks  stood still  steps lost  came  went",
        "1           3                               0-2   2 (killed by SIGKILL)",
        "2           2      0.2 s        3",
        "4           3      12.0 s                   4     4 (exited with code 1)",
        "never joined: 3 (exited with code 7)",
    ]
    first, second, last = courses(history, failed, {})
    assert first == {
        "generation": 1,
        "workers": [0, 1, 2],
        "stood_still_s": 0.0,
        "steps_lost": 0,
        "came": [0, 1, 2],
        "went": [{"worker": 2, "why": "killed by SIGKILL"}],
    }
    assert (second["steps_lost"], last["steps_lost"]) == (3, None)


def test_a_worker_of_a_host_that_was_taken_away_has_not_failed() -> None:
    lines = table([Generation(1, (0, 1)), Generation(2, (0,), 0.1)], {}, {1: "b has to end"})
    assert lines == [
        "generation  ranks  stood still  came  went",
        "1           2                   0-1   1 (b has to end)",
        "2           1      0.1 s",
    ]


def test_who_had_to_leave_the_last_generation_is_named() -> None:
    assert courses([Generation(1, (0, 1))], {}, {1: "b has to end"})[0]["went"] == [
        {"worker": 1, "why": "b has to end"}
    ]


def test_of_many_generations_the_last_are_shown() -> None:
    lines = table([Generation(number, (0,)) for number in range(1, 31)], {}, {})
    assert lines[1] == "(10 before these)"
    assert [line.split()[0] for line in lines[2:]] == [str(number) for number in range(11, 31)]
