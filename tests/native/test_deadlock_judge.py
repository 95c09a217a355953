"""Rank 0's judgement of ranks that are blocked, by itself: what it says of given reports. Random jobs: stress.py."""

from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import wire_oracle as oracle

NONE, OPEN, ASK, DEADLOCK = range(4)
INTERNAL = -60

QUESTION = "has a rank fewer batches, or has it skipped a backward() or step()?"
SENDS = "a send ends when it is received: let one rank receive first, or use isend and irecv, or batch_isend_irecv"
RECEIVES = "does one of the ranks send first, with the tag that the other receives?"


class Judge:
    """``hr_deadlock`` with plain arguments."""

    def __init__(self, native: ModuleType, size: int) -> None:
        self.lib, self.ffi = native.lib, native.ffi
        self._self = self.lib.shim_deadlock_create(size)

    def note(self, message: bytes, now_ns: int = 0) -> int:
        return int(self.lib.shim_deadlock_note(self._self, message, len(message), now_ns))

    def due_ns(self, open_ns: int = 0) -> int:
        return int(self.lib.shim_deadlock_due_ns(self._self, open_ns))

    def question(self) -> int:
        return int(self.lib.shim_deadlock_question(self._self))

    def verdict(self, text_bytes: int = 896) -> tuple[int, str]:
        text = self.ffi.new("char[]", text_bytes)
        return int(self.lib.shim_deadlock_judge(self._self, text, text_bytes)), self.ffi.string(text).decode()

    def close(self) -> None:
        self.lib.shim_deadlock_destroy(self._self)


@pytest.fixture
def judges(native: ModuleType) -> Iterator[list[Judge]]:
    """One for 2 and one for 4 ranks."""
    made = [Judge(native, 2), Judge(native, 4)]
    yield made
    for judge in made:
        judge.close()


def blocked(
    rank: int,
    text: str,
    hashes: Sequence[int],
    *,
    executed: int = 7,
    size: int = 2,
    others: str = "",
    question: int = 0,
    moves: Sequence[tuple[int, int, bool]] = (),
    ended: tuple[int, int] = (0, 0),
) -> bytes:
    lanes = [oracle.lane(0, size, executed, hashes)]
    return oracle.blocked_message(rank, text.encode(), others.encode(), lanes, question, moves=moves, ended=ended)


def test_two_ranks_that_wait_for_one_another_are_a_deadlock(judges: list[Judge]) -> None:
    judge = judges[0]
    judge.note(blocked(0, "'a' (train.py:12)", [1]), 100)
    assert judge.due_ns() == 0
    judge.note(blocked(1, "'b' (train.py:13)", [2]), 200)
    assert judge.due_ns() == 200
    assert judge.verdict() == (ASK, "")
    number = judge.question()
    judge.note(blocked(0, "'a' (train.py:12)", [1], question=number), 300)
    judge.note(blocked(0, "'a' (train.py:12)", [1], question=number), 301)
    judge.note(blocked(1, "'b' (train.py:13)", [2], question=number + 1), 302)
    assert (judge.due_ns(), judge.verdict()) == (0, (NONE, ""))
    judge.note(blocked(1, "'b' (train.py:13)", [2], question=number), 400)
    assert judge.due_ns() == 200
    expected = f"rank 0 waits for 'a' (train.py:12), rank 1 for 'b' (train.py:13); {QUESTION}"
    assert judge.verdict() == (DEADLOCK, expected)
    assert judge.due_ns() == 0  # until something changes


def test_an_answer_that_says_something_else_ends_the_question(judges: list[Judge]) -> None:
    judge = judges[0]
    judge.note(blocked(0, "'a'", [1]))
    judge.note(blocked(1, "'b'", [2]))
    assert judge.verdict() == (ASK, "")
    first = judge.question()
    judge.note(blocked(0, "'a'", [1], question=first))
    judge.note(blocked(1, "'c'", [2, 3], question=first))
    assert judge.verdict() == (ASK, "")
    second = judge.question()
    judge.note(blocked(1, "'c'", [2, 3], question=second))
    judge.note(blocked(0, "'a'", [1], question=first))
    assert (second != first, judge.verdict()) == (True, (NONE, ""))
    judge.note(blocked(0, "'a'", [1], question=second))
    assert judge.verdict()[0] == DEADLOCK


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([blocked(0, "'a'", [1]), blocked(1, "'a'", [1])], id="the same name"),
        pytest.param([blocked(0, "'a'", [1, 9]), blocked(1, "'b'", [2, 9])], id="a name that both have, too"),
        pytest.param([blocked(0, "'a'", [1]), blocked(1, "'b'", [2], executed=8)], id="one is further in the log"),
        pytest.param([blocked(0, "'a'", []), blocked(1, "'b'", [])], id="nothing is submitted"),
        pytest.param([blocked(0, "'a'", [1], size=3), blocked(1, "'b'", [2], size=3)], id="a member has not reported"),
        pytest.param([blocked(0, "'a'", [1], size=3), blocked(1, "'b'", [2])], id="different teams of a number"),
        pytest.param(
            [blocked(0, "s", [1], moves=[(1, 3, True)]), blocked(1, "r", [], moves=[(0, 4, False), (0, 3, False)])],
            id="both ends of a send",
        ),
        pytest.param(
            [blocked(0, "s", [], moves=[(1, 3, True)]), blocked(1, "r", [], moves=[(-1, 3, False)])],
            id="a send and a receive from any rank",
        ),
        pytest.param(
            [blocked(0, "s", [], moves=[(1, 3, True)], ended=(4, 0)), blocked(1, "'a'", [1], ended=(0, 5))],
            id="a receive that has ended before its send",
        ),
    ],
)
def test_what_may_finish_is_no_deadlock(judges: list[Judge], messages: list[bytes]) -> None:
    for message in messages:
        judges[0].note(message)
    assert judges[0].verdict() == (NONE, "")


@pytest.mark.parametrize(
    ("one", "other", "names", "advice"),
    [
        ([(1, 0, False)], [(0, 0, False)], [], RECEIVES),
        ([(1, 0, True)], [(0, 0, True)], [], SENDS),
        ([(1, 0, True)], [(0, 0, True)], [1], QUESTION),
        ([(1, 2, True)], [(0, 3, False)], [], RECEIVES),
        ([(1, 2, True)], [(5, 2, False)], [], RECEIVES),
        ([(7, 2, True), (-1, 2, False)], [], [], RECEIVES),
        ([(1, 2, True)], [], [1], QUESTION),
    ],
)
def test_sends_and_receives_that_do_not_meet_are_a_deadlock(
    judges: list[Judge],
    one: list[tuple[int, int, bool]],
    other: list[tuple[int, int, bool]],
    names: list[int],
    advice: str,
) -> None:
    judge = judges[0]

    def note(question: int) -> None:
        judge.note(blocked(0, "x", [], moves=one, ended=(3, 1), question=question))
        judge.note(blocked(1, "y", names, moves=other, ended=(4, 6), question=question))

    note(0)
    assert judge.verdict() == (ASK, "")
    note(judge.question())
    assert judge.verdict() == (DEADLOCK, f"rank 0 waits for x, rank 1 for y; {advice}")


def test_a_thread_that_may_submit_leaves_it_open(judges: list[Judge]) -> None:
    judge = judges[0]
    judge.note(blocked(0, "'a'", [1]))
    judge.note(blocked(1, "'b'", [2], others="thread 'Loader'"))
    expected = "rank 0 waits for 'a', rank 1 for 'b'; only thread 'Loader' of rank 1 may still submit something"
    assert judge.verdict() == (OPEN, expected)
    assert judge.due_ns(100) == 100  # until then it may go on
    assert judge.verdict() == (OPEN, expected)
    assert judge.due_ns(100) == 0
    judge.note(blocked(1, "'b'", [2], others="thread 'Loader'"), 7)  # which is nothing new
    assert judge.due_ns(100) == 0
    judge.note(blocked(1, "'b'", [2], others="thread 'Saver'"), 8)
    assert judge.due_ns(100) == 8


def test_a_long_sentence_is_cut_where_it_may_be(native: ModuleType) -> None:
    judge = Judge(native, 40)
    for question, expected in ((0, (ASK, "")), (1, (DEADLOCK, f", others for something else; {QUESTION}"))):
        for rank in range(40):
            number = judge.question() if question else 0
            judge.note(blocked(rank, f"'{'n' * 200}{rank}'", [rank + 1], size=40, question=number))
        verdict, text = judge.verdict()
        assert (verdict, text[-len(expected[1]) :] if expected[1] else text) == expected
    judge.close()


def test_a_rank_that_there_is_not_is_refused(judges: list[Judge]) -> None:
    assert judges[0].note(blocked(2, "'a'", [1])) == INTERNAL


ALL_NAMES, JOIN = 0, 9
"""The hash that stands for all names, and that of the request to join."""


@pytest.mark.parametrize(
    ("submitted", "can_finish"),
    [
        ([[1], [1], [1]], True),
        ([[1], [2], [1]], False),
        ([[1], [1], [ALL_NAMES, JOIN]], True),
        ([[1], [3], [ALL_NAMES, JOIN]], False),
        ([[1, 2], [2], [2]], True),
        ([[ALL_NAMES, JOIN], [ALL_NAMES, JOIN], [ALL_NAMES, JOIN]], True),
        ([[ALL_NAMES, JOIN, 1], [2], [ALL_NAMES, JOIN]], True),  # what the only other one has submitted
        ([[ALL_NAMES, JOIN, 1], [1], [2]], False),
    ],
)
def test_who_has_joined_has_submitted_all(judges: list[Judge], submitted: list[list[int]], can_finish: bool) -> None:
    """Beside rank 3, which has joined."""
    reports = [*submitted, [ALL_NAMES, JOIN]]
    for rank, hashes in enumerate(reports):
        judges[1].note(blocked(rank, f"'{rank}'", hashes, size=4))
    assert judges[1].verdict() == ((NONE, "") if can_finish else (ASK, ""))


@pytest.mark.timeout(60)
def test_a_judgement_of_many_names_takes_no_time_in_which_rank_0_is_silent(native: ModuleType) -> None:
    """Name by name, this would take minutes, in which nobody reads the control links."""
    size, names = 64, [*range(1, 20_001)]
    judge = Judge(native, size)
    for rank in range(size):
        judge.note(blocked(rank, "'a'", names if rank else [1 << 40], size=size))
    assert judge.verdict() == (ASK, "")
    judge.close()
