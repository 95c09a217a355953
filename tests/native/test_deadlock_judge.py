"""Rank 0's judgement of ranks that are blocked, by itself: what it says of given reports, and in random jobs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import wire_oracle as oracle

NONE, OPEN, DEADLOCK = range(3)
INTERNAL = -60


class Judge:
    """``hr_deadlock`` with plain arguments."""

    def __init__(self, native: ModuleType, size: int) -> None:
        self.lib, self.ffi = native.lib, native.ffi
        self._self = self.lib.shim_deadlock_create(size)

    def note(self, message: bytes, now_ns: int = 0) -> int:
        return int(self.lib.shim_deadlock_note(self._self, message, len(message), now_ns))

    def due_ns(self, settle_ns: int, open_ns: int = 0) -> int:
        return int(self.lib.shim_deadlock_due_ns(self._self, settle_ns, open_ns))

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
    rank: int, text: str, hashes: Sequence[int], *, executed: int = 7, size: int = 2, others: str = ""
) -> bytes:
    return oracle.blocked_message(rank, text.encode(), others.encode(), [oracle.lane(0, size, executed, hashes)])


def test_two_ranks_that_wait_for_one_another_are_a_deadlock(judges: list[Judge]) -> None:
    judge = judges[0]
    judge.note(blocked(0, "'a' (train.py:12)", [1]), 100)
    assert judge.due_ns(50) == 0
    judge.note(blocked(1, "'b' (train.py:13)", [2]), 200)
    assert judge.due_ns(50) == 250
    expected = "rank 0 waits for 'a' (train.py:12), rank 1 for 'b' (train.py:13); has a rank fewer batches?"
    assert judge.verdict() == (DEADLOCK, expected)
    assert judge.due_ns(50) == 0  # until something changes


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


def test_a_rank_that_takes_its_report_back_is_not_blocked(judges: list[Judge]) -> None:
    judge = judges[0]
    judge.note(blocked(0, "'a'", [1]))
    judge.note(blocked(1, "'b'", [2]))
    judge.note(oracle.blocked_message(1, b"", b"", []))
    assert judge.due_ns(1) == 0
    judge.note(blocked(1, "'c'", [3]))
    assert judge.verdict()[0] == DEADLOCK


def test_a_thread_that_may_submit_leaves_it_open(judges: list[Judge]) -> None:
    judge = judges[0]
    judge.note(blocked(0, "'a'", [1]))
    judge.note(blocked(1, "'b'", [2], others="thread 'Loader'"))
    expected = "rank 0 waits for 'a', rank 1 for 'b'; only thread 'Loader' of rank 1 may still submit something"
    assert judge.due_ns(5, 100) == 5
    assert judge.verdict() == (OPEN, expected)
    assert judge.due_ns(5, 100) == 100  # until then it may go on
    assert judge.verdict() == (OPEN, expected)
    assert judge.due_ns(5, 100) == 0
    judge.note(blocked(1, "'b'", [2], others="thread 'Loader'"), 7)
    assert judge.due_ns(5, 100) == 12


def test_ranks_that_wait_alike_are_named_together(judges: list[Judge]) -> None:
    judge = judges[1]
    for rank in range(4):
        judge.note(blocked(rank, "'x'" if rank == 1 else "'y'", [rank == 1], size=4))
    verdict, text = judge.verdict()
    assert (verdict, text.partition(";")[0]) == (DEADLOCK, "ranks 0, 2-3 wait for 'y', rank 1 for 'x'")


def test_a_long_sentence_is_cut_where_it_may_be(native: ModuleType) -> None:
    judge = Judge(native, 40)
    for rank in range(40):
        judge.note(blocked(rank, f"'{'n' * 200}{rank}'", [rank], size=40))
    verdict, text = judge.verdict()
    judge.close()
    assert verdict == DEADLOCK
    assert text.endswith(", others for something else; has a rank fewer batches?")


def test_a_rank_that_there_is_not_is_refused(judges: list[Judge]) -> None:
    assert judges[0].note(blocked(2, "'a'", [1])) == INTERNAL


class Job:
    """A job of ranks with one thread each: programs, a log per team, and reports that take any time to arrive."""

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

    def step(self, rank: int) -> bool:
        """One thing that this rank does, if it can; whether its program has gone on."""
        kind = self.rng.randrange(4)
        if kind < 2:
            return self.go_on(rank) if kind == 0 else self.execute(rank)
        if kind == 2:
            self.report(rank)
        elif self.mail[rank]:
            self.judge.note(self.mail[rank].popleft())
        return False

    def go_on(self, rank: int) -> bool:
        """Submits the next request of its program, or begins to wait for one of those that it has submitted."""
        if self.waits[rank] is not None:
            return False
        has_more = self.at[rank] < len(self.programs[rank])
        if self.pending[rank] and (not has_more or len(self.pending[rank]) > 2 or self.rng.random() < 0.5):
            self.waits[rank] = self.rng.choice(self.pending[rank])
            return True
        if not has_more:
            return False
        team, name = self.programs[rank][self.at[rank]]
        self.at[rank] += 1
        self.pending[rank].append((team, name))
        if all((team, name) in self.pending[member] for member in self.teams[team]):
            self.logs[team].append((team, name))
        return True

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
        if self.waits[rank] is None:
            return
        lanes = [
            oracle.lane(
                team, len(members), self.executed[rank][team], [name + 1 for t, name in self.pending[rank] if t == team]
            )
            for team, members in enumerate(self.teams)
            if rank in members
        ]
        self.mail[rank].append(oracle.blocked_message(rank, str(self.waits[rank]).encode(), b"", lanes))

    def is_stuck(self) -> bool:
        """Whether nobody can ever get what it waits for, as one who sees everything knows."""
        return None not in self.waits and all(
            self.executed[rank][team] == len(self.logs[team])
            for team, members in enumerate(self.teams)
            for rank in members
        )

    def settle(self) -> None:
        """Everybody goes on as far as possible, says that it waits, and all of that arrives."""
        ranks = range(len(self.programs))
        while any(self.go_on(rank) or self.execute(rank) for rank in ranks):
            pass
        for rank in ranks:
            self.report(rank)
            while self.mail[rank]:
                self.judge.note(self.mail[rank].popleft())


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
            assert judge.verdict()[0] == NONE or job.is_stuck(), seed
        job.settle()
        assert judge.verdict()[0] == (DEADLOCK if job.is_stuck() else NONE), seed
        found += job.is_stuck()
        judge.close()
    assert found > 10, seed
