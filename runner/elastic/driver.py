"""The driver of an elastic job: a pure state machine, without clock and without I/O.

It decides which workers form the next *generation*, and when. A generation is seated only when every member of the one
before has left it or is gone: so never two of them are at work. Each wait has a deadline, see ``deadline_s``. Events
about another generation than the last one are stale, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from horo.runner.config import EXIT_ELASTIC_TIMEOUT, Elastic
from horo.runner.elastic.state import (
    Action,
    Announce,
    Committed,
    Done,
    DriverState,
    ElasticEvent,
    Ended,
    Fail,
    Finish,
    Kill,
    Phase,
    Ready,
    Report,
    SlotRecord,
    Standing,
    StartWorker,
    Tick,
    Waits,
    Within,
    Worker,
    WriteSeats,
)

__all__ = ["begin", "deadline_s", "lost_s", "step"]

_CULPRIT_S = 1.0
"""The time that a worker which others name as hung has to leave the generation itself."""
_LATE_S = 10.0
"""The time for which a worker may go on with ``init()`` that has been given up."""
_SOON_S = 60.0
"""A worker that fails so soon after its start makes its slot wait ever longer."""
_BACKOFF_MAX_S = 60.0
_IN_GENERATION = (Standing.SEATED, Standing.WITHIN)
_REPLACING = (Phase.STARTING, Phase.FORMING, Phase.RUNNING, Phase.GATHERING, Phase.SHORT)


def begin(limits: Elastic, now_s: float) -> tuple[DriverState, list[Action]]:
    """The state of a new job, and the actions that start its first workers."""
    return step(DriverState(limits, now_s, since_s=now_s, idle_since_s=now_s), Tick(), now_s)


def step(state: DriverState, event: ElasticEvent, now_s: float) -> tuple[DriverState, list[Action]]:
    """The state after an event, and the actions that it asks for, in their order."""
    turn = _Turn(state, now_s)
    if turn.state.phase != Phase.OVER:
        turn.take(event)
        turn.settle()
    return turn.state, turn.actions


def deadline_s(state: DriverState) -> float | None:
    """The time of the next ``Tick`` that may change something; None: only another event does."""
    limits, times = state.limits, [*state.suspects.values()]
    if state.phase in (Phase.STARTING, Phase.FORMING):
        times.append(state.since_s + limits.start_timeout_s)
    elif state.phase is Phase.GATHERING:
        times.append(state.since_s + limits.gather_timeout_s)
    elif state.phase is Phase.SHORT:
        times.append(state.since_s + limits.elastic_timeout_s)
    if state.phase in _REPLACING:
        times += [state.slots[slot].free_s for slot in _free_slots(state) if slot in state.slots]
    return min((each for each in times if each > state.now_s), default=None)


def lost_s(state: DriverState) -> float:
    """The time in which training has not gone on, since it began."""
    idle_s = 0.0 if state.idle_since_s is None or state.generation == 0 else state.now_s - state.idle_since_s
    return state.lost_s + idle_s


def _free_slots(state: DriverState) -> list[int]:
    """The slots that are to have a worker and have none."""
    limits = state.limits
    wanted = limits.size if state.generation == 0 else limits.max_size
    used = {worker.slot for worker in state.workers.values()}
    return [slot for slot in range(wanted) if slot not in used]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


class _Turn:
    """One step: a copy of the state that changes, and the actions so far."""

    def __init__(self, state: DriverState, now_s: float) -> None:
        now_s = max(now_s, state.now_s)
        self.workers, self.slots, self.suspects = dict(state.workers), dict(state.slots), dict(state.suspects)
        self.state = replace(state, now_s=now_s, workers=self.workers, slots=self.slots, suspects=self.suspects)
        self.actions: list[Action] = []
        self._now_s = now_s

    # Events

    def take(self, event: ElasticEvent) -> None:
        """Enters the event into the state."""
        if isinstance(event, Tick):
            return
        worker = self.workers.get(event.worker)
        if worker is None:
            return
        if isinstance(event, Ready):
            if worker.standing is Standing.COMING:
                self._set(worker, Standing.READY)
        elif isinstance(event, (Within, Done, Waits)):
            if worker.standing in (*_IN_GENERATION, Standing.DONE) and event.generation == self.state.generation:
                self._on_course(worker, event)
        elif isinstance(event, Committed):
            self.workers[worker.number] = replace(worker, has_state=True)
            if event.is_kept:
                self.state.kept = {**self.state.kept, worker.slot: event.number}
        else:
            self._on_ended(worker, event)

    def _on_course(self, worker: Worker, event: Within | Done | Waits) -> None:
        if isinstance(event, Within):
            self._set(worker, Standing.WITHIN, has_state=worker.has_state or event.generation == 1)
        elif isinstance(event, Done):
            self._set(worker, Standing.DONE)
        else:
            self._on_waits(worker, event)

    def _on_waits(self, worker: Worker, event: Waits) -> None:
        self._set(worker, Standing.READY, has_state=worker.has_state or event.has_state)
        self.suspects.pop(worker.number, None)
        self._gather(f"worker {worker.number} has left it")
        culprit = None if event.culprit is None else self.workers.get(event.culprit)
        if culprit is not None and culprit.standing in _IN_GENERATION:
            self.suspects.setdefault(culprit.number, self._now_s + _CULPRIT_S)

    def _on_ended(self, worker: Worker, event: Ended) -> None:
        del self.workers[worker.number]
        self.suspects.pop(worker.number, None)
        is_member = worker.number in self.state.members
        is_done = worker.standing is Standing.DONE or (
            not event.has_failed and is_member and worker.standing is not Standing.ENDING
        )
        if self.state.phase is Phase.FINISHING or is_done or (not event.has_failed and self.state.generation == 0):
            self._enter(Phase.FINISHING)
            return
        rank = f" (rank {self.state.members.index(worker.number)})" if is_member else ""
        self._report(f"worker {worker.number}{rank} {event.how}")
        record = self.slots.get(worker.slot, SlotRecord())
        failures = record.failures + 1 if self._now_s - worker.started_s < _SOON_S else 1
        pause_s = 0.0 if failures == 1 else min(_BACKOFF_MAX_S, 2.0 ** min(failures - 2, 16))
        self.slots[worker.slot] = SlotRecord(failures, self._now_s + pause_s)
        if is_member:
            self._gather(f"worker {worker.number}{rank} {event.how}")

    # Decisions

    def settle(self) -> None:
        """Decides all that can be decided now."""
        before = None
        while before is not self.state.phase:
            before = self.state.phase
            _DECISIONS[before](self)
        if self.state.phase in _REPLACING:
            self._replace()

    def start(self) -> None:
        """STARTING: seats the first workers once all have come, or enough of them in time."""
        ready, limits = self._standing(Standing.READY), self.state.limits
        is_late = self._now_s >= self.state.since_s + limits.start_timeout_s
        if len(ready) >= limits.size or (is_late and len(ready) >= limits.min_size):
            self._seat()
        elif is_late:
            came = f"{_ranks(len(ready))} of {limits.size} called init() within {limits.start_timeout_s:g} s"
            self._finish(f"{came} (--start-timeout), of at least {limits.min_size} (--min-np)", EXIT_ELASTIC_TIMEOUT)
        elif self.state.started and not self.workers:
            self._finish()  # all have failed: so would others

    def form(self) -> None:
        """FORMING: trains once all are in the generation; gives it up where some are not in time."""
        late = [worker for worker in self._members() if worker.standing not in (Standing.WITHIN, Standing.DONE)]
        if not late:
            self._run()
        elif self._now_s >= self.state.since_s + self.state.limits.start_timeout_s:
            for worker in late:  # those that only wait for others leave now
                self.suspects.setdefault(worker.number, self._now_s + _LATE_S)
            self._gather(f"not all ranks were through init() after {self.state.limits.start_timeout_s:g} s")

    def train(self) -> None:
        """RUNNING: announces newcomers that can be seated, once there are any, and again once there are none."""
        can_grow = len(self.state.members) < self.state.limits.max_size and not self._is_at_reset_limit()
        added = can_grow and bool(self._standing(Standing.READY))
        if added != self.state.is_announced:
            self.state.is_announced, self.state.changes = added, self.state.changes + 1
            self.actions.append(Announce(self.state.generation, self.state.changes, added))

    def gather(self) -> None:
        """GATHERING: waits until no member is in the generation any more; kills those that do not leave."""
        is_late = self._now_s >= self.state.since_s + self.state.limits.gather_timeout_s
        for worker in self._members():
            if worker.standing in _IN_GENERATION:
                if self.suspects.get(worker.number, float("inf")) <= self._now_s:
                    self._kill(worker, "does not go on")
                elif is_late:
                    limit_s = self.state.limits.gather_timeout_s
                    self._kill(worker, f"has not left generation {self.state.generation} within {limit_s:g} s")
        if all(worker.standing is Standing.READY for worker in self._members()):
            self._seat_or_wait()

    def wait(self) -> None:
        """SHORT: seats workers once there are enough; gives up in the end."""
        limits = self.state.limits
        self._seat_or_wait()
        if self.state.phase is Phase.SHORT and self._now_s >= self.state.since_s + limits.elastic_timeout_s:
            came = f"{_ranks(len(self._standing(Standing.READY)))} within {limits.elastic_timeout_s:g} s"
            self._finish(f"{came} (--elastic-timeout), of at least {limits.min_size} (--min-np)", EXIT_ELASTIC_TIMEOUT)

    def end(self) -> None:
        """FINISHING: one worker has ended, well or after its training; the rest of its generation does so, too."""
        for worker in list(self.workers.values()):
            is_newcomer = self.state.generation > 0 and worker.number not in self.state.members
            if is_newcomer and worker.standing is not Standing.ENDING:
                self._kill(worker, "")
        left = [worker.number for worker in self._standing(Standing.READY)]
        if left:
            self._finish(
                f"worker {left[0]} has work left, but another one has come to its end: all ranks have to come to the "
                "end of the script together",
                1,
            )
        elif not self.workers:
            self._finish()

    # Parts of decisions

    def _seat_or_wait(self) -> None:
        ready = self._standing(Standing.READY)
        living = [worker for worker in self.workers.values() if worker.standing is not Standing.ENDING]
        if not any(worker.has_state for worker in living) and not self._goes_on_from_memory():
            self._finish("no rank is left that has the state of the training" if self.workers else "")
        elif len(ready) >= self.state.limits.min_size and self._has_state(ready):
            self._seat()
        elif self.state.phase is not Phase.SHORT:
            if ready:
                self._report(f"{_ranks(len(ready))} left: training waits for {self.state.limits.min_size} (--min-np)")
            self._enter(Phase.SHORT)

    def _goes_on_from_memory(self) -> bool:
        """Whether the next workers of slots have what was learnt. If that has led to no commit before, it does not."""
        state = self.state
        latest = max(state.kept.values(), default=-1)
        if state.phase is not Phase.SHORT and (latest <= state.restored or self._is_at_reset_limit()):
            return False
        if latest > state.restored:
            state.restored = latest
            self._report(f"no rank is left: others go on from commit {latest}")
        return bool(state.kept)

    def _has_state(self, ready: list[Worker]) -> bool:
        """Whether workers have the state, or the latest commit in memory; in the end, any commit there."""
        state = self.state
        if any(worker.has_state for worker in ready):
            return True
        own = max((state.kept[worker.slot] for worker in ready if worker.slot in state.kept), default=-1)
        is_late = state.phase is Phase.SHORT and self._now_s >= state.since_s + state.limits.elastic_timeout_s
        if own < max(state.kept.values(), default=0) and (own < 0 or not is_late):
            return False
        if own < state.restored:
            self._report(f"the slot with commit {state.restored} has no worker: others go on from commit {own}")
            state.restored = own
            state.kept = {slot: number for slot, number in state.kept.items() if number <= own}
        return True

    def _seat(self) -> None:
        state = self.state
        if state.generation > 0 and self._is_at_reset_limit():
            self._finish(f"ranks cannot be placed anew any more (--reset-limit {state.limits.reset_limit})")
            return
        ready = sorted(self._standing(Standing.READY), key=lambda worker: (not worker.has_state, worker.number))
        state.members = tuple(worker.number for worker in ready[: state.limits.max_size])
        state.generation += 1
        state.changes, state.is_announced = 0, False
        self.suspects.clear()
        for number in state.members:
            self._set(self.workers[number], Standing.SEATED)
        self.actions.append(WriteSeats(state.generation, state.members))
        self._enter(Phase.FORMING)

    def _run(self) -> None:
        state = self.state
        if state.idle_since_s is not None:
            idle_s = self._now_s - state.idle_since_s
            if state.generation > 1:
                state.lost_s += idle_s
                names = ", ".join(map(str, state.members))
                who = f"{_ranks(len(state.members))} (worker{'s' if len(state.members) > 1 else ''} {names})"
                self._report(f"generation {state.generation}: {who} after {idle_s:.1f} s")
            state.idle_since_s = None
        self._enter(Phase.RUNNING)

    def _gather(self, reason: str) -> None:
        if self.state.phase not in (Phase.FORMING, Phase.RUNNING):
            return
        if self.state.phase is Phase.FORMING:  # they may wait for each other in init()
            self.actions.append(Fail(self.state.generation, reason))
        if self.state.idle_since_s is None:
            self.state.idle_since_s = self._now_s
        self._enter(Phase.GATHERING)

    def _replace(self) -> None:
        """Starts workers for slots that have none. Before the first generation, only if others have come through."""
        state = self.state
        is_first = state.started == 0
        has_come = any(worker.standing is Standing.READY for worker in self.workers.values())
        if self._is_at_reset_limit() or (state.generation == 0 and not is_first and not has_come):
            return
        free = [slot for slot in _free_slots(state) if self._now_s >= self.slots.get(slot, SlotRecord()).free_s]
        size = len(self.workers) + len(free)
        for slot in free:
            number = state.started
            state.started += 1
            forecast = StartWorker(number, slot, state.generation + 1, len(self.workers), size)
            self.workers[number] = Worker(number, slot, self._now_s)
            self.actions.append(forecast)
            if not is_first:
                self._report(f"worker {number} starts")

    def _kill(self, worker: Worker, why: str) -> None:
        self._set(worker, Standing.ENDING)
        self.suspects.pop(worker.number, None)
        self.actions.append(Kill(worker.number))
        if why:
            self._report(f"worker {worker.number} {why}, and is killed")

    def _finish(self, reason: str = "", code: int | None = None) -> None:
        self._enter(Phase.OVER)
        self.actions.append(Finish(reason, code))

    def _enter(self, phase: Phase) -> None:
        self.state.phase, self.state.since_s = phase, self._now_s

    def _set(self, worker: Worker, standing: Standing, *, has_state: bool | None = None) -> None:
        has_state = worker.has_state if has_state is None else has_state
        self.workers[worker.number] = replace(worker, standing=standing, has_state=has_state)

    def _report(self, text: str) -> None:
        self.actions.append(Report(text))

    def _is_at_reset_limit(self) -> bool:
        limit = self.state.limits.reset_limit
        return limit is not None and self.state.generation > limit

    def _members(self) -> list[Worker]:
        """The workers of the generation whose processes exist."""
        return [self.workers[number] for number in self.state.members if number in self.workers]

    def _standing(self, standing: Standing) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.standing is standing]


_DECISIONS: dict[Phase, Callable[[_Turn], None]] = {
    Phase.STARTING: _Turn.start,
    Phase.FORMING: _Turn.form,
    Phase.RUNNING: _Turn.train,
    Phase.GATHERING: _Turn.gather,
    Phase.SHORT: _Turn.wait,
    Phase.FINISHING: _Turn.end,
    Phase.OVER: lambda _turn: None,
}
