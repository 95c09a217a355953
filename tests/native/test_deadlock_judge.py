"""Rank 0's judgement of ranks that are blocked, by itself: what it says of given reports, and in random jobs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import pytest
import wire_oracle as oracle

NONE, OPEN, ASK, DEADLOCK = range(4)
INTERNAL = -60

QUESTION = "has a rank fewer batches, or has it skipped a backward() or step()?"


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
) -> bytes:
    lanes = [oracle.lane(0, size, executed, hashes)]
    return oracle.blocked_message(rank, text.encode(), others.encode(), lanes, question)


def blocked_as(rank: int, text: str, hashed: int, size: int) -> Callable[[int], bytes]:
    """The report of a rank that waits, by the number of the question that it answers."""
    return lambda question: blocked(rank, text, [hashed], size=size, question=question)


def confirmed(judge: Judge, reports: Sequence[Callable[[int], bytes]]) -> tuple[int, str]:
    """The verdict when all ranks have reported, and answered as before."""
    for report in reports:
        judge.note(report(0))
    assert judge.verdict() == (ASK, "")
    for report in reports:
        judge.note(report(judge.question()))
    return judge.verdict()


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
    ],
)
def test_what_may_finish_is_no_deadlock(judges: list[Judge], messages: list[bytes]) -> None:
    for message in messages:
        judges[0].note(message)
    assert judges[0].verdict() == (NONE, "")


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
    verdict, text = confirmed(judge, [blocked_as(rank, f"'{'n' * 200}{rank}'", rank + 1, 40) for rank in range(40)])
    judge.close()
    assert verdict == DEADLOCK
    assert text.endswith(f", others for something else; {QUESTION}")


def test_a_rank_that_there_is_not_is_refused(judges: list[Judge]) -> None:
    assert judges[0].note(blocked(2, "'a'", [1])) == INTERNAL


class Job:
    """A job of ranks with one thread each: programs, a log per team, and reports that take any time to arrive.

    Signal handlers run on top of waits for any time, and some submit something when they end. None begins once its rank
    has answered the question, before which nobody can know of it.
    """

    def __init__(
        self, judge: Judge, rng: random.Random, programs: list[list[tuple[int, int]]], teams: list[list[int]]
    ) -> None:
        self.judge, self.rng, self.programs, self.teams = judge, rng, programs, teams
        size = len(programs)
        self.at = [0] * size
        self.pending: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.waits: list[tuple[int, int] | None] = [None] * size
        self.logs: list[list[tuple[int, int]]] = [[] for _ in teams]
        self.executed = [[0] * len(teams) for _ in range(size)]
        self.mail: list[deque[bytes]] = [deque() for _ in range(size)]
        self.has_reported = [False] * size
        self.in_handler = [False] * size
        self.asked = [0] * size
        """The question that has arrived at a rank; 0: none."""
        self.answered = [0] * size

    def step(self, rank: int) -> bool:
        """One thing that this rank does, if it can; whether its program has gone on."""
        kind = self.rng.randrange(6)
        if kind >= 4:
            if kind == 4:
                self.asked[rank] = self.judge.question()
            else:
                self.handle(rank)
            return False
        if kind < 2:
            return self.go_on(rank) if kind == 0 else self.execute(rank)
        if kind == 2:
            self.report(rank)
        elif self.mail[rank]:
            self.judge.note(self.mail[rank].popleft())
        return False

    def go_on(self, rank: int) -> bool:
        """Submits the next request of its program, or begins to wait for one of those that it has submitted."""
        if self.waits[rank] is not None or self.in_handler[rank]:
            return False
        has_more = self.at[rank] < len(self.programs[rank])
        if self.pending[rank] and (not has_more or len(self.pending[rank]) > 2 or self.rng.random() < 0.5):
            self.waits[rank] = self.rng.choice(self.pending[rank])
            return True
        if not has_more:
            return False
        self.submit(rank)
        return True

    def submit(self, rank: int) -> None:
        """The next request of its program."""
        if self.has_reported[rank]:
            self.mail[rank].append(oracle.blocked_message(rank, b"", b"", []))
            self.has_reported[rank] = False
        team, name = self.programs[rank][self.at[rank]]
        self.at[rank] += 1
        self.pending[rank].append((team, name))
        if all((team, name) in self.pending[member] for member in self.teams[team]):
            self.logs[team].append((team, name))

    def handle(self, rank: int) -> None:
        """A handler begins on top of a wait, or ends."""
        if self.in_handler[rank]:
            self.in_handler[rank] = False
            if self.at[rank] < len(self.programs[rank]) and self.rng.random() < 0.5:
                self.submit(rank)
        elif self.waits[rank] is not None and self.rng.random() < 0.3:
            question = self.judge.question()
            self.in_handler[rank] = question == 0 or self.answered[rank] != question

    def execute(self, rank: int) -> bool:
        for team, log in enumerate(self.logs):
            done = self.executed[rank][team]
            if rank in self.teams[team] and done < len(log):
                self.executed[rank][team] += 1
                self.pending[rank].remove(log[done])
                if self.waits[rank] == log[done]:
                    self.waits[rank] = None
                return True
        return False

    def report(self, rank: int) -> None:
        if self.waits[rank] is None or self.in_handler[rank]:
            return
        self.has_reported[rank], self.answered[rank] = True, self.asked[rank]
        lanes = [
            oracle.lane(
                team, len(members), self.executed[rank][team], [name + 1 for t, name in self.pending[rank] if t == team]
            )
            for team, members in enumerate(self.teams)
            if rank in members
        ]
        text = str(self.waits[rank]).encode()
        self.mail[rank].append(oracle.blocked_message(rank, text, b"", lanes, self.asked[rank]))

    def is_stuck(self) -> bool:
        """Whether nobody can ever get what it waits for, as one who sees everything knows: no record is left to execute
        and no handler runs.
        """
        return not any(self.in_handler) and None not in self.waits and self.has_executed_all()

    def has_executed_all(self) -> bool:
        return all(
            self.executed[rank][team] == len(self.logs[team])
            for team, members in enumerate(self.teams)
            for rank in members
        )

    def settle(self) -> None:
        """Everybody goes on as far as possible, says that it waits, and all of that arrives."""
        ranks = range(len(self.programs))
        self.in_handler = [False] * len(ranks)
        while any(self.go_on(rank) or self.execute(rank) for rank in ranks):
            pass
        for _ in range(2):
            for rank in ranks:
                self.asked[rank] = self.judge.question()
                self.report(rank)
                while self.mail[rank]:
                    self.judge.note(self.mail[rank].popleft())
            if self.judge.verdict()[0] != ASK:
                break


@pytest.mark.parametrize("teams", [[[0, 1, 2]], [[0, 1, 2], [0, 1], [1, 2], [0, 2]]], ids=["one team", "four teams"])
def test_in_random_jobs_a_verdict_is_true_and_a_deadlock_is_found(native: ModuleType, teams: list[list[int]]) -> None:
    """With reports that arrive at any time later, and programs that lack a request here or there."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    found = 0
    for _ in range(300):
        plan = [rng.randrange(len(teams)) for _ in range(6)]
        programs = [[(team, i) for i, team in enumerate(plan) if rank in teams[team]] for rank in range(3)]
        if rng.random() < 0.7:
            victim = rng.choice([program for program in programs if program])
            del victim[rng.randrange(len(victim))]
        judge = Judge(native, 3)
        job = Job(judge, rng, programs, teams)
        for _ in range(200):
            job.step(rng.randrange(3))
            assert judge.verdict()[0] != DEADLOCK or job.is_stuck(), seed
        job.settle()
        assert judge.verdict()[0] == (DEADLOCK if job.is_stuck() else NONE), seed
        found += job.is_stuck()
        judge.close()
    assert found > 10, seed


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
def test_a_rank_that_has_joined_has_submitted_every_name(
    judges: list[Judge], submitted: list[list[int]], can_finish: bool
) -> None:
    """Beside rank 3, which has joined."""
    reports = [*submitted, [ALL_NAMES, JOIN]]
    for rank, hashes in enumerate(reports):
        judges[1].note(blocked(rank, f"'{rank}'", hashes, size=4))
    assert judges[1].verdict() == ((NONE, "") if can_finish else (ASK, ""))
