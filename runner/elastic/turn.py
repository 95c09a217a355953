"""Effects of one step of the driver of an elastic job: workers are seated, started and ended, the job ends."""

from __future__ import annotations

from dataclasses import replace

from horo.bootstrap.generations import Change
from horo.runner.elastic.hosts import HostTurn, free_slots, free_time_s, why_it_leaves
from horo.runner.elastic.next_generation import next_members
from horo.runner.elastic.state import (
    Announce,
    Dismiss,
    Fail,
    Finish,
    Generation,
    Kill,
    Phase,
    Standing,
    StartWorker,
    Worker,
    WriteSeats,
)

__all__ = ["ENDS_WELL", "Turn", "ranks_in_words"]

ENDS_WELL = (Standing.DONE, Standing.KEPT)
"""No rank is started beside such workers."""


def ranks_in_words(count: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return "1 rank" if count == 1 else f"{count} ranks"


class Turn(HostTurn):
    """One step: a copy of the state that changes, and the actions so far. A subclass decides."""

    def _seat(self) -> None:
        state = self.state
        reasons = [each.reason for each in state.refused]
        for reason in dict.fromkeys(reasons):
            count = reasons.count(reason)
            self._report(f"{count} slot{' is' if count == 1 else 's are'} left out: {reason}")
        state.refused = ()
        state.members = tuple(worker.number for worker in next_members(self.state))
        state.generation += 1
        state.changes, state.announced = 0, Change()
        state.is_broken, state.broken_s, state.error = False, None, ""
        self.suspects.clear()
        self.silent.clear()
        self.late.clear()
        for number in state.members:
            self._set(self.workers[number], Standing.SEATED)
        self.actions.append(WriteSeats(state.generation, state.members))
        self._enter(Phase.FORMING)

    def _run(self) -> None:
        state = self.state
        if state.idle_since_s is not None:
            idle_s = self._now_s - state.idle_since_s if state.generation > 1 else 0.0
            state.history = (*state.history, Generation(state.generation, state.members, idle_s, state.steps_lost))
            if state.generation > 1:
                names = ", ".join(map(str, state.members))
                who = f"{ranks_in_words(len(state.members))} (worker{'s' if len(state.members) > 1 else ''} {names})"
                self._report(f"generation {state.generation}: {who} after {idle_s:.1f} s")
            state.idle_since_s = state.steps_lost = None
        self._enter(Phase.RUNNING)

    def _announce(self, change: Change) -> None:
        self.state.changes += 1
        self.state.announced = change
        self.actions.append(Announce(self.state.generation, self.state.changes, change))

    def _gather(self, reason: str) -> None:
        if self.state.phase not in (Phase.FORMING, Phase.RUNNING):
            return
        if self.state.phase is Phase.FORMING:  # they may wait for each other in init()
            self.actions.append(Fail(self.state.generation, reason))
            self._hurry()
        self._enter(Phase.GATHERING)

    def _break(self) -> None:
        """A member has left the generation, or has ended: nobody can be at work in it."""
        self.state.is_broken = True
        self.silent.clear()
        self._hurry()

    def _hurry(self) -> None:
        if self.state.broken_s is None:
            self.state.broken_s = self._now_s
        if self.state.idle_since_s is None:
            self.state.idle_since_s = self._now_s

    def _replace(self) -> None:
        """Starts workers for slots that have none. Before the first generation, only if others have come through, or
        could not be started."""
        state = self.state
        is_first = state.started == 0
        has_come = bool(state.refused) or any(each.standing is Standing.READY for each in self.workers.values())
        is_over = self._is_at_reset_limit() or any(each.standing in ENDS_WELL for each in self.workers.values())
        if is_over or (state.generation == 0 and not is_first and not has_come):
            return
        free = [slot for slot in free_slots(state) if self._now_s >= free_time_s(state, slot)]
        size = len(self.workers) + len(free)
        for slot in free:
            number = state.started
            state.started += 1
            forecast = StartWorker(number, slot, state.generation + 1, len(self.workers), size)
            self.workers[number] = Worker(number, slot, self._now_s)
            self.actions.append(forecast)
            if not is_first:
                self._report(f"{self._name(self.workers[number])} starts")

    def _kill(self, worker: Worker, why: str) -> None:
        self._set(worker, Standing.ENDING)
        self.suspects.pop(worker.number, None)
        self.actions.append(Kill(worker.number))
        self._report(f"{self._name(worker)} {why}, and is killed")

    def _dismiss(self, worker: Worker, why: str) -> None:
        self._set(worker, Standing.DISMISSED)
        self.suspects.pop(worker.number, None)
        self.actions.append(Dismiss(worker.number, why))

    def _dismiss_leavers(self) -> None:
        """Ends workers that are to leave, and are not at work."""
        for worker in list(self.workers.values()):
            if worker.standing in (Standing.COMING, Standing.READY) and not self._stays(worker):
                self._dismiss(worker, why_it_leaves(self.state, worker))

    def _finish(self, reason: str = "", code: int | None = None, *, failed: int | None = None) -> None:
        self._enter(Phase.OVER)
        self.actions.append(Finish(reason, code, failed))

    def _set(self, worker: Worker, standing: Standing, *, has_state: bool | None = None) -> None:
        has_state = worker.has_state if has_state is None else has_state
        if standing is not worker.standing or has_state != worker.has_state:
            self.workers[worker.number] = replace(worker, standing=standing, has_state=has_state)
        self.state.has_learnt |= has_state

    def _name(self, worker: Worker) -> str:
        members, several = self.state.members, len(self.hosts) > 1
        rank = f" (rank {members.index(worker.number)})" if worker.number in members else ""
        return f"worker {worker.number}{rank}{f' on {worker.slot.host}' if several else ''}"

    def _is_at_reset_limit(self) -> bool:
        limit = self.state.limits.reset_limit
        return limit is not None and self.state.generation > limit

    def _members(self) -> list[Worker]:
        """The workers of the generation whose processes exist."""
        return [self.workers[number] for number in self.state.members if number in self.workers]

    def _standing(self, standing: Standing) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.standing is standing]
