"""A driver of elastic jobs on virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horo.runner.config import Elastic
from horo.runner.elastic.driver import begin, deadline_s, step
from horo.runner.elastic.state import (
    Committed,
    Ended,
    FoundHost,
    HostsFound,
    HostUp,
    Phase,
    Reach,
    Ready,
    Report,
    Tick,
    Waits,
    Within,
)

__all__ = ["A2_B2", "Driver", "found", "killed", "of", "running", "waits", "within"]

A2_B2 = {"a": 2, "b": 2}


class Driver:
    """A driver with the actions of its last step, without those that are words for the user.

    Args:
        size: the number of ranks to begin with.
        min_size: of the limits.
        max_size: of the limits; None: ``size``.
        hosts: by name, the slots of the hosts; none: one that has as many as are needed.
        is_reached: the first hosts have answered.
        given: further limits.
    """

    def __init__(
        self,
        size: int = 3,
        min_size: int = 1,
        max_size: int | None = None,
        hosts: Mapping[str, int] | None = None,
        *,
        is_reached: bool = True,
        **given: Any,
    ) -> None:
        self.now_s = 100.0
        limits = Elastic(size, min_size, max_size or size, **given)
        found = [FoundHost(name, slots or None) for name, slots in (hosts or {"h": limits.max_size}).items()]
        self.state, actions = begin(limits, found, self.now_s)
        self._keep(actions)
        while is_reached and (
            coming := [each.name for each in self.state.hosts.values() if each.reach is Reach.COMING]
        ):
            self.on(HostUp(coming[0], 0))

    actions: list[Any]
    words: str

    def _keep(self, actions: list[Any]) -> None:
        self.words = "\n".join(each.text for each in actions if isinstance(each, Report))
        self.actions = [each for each in actions if not isinstance(each, Report)]

    def on(self, *events: Any, after_s: float = 0.0) -> list[Any]:
        """The actions after all events, the first of which comes ``after_s`` later."""
        self.now_s += after_s
        done: list[Any] = []
        for event in events:
            self.state, actions = step(self.state, event, self.now_s)
            done += actions
        self._keep(done)
        return self.actions

    def tick(self) -> list[Any]:
        """Goes to the next deadline."""
        due_s = deadline_s(self.state)
        assert due_s is not None
        return self.on(Tick(), after_s=due_s - self.now_s)

    @property
    def phase(self) -> Phase:
        return self.state.phase


def running(size: int = 3, *more: Any, **limits: Any) -> Driver:
    """A driver whose first ranks are at work."""
    driver = Driver(size, *more, **limits)
    driver.on(*(Ready(worker) for worker in range(size)))
    assert driver.state.generation == 1
    driver.on(*(Within(worker, 1) for worker in range(size)))
    driver.on(*(Committed(worker) for worker in range(size)))
    assert driver.phase is Phase.RUNNING
    return driver


def killed(worker: int) -> Ended:
    """The end of a worker that was killed."""
    return Ended(worker, True, "was killed by SIGKILL")


def found(**slots: int) -> HostsFound:
    return HostsFound(tuple(FoundHost(name, count) for name, count in slots.items()))


def waits(generation: int, *workers: int, culprit: int | None = None) -> list[Waits]:
    return [Waits(worker, generation, culprit, True) for worker in workers]


def within(generation: int, *workers: int) -> list[Within]:
    return [Within(worker, generation) for worker in workers]


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [each for each in actions if isinstance(each, kind)]
