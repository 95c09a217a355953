"""Signals that users trap reach every rank of a job once, whether they come to hororun or to its agents."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest
from jobs import Flags, Hororun

from horo.runner.job.signals import SignalsToRanks
from horo.runner.loop import Timer

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


class Clock:
    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self._due.append(call)
        return Timer(delay_s, len(self._due), call)

    def run(self) -> None:
        """The time of all calls has come."""
        due, self._due = self._due, []
        for call in due:
            call()


class Host:
    """Has got the signals that came to its agent, and those that were passed on to it."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def pass_on(self, number: int) -> None:
        self.got.append(number)


class Job:
    def __init__(self) -> None:
        self.hosts = [Host() for _ in range(3)]
        self.clock = Clock()
        self.signals = SignalsToRanks(self.clock, lambda: self.hosts)

    def agent_gets(self, host: int, number: int) -> None:
        self.hosts[host].got.append(number)
        self.signals.came_to(self.hosts[host], number)

    @property
    def got(self) -> list[list[int]]:
        return [host.got for host in self.hosts]


@pytest.mark.parametrize("agents", [[0], [2, 1], [0, 1, 2]])
def test_a_signal_to_some_agents_reaches_the_ranks_of_all_hosts_once(agents: list[int]) -> None:
    job = Job()
    for agent in agents:
        job.agent_gets(agent, USR1)
    job.clock.run()
    job.clock.run()
    assert job.got == [[USR1]] * 3


def test_a_signal_to_hororun_and_to_its_agents_is_one() -> None:
    job = Job()
    job.agent_gets(0, USR1)
    job.signals.came_here(USR1)
    job.clock.run()
    assert job.got == [[USR1]] * 3
    job.signals.came_here(USR1)  # what the agents got with it is with the ranks, and goes no further
    job.signals.came_to(job.hosts[1], USR1)
    job.clock.run()
    assert job.got == [[USR1] * 2] * 3


def test_signals_that_differ_or_come_later_are_not_one() -> None:
    job = Job()
    job.agent_gets(0, USR1)
    job.agent_gets(1, USR2)
    job.clock.run()
    assert [sorted(got) for got in job.got] == [[USR1, USR2]] * 3
    job.agent_gets(2, USR1)
    job.clock.run()
    assert [got.count(USR1) for got in job.got] == [2] * 3
    job.signals.came_here(USR2)
    job.clock.run()
    job.agent_gets(2, USR2)
    job.clock.run()
    assert [got.count(USR2) for got in job.got] == [3] * 3


def test_a_signal_to_an_agent_reaches_the_ranks_of_all_hosts(hororun: Hororun, flags: Flags) -> None:
    script = f"trap 'exit 75' USR1; : > {flags.folder}/up.$HOROVOD_RANK; while :; do sleep 0.05; done"
    words = ["-np", "3", "--failure-seconds", "30", "--", "sh", "-c", script]
    job = hororun.start(*words, where="localhost:1,one:1,two:1")
    flags.wait([f"up.{rank}" for rank in range(3)])
    agents = [p for p in job.processes("horo.runner.agent") if psutil.Process(p).ppid() == job.process.pid]
    assert len(agents) == 2
    os.kill(agents[0], USR1)
    done = job.finish()
    assert done.returncode == 75
    assert done.stderr.count("exited with code 75") == 2, done.stderr  # the first one, and the others in one line
    assert "SIGTERM" not in done.stderr
