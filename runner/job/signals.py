"""Passes signals that users trap, such as SIGUSR1, on to all ranks of a job, wherever they came.

Slurm sends a signal to the batch script, and so to hororun, or to the job's steps: then the agents get it, and the
ranks on hororun's own host would hear nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from horo.runner.loop import Timer

__all__ = ["Clock", "Place", "SignalsToRanks"]

GATHER_S = 0.5
"""A signal that comes to several hosts within this time is one, and each rank gets it once."""


class Place(Protocol):
    """The ranks of one host."""

    def pass_on(self, number: int) -> None:
        """Sends them a signal."""


class Clock(Protocol):
    """What is needed of a ``Loop``."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Calls ``call`` then."""


class SignalsToRanks:
    """The way of signals to ranks.

    Args:
        clock: the loop.
        places: the hosts that have ranks now.
    """

    def __init__(self, clock: Clock, places: Callable[[], Sequence[Place]]) -> None:
        self._clock = clock
        self._places = places
        self._heard: dict[int, list[Place]] = {}
        self._passed: set[int] = set()

    def to_all(self, number: int) -> None:
        """Sends a signal to all ranks at once."""
        self._pass_on(number, [])

    def came_here(self, number: int) -> None:
        """The signal came to this process."""
        self._pass_on(number, self._heard.pop(number, []))
        self._passed.add(number)
        self._clock.call_later(GATHER_S, lambda: self._passed.discard(number))

    def came_to(self, place: Place, number: int) -> None:
        """The signal came to the agent of a host, whose ranks have it. Others have it soon, if it came to them, too."""
        if number in self._passed:
            return
        if number not in self._heard:
            self._clock.call_later(GATHER_S, lambda: self._pass_on_to_others(number))
        self._heard.setdefault(number, []).append(place)

    def _pass_on_to_others(self, number: int) -> None:
        heard = self._heard.pop(number, None)
        if heard is not None:  # it has not come here meanwhile
            self._pass_on(number, heard)

    def _pass_on(self, number: int, without: Sequence[Place]) -> None:
        for place in self._places():
            if not any(place is other for other in without):
                place.pass_on(number)
