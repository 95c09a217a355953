"""The hosts of an elastic job, as a part of its driver: which of them have agents, and which slots get workers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from horo.runner.config import EXIT_TERMINATED
from horo.runner.elastic.state import (
    Action,
    Connect,
    Disconnect,
    DriverState,
    Host,
    HostEvent,
    HostLost,
    HostsFound,
    HostUp,
    Leave,
    Phase,
    Reach,
    Report,
    Slot,
    SlotRecord,
    Standing,
    Worker,
)

__all__ = [
    "HostTurn",
    "free_slots",
    "free_time_s",
    "host_deadlines_s",
    "is_leaving",
    "open_slots",
    "rank_order",
    "stays",
    "why_it_leaves",
]

_SOON_S = 60.0
"""A worker that fails so soon after its start makes its slot wait ever longer."""
_BACKOFF_MAX_S = 60.0
_FAILURES = 3
_WINDOW_S = 600.0
"""A host on which so many workers fail within this time is left alone for a while, if there is another one."""


def stays(state: DriverState, worker: Worker) -> bool:
    """Whether the worker may be in further generations."""
    host = state.hosts.get(worker.slot.host)
    if worker.is_going or host is None or not _is_kept(host):
        return False
    return host.slots is None or worker.slot.number < host.slots


def is_leaving(state: DriverState, worker: Worker) -> bool:
    """Whether the host of the worker is not to have workers any more: it may be gone, with an agent that is silent."""
    host = state.hosts.get(worker.slot.host)
    return host is None or not _is_kept(host)


def why_it_leaves(state: DriverState, worker: Worker) -> str:
    """The reason why the worker is to leave its host, in words."""
    host = state.hosts.get(worker.slot.host)
    if host is None or not host.is_listed:
        return f"{worker.slot.host} is not found any more"
    return f"{host.name} has to end" if host.leaves_s is not None else f"{host.name} has fewer slots now"


def rank_order(workers: Iterable[Worker]) -> list[Worker]:
    """Hosts by their oldest worker that has the state, inside a host likewise: ranks of a host follow each other."""
    by_age = sorted(workers, key=_age)
    first: dict[str, int] = {}
    for place, worker in enumerate(by_age):
        first.setdefault(worker.slot.host, place)
    return sorted(by_age, key=lambda worker: first[worker.slot.host])


def free_slots(state: DriverState) -> list[Slot]:
    """The slots that are to have a worker and have none, also those that have to wait for some time, best first."""
    wanted = _wanted(state)
    filling = [each for each in state.workers.values() if stays(state, each) or _gives_way(state, each)]
    if len(filling) >= wanted:
        return []
    has_state = any(worker.has_state and not worker.is_going for worker in state.workers.values())
    latest = -1 if has_state else max(state.kept.values(), default=-1)

    def worth(slot: Slot) -> tuple[bool, bool, int]:
        kept = -1 if has_state else state.kept.get(slot, -1)
        return latest < 0 or kept < latest, free_time_s(state, slot) > state.now_s, -kept

    return sorted(open_slots(state), key=worth)[: wanted - len(filling)]


def open_slots(state: DriverState) -> list[Slot]:
    """The slots that may have a worker and have none, in the order of hosts."""
    used = {worker.slot for worker in state.workers.values()}
    slots = [
        Slot(host.name, number)
        for host in state.hosts.values()
        if host.reach is Reach.UP and _is_kept(host)
        for number in range(host.slots or 0)
    ]
    return [slot for slot in slots if slot not in used]


def free_time_s(state: DriverState, slot: Slot) -> float:
    """The time from which the slot may have a worker."""
    return max(state.slots.get(slot, SlotRecord()).free_s, state.hosts[slot.host].free_s)


def host_deadlines_s(state: DriverState) -> list[float]:
    """The times at which something is to be done with hosts."""
    times = []
    for host in state.hosts.values():
        if host.reach is Reach.COMING:
            times.append(host.since_s + state.limits.start_timeout_s)
        times.append(host.free_s)
        if host.leaves_s is not None:
            times.append(host.leaves_s)
    times += state.silent.values()
    times += [worker.until_s for worker in state.workers.values() if worker.standing is Standing.ADRIFT]
    return times


def _age(worker: Worker) -> tuple[bool, int]:
    return not worker.has_state, worker.number


def _is_kept(host: Host) -> bool:
    return host.is_listed and host.leaves_s is None


def _gives_way(state: DriverState, worker: Worker) -> bool:
    """Whether the worker has been killed, and its slot gets another one."""
    return worker.standing is Standing.ENDING and not is_leaving(state, worker)


def _wanted(state: DriverState) -> int:
    return state.limits.size if state.generation == 0 else state.limits.max_size


class HostTurn:
    """The part of one step that is about hosts: a copy of the state that changes, and the actions so far."""

    def __init__(self, state: DriverState, now_s: float) -> None:
        now_s = max(now_s, state.now_s)
        self.workers, self.slots, self.suspects = dict(state.workers), dict(state.slots), dict(state.suspects)
        self.hosts, self.silent, self.late = dict(state.hosts), dict(state.silent), dict(state.late)
        self.state = DriverState(**vars(state))
        self.state.now_s, self.state.workers, self.state.slots = now_s, self.workers, self.slots
        self.state.suspects, self.state.hosts = self.suspects, self.hosts
        self.state.silent, self.state.late = self.silent, self.late
        self.actions: list[Action] = []
        self._before_s, self._now_s = state.now_s, now_s

    # Events

    def take_host_event(self, event: HostEvent) -> None:
        """Enters an event into the state."""
        if isinstance(event, HostsFound):
            self._on_found(event)
        elif isinstance(event, HostUp):
            self._on_up(event)
        elif isinstance(event, HostLost):
            host = self.hosts.get(event.host)
            if host is not None and host.reach is not Reach.AWAY:
                self._lose(host, event.how, event.may_run_s)
        else:
            self._on_leave(event)

    def _on_found(self, event: HostsFound) -> None:
        is_first = not self.hosts
        before = dict(self.hosts)
        self.hosts.clear()
        for found in event.hosts:
            host = before.pop(found.name, None) or Host(found.name, found.slots, is_listed=False)
            if not is_first and not host.is_listed:
                self._report(f"{found.name} was found")
            if host.is_listed and found.slots not in (None, host.slots):
                self._report(f"{found.name} has slots for {found.slots} workers now")
            self.hosts[found.name] = replace(host, slots=found.slots or host.slots, is_listed=True)
        for host in before.values():
            if host.is_listed and host.reach is Reach.UP:
                self._report(f"{host.name} is not found any more: its workers leave")
            elif host.is_listed and host.name in self.silent:
                self._report(f"{host.name} is not found any more: what may still run there is ended, if it answers")
            self.hosts[host.name] = replace(host, is_listed=False)

    def _on_up(self, event: HostUp) -> None:
        host = self.hosts.get(event.host)
        if host is not None and host.reach is Reach.COMING:
            slots = event.slots if host.slots is None else host.slots
            self.hosts[host.name] = replace(host, slots=slots, reach=Reach.UP, since_s=self._now_s)
            self.silent.pop(host.name, None)  # the new agent ends what the one before has left

    def _on_leave(self, event: Leave) -> None:
        until_s = self._now_s + event.within_s
        host = self.hosts.get(event.host or "")
        if host is not None and host.leaves_s is None:
            self.hosts[host.name] = replace(host, leaves_s=until_s)
        others = [each for each in self.hosts.values() if _is_kept(each) and each.reach is not Reach.AWAY]
        why = f" ({event.why})" if event.why else ""
        if host is not None and not others and not self.state.limits.keeps:
            self._finish(
                f"the last host, {host.name}, has to end{why}; with --elastic-dir, a later job would go on from the "
                "commit",
                EXIT_TERMINATED,
            )
        elif event.host is None or (host is not None and not others):
            if self.state.leaves_s is None:
                self._report(f"the job has to end within {event.within_s:g} s{why}")
            self.state.leaves_s = min(until_s, self.state.leaves_s or until_s)
        elif host is not None:
            self._report(f"{host.name} has to end within {event.within_s:g} s{why}: its workers leave")

    def _lose(self, host: Host, how: str, may_run_s: float | None) -> None:
        lost = [worker for worker in self.workers.values() if worker.slot.host == host.name]
        host = self._part_from(host)
        if not _is_kept(host):
            self.silent.pop(host.name, None)  # it does not answer again, and is not asked for ever
        pause_s = self._cool(host, may_run_s or 0.0)
        again = f"; it is tried again after {pause_s:.0f} s" if _is_kept(host) else ""
        self._report(f"{host.name} {how}{again}")
        for worker in lost:
            self._lose_worker(worker, f"was lost: its host {how}", may_run_s)

    def _part_from(self, host: Host) -> Host:
        """The host has no agent any more, and so no memory of its slots."""
        self.state.kept = {slot: number for slot, number in self.state.kept.items() if slot.host != host.name}
        self.hosts[host.name] = away = replace(host, reach=Reach.AWAY, since_s=self._now_s)
        return away

    def _lose_worker(self, worker: Worker, how: str, may_run_s: float | None) -> None:
        raise NotImplementedError

    # Failures

    def _cool(self, host: Host, least_s: float = 0.0) -> float:
        """Leaves the host alone for a time, which it returns and which doubles each time."""
        low_s, high_s = self.state.limits.cooldown_s
        count = 0 if self._now_s > host.free_s + _WINDOW_S else host.cooldowns
        share = random.Random(f"{self.state.seed} {host.name} {host.cooldowns}").random()
        pause_s = max(least_s, low_s, min(high_s, low_s * 2.0 ** min(count, 16) + share * low_s))
        self.hosts[host.name] = replace(host, free_s=self._now_s + pause_s, cooldowns=count + 1, failures=())
        return pause_s

    def _note_failure(self, worker: Worker) -> None:
        """A worker has failed: its slot waits if that was soon after its start, and its host after several."""
        record = self.slots.get(worker.slot, SlotRecord())
        failures = record.failures + 1 if self._now_s - worker.started_s < _SOON_S else 1
        pause_s = 0.0 if failures == 1 else min(_BACKOFF_MAX_S, 2.0 ** min(failures - 2, 16))
        self.slots[worker.slot] = SlotRecord(failures, self._now_s + pause_s)
        host = self.hosts.get(worker.slot.host)
        if host is None or host.reach is not Reach.UP or not _is_kept(host):
            return
        lately = (*(each for each in host.failures if each > self._now_s - _WINDOW_S), self._now_s)
        self.hosts[host.name] = host = replace(host, failures=lately)
        fails_whole = self.state.limits.on_failure == "host"
        if (fails_whole or len(lately) >= _FAILURES) and self._has_other(host):
            pause_s = self._cool(host)
            why = "a worker has failed" if fails_whole else f"{len(lately)} workers have failed"
            self._report(f"{why} on {host.name}: it gets no other one for {pause_s:.0f} s")

    def _has_other(self, host: Host) -> bool:
        """Whether another host can have workers now, as far as one can expect."""
        return any(
            other.name != host.name and _is_kept(other) and other.free_s <= self._now_s for other in self.hosts.values()
        )

    # Decisions

    def forget_adrift(self) -> None:
        """Workers that could not be reached have ended by now."""
        for name in [name for name, until_s in self.silent.items() if until_s <= self._now_s]:
            del self.silent[name]
        for worker in list(self.workers.values()):
            if worker.standing is Standing.ADRIFT and worker.until_s <= self._now_s:
                del self.workers[worker.number]

    def reach_hosts(self) -> None:
        """Starts agents on the hosts that are needed; ends those of hosts that are not to have workers any more.

        A silent host is reached again, also if it is to have none: the new agent ends what may still train there.
        """
        room, timeout_s = 0, self.state.limits.start_timeout_s
        # A new agent would end ranks that others still train with.
        is_whole = self.state.phase is Phase.GATHERING and self.state.broken_s is None
        is_trained_on = is_whole and any(number in self.workers for number in self.state.members)
        for host in list(self.hosts.values()):
            if host.reach is Reach.COMING and self._now_s >= host.since_s + timeout_s:
                self.actions.append(Disconnect(host.name))
                self._lose(host, f"has not answered within {timeout_s:g} s (--start-timeout)", 0.0)
            elif not _is_kept(host) and host.name not in self.silent:
                self._let_go(host)
            elif not _is_kept(host) or host.free_s <= self._now_s:
                is_needed = room < _wanted(self.state) or host.name in self.silent
                if host.reach is Reach.AWAY and is_needed and not is_trained_on:
                    self.actions.append(Connect(host.name))
                    self.hosts[host.name] = replace(host, reach=Reach.COMING, since_s=self._now_s)
                if self.hosts[host.name].reach is not Reach.AWAY and _is_kept(host):
                    room += host.slots or 1

    def _let_go(self, host: Host) -> None:
        """Ends the agent of a host once there are no workers on it; in the end, these as well."""
        left = [worker for worker in self.workers.values() if worker.slot.host == host.name]
        if host.leaves_s is not None and host.leaves_s <= self._now_s:
            for worker in left:
                if worker.standing not in (Standing.ENDING, Standing.ADRIFT):
                    self._kill(worker, "has not left its host in time")
        if left:
            return
        if host.reach is not Reach.AWAY:
            self.actions.append(Disconnect(host.name))
            host = self._part_from(host)
        if host.leaves_s is not None:
            self.hosts[host.name] = host = replace(host, leaves_s=None)
            self._cool(host, self.state.limits.cooldown_s[1])  # it may be there until its end
        elif self._now_s > host.free_s + _WINDOW_S:
            del self.hosts[host.name]

    # Parts of decisions

    def _kill(self, worker: Worker, why: str) -> None:
        raise NotImplementedError

    def _finish(self, reason: str = "", code: int | None = None, *, failed: int | None = None) -> None:
        raise NotImplementedError

    def _enter(self, phase: Phase) -> None:
        self.state.phase, self.state.since_s = phase, self._now_s

    def _stays(self, worker: Worker) -> bool:
        return stays(self.state, worker)

    def _report(self, text: str) -> None:
        self.actions.append(Report(text))
