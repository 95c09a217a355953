"""Who is to blame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.config.hosts import ranges
from horo.runner.agent.rank_reports import Note
from horo.runner.job.report import Ending, awaited, exit_code, report, root_cause

LOST = b"Traceback ...\nhoro.errors.PeerLostError: allreduce 'w': rank %d (h2) is gone\n"


def test_the_first_failure_in_time_is_the_cause() -> None:
    endings = [Ending(3, "h"), Ending(1, "h", code=7), Ending(0, "h", code=1), Ending(2, "h", signal=15, asked=True)]
    assert root_cause(endings) == endings[1]


def test_a_rank_that_died_of_a_lost_peer_points_at_the_cause() -> None:
    endings = [
        Ending(0, "h1", code=1, stderr_tail=LOST % 2),
        Ending(2, "h2", signal=9),
        Ending(1, "h1", signal=15, asked=True),
    ]
    cause = root_cause(endings)
    assert cause == endings[1]
    assert exit_code(cause) == 137


def test_a_lost_peer_that_ended_because_it_was_told_to_is_not_the_cause() -> None:
    endings = [Ending(0, "h1", code=1, stderr_tail=LOST % 2), Ending(2, "h2", signal=15, asked=True)]
    assert root_cause(endings) == endings[0]


def test_a_host_that_was_lost_is_the_cause_even_when_that_is_detected_later() -> None:
    endings = [
        Ending(0, "h1", code=1, stderr_tail=LOST % 2),
        Ending(2, "h2", lost="ssh ended with code 255", asked=True),
    ]
    cause = root_cause(endings)
    assert cause == endings[1]
    assert exit_code(cause) == 69


def test_what_a_rank_says_counts_more_than_its_last_words() -> None:
    endings = [
        Ending(0, "h1", code=1, stderr_tail=LOST % 3, note=Note(error="PeerLostError: x", points_at=2)),
        Ending(3, "h2", code=4),
        Ending(2, "h2", code=5, stderr_tail=LOST % 0, note=Note(error="ValueError: y")),
    ]
    assert root_cause(endings) == endings[2]


def test_a_rank_that_said_its_own_error_is_the_cause_although_it_was_told_to_end() -> None:
    late = Ending(1, "h", signal=15, asked=True, note=Note(error="ValueError: bad sample", where="train.py, line 7"))
    endings = [Ending(0, "h", code=3, note=Note(points_at=1)), late]
    assert root_cause(endings) == late
    assert exit_code(late) == 1
    assert report(late, endings) == (
        b"hororun: rank 1 on h ended with ValueError: bad sample (train.py, line 7; killed by SIGTERM when asked to "
        b"end); the job was ended\nhororun: the others: rank 0 exited with code 3\n"
    )


def test_a_rank_that_has_ended_well_but_too_early_is_named_first() -> None:
    words = "rank 1 (h) came to the end of its script after 30 steps, while rank 0 is in step 31: use drop_last"
    waits = Ending(0, "h", code=1, note=Note(error=f"AbortedError: {words}", where="train.py, line 7", points_at=1))
    endings = [Ending(1, "h"), waits]
    assert root_cause(endings) == waits
    cause, others = report(waits, endings).decode().splitlines()
    end = "so rank 0 on h ended with AbortedError (train.py, line 7; exited with code 1); the job was ended"
    assert cause == f"hororun: {words}; {end}"
    assert others == "hororun: the others: rank 1 exited with code 0"


@pytest.mark.parametrize(("status", "code"), [(75, 75), (255, 255), (0, 1)])
def test_a_rank_that_did_not_come_to_the_end_of_its_exit_has_its_code(status: int, code: int) -> None:
    note = Note(error="SystemExit: something", status=status)
    assert exit_code(Ending(1, "h", signal=15, asked=True, note=note)) == code
    assert exit_code(Ending(1, "h", signal=10, passed_on=True, note=note)) == code
    assert exit_code(Ending(1, "h", signal=10, note=note)) == 138
    assert exit_code(Ending(1, "h", signal=10, passed_on=True)) == 138


def test_the_rank_that_the_first_failure_points_at_is_awaited_until_its_end_is_known() -> None:
    first, second = Ending(0, "h", code=1, stderr_tail=LOST % 1), Ending(1, "h", code=1, note=Note(points_at=2))
    assert awaited([], {}) is None
    assert awaited([Ending(0, "h", code=1)], {}) is None
    assert awaited([first], {}) == 1
    assert awaited([first], {1: Note(joined=True)}) == 1
    assert awaited([first], {1: Note(error="KeyError: 3")}) is None
    assert awaited([first], {1: Note(error="PeerLostError: rank 2", points_at=2)}) == 2
    assert awaited([first, second], {}) == 2
    assert awaited([first, second, Ending(2, "h")], {}) is None
    assert awaited([first, Ending(1, "h", code=1, note=Note(points_at=0))], {}) is None


def test_without_a_failure_there_is_no_cause() -> None:
    assert root_cause([Ending(0, "h"), Ending(1, "h", signal=15, asked=True)]) is None


def test_the_report_names_rank_host_end_and_last_words_then_the_others() -> None:
    cause = Ending(2, "h2", signal=11, stderr_tail=b"".join(b"line %d\r\n" % n for n in range(30)) + b"\xff end\n\n")
    others = [Ending(5, "h2"), Ending(0, "h1", signal=15, asked=True), Ending(1, "h1", signal=15, asked=True)]
    text = report(cause, [cause, *others])
    lines = text.split(b"\n")
    assert lines[0] == b"hororun: rank 2 on h2 was killed by SIGSEGV; the job was ended"
    assert b"  | line 11" in lines
    assert b"  | line 10" not in lines
    assert b"  | \xff end" in lines
    assert lines[-2] == b"hororun: the others: ranks 0-1 killed by SIGTERM when asked to end; rank 5 exited with code 0"


@given(st.sets(st.integers(0, 50), min_size=1))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    named: list[int] = []
    for part in ranges(sorted(numbers)).split(","):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


@pytest.mark.parametrize(("ending", "code"), [(Ending(0, "h", code=3), 3), (Ending(0, "h", signal=9), 137)])
def test_the_exit_code_is_that_of_the_rank(ending: Ending, code: int) -> None:
    assert exit_code(ending) == code
