"""The hosts of a simulated elastic job: agents that die, links that are cut, hosts that come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from horo.runner.elastic.state import ElasticEvent, FoundHost, HostLost, HostsFound, HostUp, Leave

__all__ = ["SILENCE_S", "Machine", "Machines"]

SILENCE_S = 15.0
"""hororun gives up a host, and its agent ends, after about so much silence."""
_MAY_RUN_S = 4.0
"""The difference between the two, at most."""


@dataclass
class Machine:
    """A host. What goes to it or comes from it waits while it is cut off."""

    name: str
    slots: int
    agent: int = 0
    """Number of its last agent."""
    known: int = 0
    """The agent that hororun talks to, if there is one."""
    has_agent: bool = False
    cut: int = 0
    """Number of the last cut of its link."""
    is_cut: bool = False
    is_down: bool = False
    is_stopped: bool = False
    """Its agent does nothing, and its workers go on."""
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Machines:
    """All hosts of a schedule.

    Args:
        chance: of the schedule.
        later: calls back after a time.
        tell: takes events to the driver.
        has_ended: is called with the name of a host when its agent has ended, and all workers with it.
        is_back: is called with the name of a host when its link is there again.
    """

    def __init__(
        self,
        chance: random.Random,
        later: Callable[[float, Callable[[], None]], None],
        tell: Callable[[ElasticEvent], None],
        has_ended: Callable[[str], None],
        is_back: Callable[[str], None],
    ) -> None:
        self._random, self._later, self._tell = chance, later, tell
        self._has_ended, self._is_back = has_ended, is_back
        self.all: dict[str, Machine] = {}
        self.listed: list[str] = []
        self.is_calm = True
        """No attempt to start an agent fails."""

    def add(self, slots: int) -> None:
        """A new host, which discovery lists."""
        name = f"h{len(self.all)}"
        self.all[name] = Machine(name, slots)
        self.listed.append(name)

    def found(self) -> list[FoundHost]:
        """The hosts that discovery lists."""
        return [FoundHost(name, self.all[name].slots) for name in self.listed]

    def pass_on(self, name: str, call: Callable[[], None]) -> None:
        """Something goes to an agent or comes from it: it arrives when the link is there, if that agent still is."""
        machine = self.all[name]
        agent = machine.agent

        def arrive() -> None:
            if machine.has_agent and machine.agent == agent:
                call()

        if machine.is_cut or machine.is_stopped or machine.waiting:
            machine.waiting.append(arrive)
        else:
            arrive()

    def _pass_on_waiting(self, machine: Machine) -> None:
        """What has waited arrives in its order, before what it brings about."""
        while machine.waiting and not machine.is_cut and not machine.is_stopped:
            call, *machine.waiting = machine.waiting
            call()

    def are_parted(self, names: set[str]) -> bool:
        """Whether some of the hosts do not reach each other."""
        return len(names) > 1 and any(self.all[name].is_cut for name in names)

    # What the driver asks for

    def connect(self, name: str) -> None:
        """An agent is started, which may fail, or take forever."""
        machine = self.all[name]
        if machine.is_stopped:  # the new one ends what that has left
            self.end_agent(machine)
        assert not machine.has_agent, f"{name} gets an agent beside another"
        machine.agent += 1
        machine.known = machine.agent
        agent, luck = machine.agent, 1.0 if self.is_calm else self._random.random()
        if machine.is_down or machine.is_cut or luck < 0.05:
            return
        fails = luck < 0.15

        def answer() -> None:
            if machine.known != agent or machine.is_down or machine.is_cut:
                return
            machine.has_agent = not fails
            self._tell(HostLost(name, "cannot be reached") if fails else HostUp(name, machine.slots))

        self._later(self._random.uniform(0.1, 5.0), answer)

    def disconnect(self, name: str) -> None:
        """The agent is to end."""
        machine = self.all[name]
        self.end_agent(machine)
        machine.known = 0

    # Faults

    def end_agent(self, machine: Machine) -> None:
        """The agent ends, and so does all on its host."""
        if machine.has_agent:
            machine.has_agent = machine.is_stopped = False
            machine.waiting.clear()
            self._has_ended(machine.name)

    def kill_agent(self, machine: Machine) -> None:
        """The agent dies; hororun sees that at once."""
        agent = machine.agent
        if machine.has_agent and not machine.is_cut:
            self.end_agent(machine)
            self._later(self._random.uniform(0.01, 0.5), lambda: self._lose(machine, agent, "has lost its agent", 0.0))

    def stop_agent(self, machine: Machine) -> None:
        """The agent is stopped, as by SIGSTOP, and goes on later: it ends if hororun has given it up by then."""
        agent = machine.agent
        if not machine.has_agent or machine.is_stopped or machine.is_cut:
            return
        machine.is_stopped = True

        def if_still(call: Callable[[], None]) -> Callable[[], None]:
            return lambda: call() if machine.is_stopped and machine.agent == agent else None

        def go_on() -> None:
            machine.is_stopped = False
            if machine.known != agent:
                self.end_agent(machine)
            self._pass_on_waiting(machine)

        self._later(SILENCE_S, if_still(lambda: self._lose(machine, agent, "is silent", None)))
        self._later(self._random.choice([5.0, SILENCE_S + 10.0, 200.0]), if_still(go_on))

    def power_off(self, machine: Machine) -> None:
        """The host is gone; hororun hears nothing more. It comes back some time."""
        agent = machine.agent
        machine.is_down = True
        self.end_agent(machine)
        self._later(SILENCE_S, lambda: self._lose(machine, agent, "is silent", None))
        self._later(self._random.uniform(20.0, 200.0), lambda: setattr(machine, "is_down", False))

    def cut(self, machine: Machine) -> None:
        """Nothing passes the link of a host for a time."""
        if machine.is_cut:
            return
        machine.is_cut = True
        machine.cut += 1
        agent, cut = machine.agent, machine.cut
        heals_s = self._random.choice([1.0, 5.0, SILENCE_S - 3.0, SILENCE_S + 10.0, 100.0])

        def if_still(call: Callable[[], None]) -> Callable[[], None]:
            return lambda: call() if machine.is_cut and (machine.cut, machine.agent) == (cut, agent) else None

        def heal() -> None:
            machine.is_cut = False
            self._pass_on_waiting(machine)
            self._is_back(machine.name)

        ends_s, lost_s = (SILENCE_S + self._random.uniform(-1.5, 1.5) for _ in range(2))
        may_run_s = self._random.choice([None, _MAY_RUN_S])
        self._later(ends_s, if_still(lambda: self.end_agent(machine)))
        lose = if_still(lambda: self._lose(machine, agent, "is silent", may_run_s))
        self._later(max(ends_s, lost_s) if may_run_s is None else lost_s, lose)
        self._later(heals_s, heal)

    def flap(self) -> None:
        """Discovery lists other hosts, and those of before again after a time."""
        before = list(self.listed)
        if self._random.random() < 0.5:
            self.add(self._random.randint(1, 3))
        self.listed = [name for name in self.listed if self._random.random() < 0.6]
        if self._random.random() < 0.2:
            machine = self._random.choice(list(self.all.values()))
            machine.slots = self._random.randint(1, 3)
        self._tell(HostsFound(tuple(self.found())))

        def undo() -> None:
            self.listed = before
            self._tell(HostsFound(tuple(self.found())))

        if self._random.random() < 0.7:
            self._later(self._random.choice([1.0, 10.0, 60.0]), undo)

    def leave(self, machine: Machine) -> None:
        """The host is to be switched off soon, which its agent says, perhaps twice; or it has none."""
        within_s = self._random.choice([0.5, 5.0, 30.0])
        for _ in range(self._random.choice([0, 1, 1, 1, 2])):
            self.pass_on(machine.name, lambda: self._tell(Leave(machine.name, within_s)))
        self._later(within_s + 1.0, lambda: self.power_off(machine))

    def _lose(self, machine: Machine, agent: int, how: str, may_run_s: float | None) -> None:
        if machine.known == agent:
            machine.known = 0
            self._tell(HostLost(machine.name, how, may_run_s))
