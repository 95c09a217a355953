"""The steps that ranks of a host show one another, and the slowest rank by them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from horo.core.memory import create_memory
from horo.diagnostics.board import BOARD_BYTES, Board
from horo.diagnostics.slowest import Slowest
from horo.torch.engine.steps import StepMeter

RANKS = (2, 5, 7)
MS = 1000


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    """Of three ranks, in one memory."""
    memory = create_memory(BOARD_BYTES * len(RANKS))
    made = [Board(os.dup(memory), rank, RANKS) for rank in RANKS]
    os.close(memory)
    yield made
    for board in made:
        board.close()


def do_steps(boards: list[Board], first: int, count: int, late: int | None, *, behind_us: int = 4 * MS) -> None:
    """Steps of 20 ms, in which the others wait for one rank; None: for each in turn."""
    for number in range(first, first + count):
        last = number % len(boards) if late is None else late
        for place, board in enumerate(boards):
            board.add(number, 0 if place == last else behind_us, 0, 20 * MS)


def test_every_rank_sees_the_slow_one_by_its_number(boards: list[Board]) -> None:
    do_steps(boards, 1, 20, late=1)
    assert [board.look().slowest() for board in boards] == [Slowest(5, 1.0, 0.004, 0.0)] * 3


def test_of_healthy_ranks_none_is_the_slowest(boards: list[Board]) -> None:
    assert boards[0].look().slowest() is None
    do_steps(boards, 1, 9, late=1)
    assert boards[0].look().slowest() is None, "these are too few steps"
    do_steps(boards, 10, 60, late=None)
    assert boards[0].look().slowest() is None
    do_steps(boards, 70, 64, late=1, behind_us=900)
    assert boards[0].look().slowest() is None, "it is less than 5 % of a step"


def test_only_the_last_steps_count_and_only_those_of_all(boards: list[Board]) -> None:
    do_steps(boards, 1, 200, late=0)
    do_steps(boards, 201, 64, late=2)
    boards[0].add(265, 0, 0, 20 * MS)
    slowest = boards[0].look().slowest()
    assert slowest is not None and (slowest.rank, slowest.share) == (7, 1.0)
    boards[1].add(1 << 40, 1 << 40, 1 << 40, 1 << 40)  # a step of a clock that has jumped
    assert boards[0].look().slowest() is not None


def test_a_rank_that_has_done_no_step_leaves_the_slowest_unknown(boards: list[Board]) -> None:
    do_steps(boards[:2], 1, 30, late=0)
    assert boards[0].look().slowest() is None


def test_a_closed_board_takes_steps_of_another_thread(boards: list[Board]) -> None:
    do_steps(boards, 1, 20, late=1)
    seen = boards[0].look()
    boards[0].close()
    boards[0].add(21, 0, 0, 1)
    boards[0].close()
    assert boards[0].look().slowest() is None
    assert seen.slowest() is not None


class Core:
    """Blocked for 5 ms more at each look, of which 1 ms moves data."""

    def __init__(self) -> None:
        self.looks = 0

    def work(self) -> tuple[int, int, int, int, int]:
        self.looks += 1
        return 5_000_000 * self.looks, 1_000_000 * self.looks, 0, 0, 0


def test_a_meter_writes_what_others_wait_for(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    meter = StepMeter(Core(), board=boards[0])
    for step in range(13):
        monkeypatch.setattr("time.perf_counter_ns", lambda now=20_000_000 * step: now)
        meter.end_step(0)
        if step:
            boards[1].add(step + 1, 0, 0, 20 * MS)
            boards[2].add(step + 1, 4 * MS, 0, 20 * MS)
    assert meter.stats().slowest == Slowest(5, 1.0, 0.004, 0.0)
    assert StepMeter(Core()).stats().slowest is None
