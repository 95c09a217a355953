"""The loop's clock and signals. The clock is the test's: what a callback takes, it takes by that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from horo.runner import loop as under_test
from horo.runner.loop import Loop


class Clock:
    """Of the loop; ``passes`` lets time pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(under_test, "time", one)
    return one


@pytest.fixture
def loop(clock: Clock) -> Iterator[Loop]:
    with closing(Loop()) as one:
        yield one


@pytest.mark.parametrize("slow_s", [0.3, 0.6, 1.0, 30.0])
def test_slow_callbacks_do_not_hold_up_a_deadline(loop: Loop, clock: Clock, slow_s: float) -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x" * 1000)
    due: list[float] = []
    rounds: list[float] = []

    def read() -> None:
        os.read(read_fd, 1)
        rounds.append(clock.now_s)
        clock.passes(slow_s)

    loop.watch(read_fd, read=read)
    loop.call_later(2.0, lambda: due.append(clock.now_s))
    loop.run_until(lambda: bool(due) or len(rounds) > 100)
    os.close(read_fd)
    os.close(write_fd)
    # Due after 2 s, found out in the round after: that is at most two rounds later.
    assert due
    assert 1002.0 <= due[0] <= 1002.0 + 2 * slow_s


def test_a_sleep_in_which_the_process_was_stopped_does_not_count(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[str] = []
    sleeps = iter([3600.0, 1.0, 0.5])  # the first lasts an hour longer than asked for

    def select(timeout: float | None) -> list[object]:
        assert timeout is not None
        clock.passes(next(sleeps))
        return []

    monkeypatch.setattr(loop._selector, "select", select)
    loop.on_stopped(lambda: due.append("stopped"))
    loop.call_later(2.5, lambda: due.append("due"))
    loop.run_until(lambda: "due" in due)
    assert due == ["stopped", "due"]
    assert next(sleeps, None) is None


def test_the_time_until_ctrl_z_is_undone_does_not_count(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test.os, "kill", lambda _pid, _number: clock.passes(3600))
    before_s = loop.now_s
    loop.stop_process()
    assert loop.now_s == before_s
