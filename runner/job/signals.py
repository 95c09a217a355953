"""Passes signals that users trap, such as SIGUSR1, on to all ranks of a job, wherever they came.

Slurm sends a signal to the batch script, and so to hororun, or to the job's steps: then the agents get it, and the
ranks on hororun's own host would hear nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from horo.runner.loop import Loop, Timer
from horo.runner.processes import ENDING_WITHOUT_RANKS, PASSED_ON

__all__ = ["Clock", "SignalledHost", "SignalsToRanks"]

GATHER_S = 0.5
"""A signal that comes to several hosts within this time is one, and each rank gets it once."""


def _passed_on_here(*, batch: bool) -> Sequence[int]:
    """The signals to hororun itself that are for its ranks.

    SIGHUP is one in a batch job that has no terminal: nothing is hung up there, and users have it sent before time is
    up. Elsewhere it ends the job.
    """
    return (*PASSED_ON, signal.SIGHUP) if batch and not _has_terminal() else PASSED_ON


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class SignalledHost(Protocol):
    """The ranks of one host."""

    def pass_on(self, number: int) -> None:
        """Sends them a signal."""


class Clock(Protocol):
    """The methods that are needed of a ``Loop``."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Calls ``call`` then."""


class SignalsToRanks:
    """The way of signals to ranks.

    Args:
        clock: the loop.
        hosts: the hosts that have ranks now.

    Attributes:
        came: the signals that came so far.
    """

    def __init__(self, clock: Clock, hosts: Callable[[], Sequence[SignalledHost]]) -> None:
        self._clock = clock
        self._hosts = hosts
        self._heard: dict[int, list[SignalledHost]] = {}
        self._passed: set[int] = set()
        self.came: set[int] = set()

    def listen(self, loop: Loop, end: Callable[[int], None], run: Callable[[], bool], *, batch: bool) -> None:
        """Takes the signals that come to this process.

        Args:
            loop: reports them.
            end: ends the job, for the signals that do.
            run: whether any rank runs.
            batch: whether this is a job of a batch system.
        """

        def pass_on_or_end(number: int) -> None:
            (self.came_here if run() or number not in ENDING_WITHOUT_RANKS else end)(number)

        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.on_signal(ending, end)
        for number in _passed_on_here(batch=batch):
            loop.on_signal(number, pass_on_or_end)

    def to_all(self, number: int) -> None:
        """Sends a signal to all ranks at once."""
        self._pass_on(number, [])

    def came_here(self, number: int) -> None:
        """The signal came to this process."""
        self.came.add(number)
        self._pass_on(number, self._heard.pop(number, []))
        self._passed.add(number)
        self._clock.call_later(GATHER_S, lambda: self._passed.discard(number))

    def came_to(self, host: SignalledHost, number: int) -> None:
        """The signal came to the agent of a host, whose ranks have it. Others have it soon, if it came to them, too."""
        self.came.add(number)
        if number in self._passed:
            return
        if number not in self._heard:
            self._clock.call_later(GATHER_S, lambda: self._pass_on_to_others(number))
        self._heard.setdefault(number, []).append(host)

    def _pass_on_to_others(self, number: int) -> None:
        heard = self._heard.pop(number, None)
        if heard is not None:  # it has not come here meanwhile
            self._pass_on(number, heard)

    def _pass_on(self, number: int, without: Sequence[SignalledHost]) -> None:
        for host in self._hosts():
            if not any(host is other for other in without):
                host.pass_on(number)
