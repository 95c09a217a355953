"""The loop's clock, and what goes by it. The clock is the test's: what a callback takes, it takes by that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from horo.runner import loop as under_test
from horo.runner.agent.protocol import Kind, MessageReader
from horo.runner.config import Ssh
from horo.runner.hosts import HostSpec
from horo.runner.job.remote import RemoteHost
from horo.runner.loop import Loop
from horo.runner.start.ssh import SshLauncher


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


def test_short_sleeps_on_a_crowded_host_come_to_a_deadline(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: list[float] = []
    monkeypatch.setattr(loop._selector, "select", lambda _timeout: clock.passes(1.0) or [])
    loop.call_later(5.0, lambda: due.append(clock.now_s))

    def look() -> None:
        loop.call_later(0.05, look)

    look()
    loop.run_until(lambda: bool(due) or clock.now_s > 2000)
    assert due
    assert 1005 <= due[0] <= 1006


def test_the_time_until_ctrl_z_is_undone_does_not_count(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test.os, "kill", lambda _pid, _number: clock.passes(3600))
    before_s = loop.now_s
    loop.stop_process()
    assert loop.now_s == before_s


@pytest.mark.parametrize("host_timeout_s", [45.0, 3000.0, 0.9])
def test_an_agent_gets_a_sign_of_life_every_one_to_two_seconds(
    loop: Loop, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host_timeout_s: float
) -> None:
    # An outage that begins long after the last sign has been silent for as long when it is over.
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\nexec cat > {tmp_path}/sent\n")
    shell.chmod(0o755)

    def select(timeout: float | None) -> list[object]:
        assert timeout is not None
        clock.passes(timeout)
        return []

    monkeypatch.setattr(loop._selector, "select", select)
    remote = RemoteHost(loop, HostSpec("h1"), lambda _event: None, lambda: None)
    remote.connect(SshLauncher(Ssh(program=str(shell)), "python", 60, host_timeout_s), host_timeout_s=host_timeout_s)
    loop.run_until(lambda: clock.now_s > 1040)
    for pipe in (remote._process.stdin, remote._process.stdout, remote._process.stderr):
        assert pipe is not None
        pipe.close()
    remote._process.wait(30)
    sent = MessageReader(magic=False).feed((tmp_path / "sent").read_bytes())
    assert {message.kind for message in sent} == {Kind.PING}
    assert len(sent) >= 40 / min(2.0, host_timeout_s / 3) - 1
