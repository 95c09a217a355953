"""The driver of an elastic job: a pure state machine, without clock and without I/O.

It decides which workers form the next *generation*, and when. A generation is seated only when every member of the one
before has left it or is gone: so never two of them are at work. Each wait has a deadline, see ``deadline_s``. Events
about another generation than the last one are stale, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from horo.runner.config import EXIT_ELASTIC_TIMEOUT, EXIT_TERMINATED, EXIT_UNREACHABLE, Elastic
from horo.runner.elastic.hosts import free_slots, free_time_s, host_deadlines_s, is_leaving, stays
from horo.runner.elastic.next_generation import awaited, changes_of, may_come, next_members
from horo.runner.elastic.restarts import RestartTurn
from horo.runner.elastic.state import (
    Action,
    Committed,
    Done,
    DriverState,
    ElasticEvent,
    Ended,
    FoundHost,
    HostEvent,
    HostsFound,
    Phase,
    Reach,
    Ready,
    Refused,
    Standing,
    Tick,
    Waits,
    Within,
    Worker,
)
from horo.runner.elastic.turn import ENDS_WELL, ranks_in_words

__all__ = ["begin", "deadline_s", "lost_s", "step"]

_LATE_S = 10.0
"""The time for which a worker may go on with ``init()`` that has been given up."""
_GONE_S = 5.0
"""The time that members on a host that is not found any more have to leave a generation that others have left."""
_REMIND_S = 60.0
"""The time after which hororun names those for whose end it waits; then after twice as long, and so on."""
_SENT_AWAY = (Standing.DISMISSED, Standing.ADRIFT)
_IN_GENERATION = (Standing.SEATED, Standing.WITHIN)
_REPLACING = (Phase.STARTING, Phase.FORMING, Phase.RUNNING, Phase.GATHERING, Phase.SHORT)


def begin(
    limits: Elastic, hosts: Sequence[FoundHost], now_s: float, *, seed: int = 0
) -> tuple[DriverState, list[Action]]:
    """The state of a new job, and the actions that reach its first hosts."""
    state = DriverState(limits, now_s, since_s=now_s, idle_since_s=now_s, seed=seed)
    return step(state, HostsFound(tuple(hosts)), now_s)


def step(state: DriverState, event: ElasticEvent, now_s: float) -> tuple[DriverState, list[Action]]:
    """The state after an event, and the actions that it asks for, in their order.

    Its ``now_s`` stays as it was where nothing is to be decided: so does ``deadline_s`` then.
    """
    if isinstance(event, Committed) and _decides_nothing(state, event):
        kept = {**state.kept, state.workers[event.worker].slot: event.number} if event.is_kept else state.kept
        return DriverState(**{**vars(state), "kept": kept, "committed": event.number}), []
    turn = _Turn(state, now_s)
    if turn.state.phase != Phase.OVER:
        turn.take(event)
        turn.settle()
    return turn.state, turn.actions


def _decides_nothing(state: DriverState, event: Committed) -> bool:
    """Whether a commit is one of many that a worker in training reports."""
    worker = state.workers.get(event.worker)
    is_known = worker is not None and worker.has_state and worker.standing is Standing.WITHIN
    return is_known and state.has_trained and state.phase is Phase.RUNNING


def deadline_s(state: DriverState) -> float | None:
    """The time of the next ``Tick`` that may change something; None: only another event does."""
    limits, times = state.limits, [*state.suspects.values(), *host_deadlines_s(state)]
    if state.phase is Phase.OVER:
        return None
    if state.phase in (Phase.CONNECTING, Phase.STARTING, Phase.FORMING):
        times.append(state.since_s + limits.start_timeout_s)
    elif state.phase is Phase.GATHERING:
        times.append(sum(_gather_limit(state)))
    if state.phase in (Phase.CONNECTING, Phase.SHORT):
        times.append(state.since_s + limits.elastic_timeout_s)
    if state.phase in _REPLACING:
        times += [free_time_s(state, slot) for slot in free_slots(state)]
        workers = state.workers.values()
        if limits.join == "now" or not all(stays(state, each) for each in workers):
            times += [each.started_s + limits.start_timeout_s for each in workers if may_come(state, each)]
    elif state.phase is Phase.FINISHING:
        times.append(_reminder_s(state, state.now_s))
    times += state.late.values()
    if state.leaves_s is not None:
        times.append(state.leaves_s)
    return min((each for each in times if each > state.now_s), default=None)


def lost_s(state: DriverState) -> float:
    """The time in which training has not gone on, since it began."""
    idle_s = 0.0 if state.idle_since_s is None or state.generation == 0 else state.now_s - state.idle_since_s
    return sum(each.still_s for each in state.history) + idle_s


def _gather_limit(state: DriverState) -> tuple[float, float]:
    """The begin and the length of the time in which members have to leave the generation.

    If only a host does not answer, they may train with its ranks until their next commit.
    """
    if state.broken_s is None:
        return state.since_s, state.limits.elastic_timeout_s
    return state.broken_s, state.limits.gather_timeout_s


def _reminder_s(state: DriverState, time_s: float) -> float:
    """The first time after the given one at which a line names those that are awaited."""
    pause_s = _REMIND_S
    while state.since_s + pause_s <= time_s:
        pause_s *= 2
    return state.since_s + pause_s


class _Turn(RestartTurn):
    """One step."""

    # Events

    def take(self, event: ElasticEvent) -> None:
        """Enters the event into the state."""
        if isinstance(event, HostEvent):
            self.take_host_event(event)
        if isinstance(event, (HostEvent, Tick)):
            return
        worker = self.workers.get(event.worker)
        if worker is None or (worker.standing is Standing.ADRIFT and not isinstance(event, Ended)):
            return
        if isinstance(event, Ready):
            if worker.standing is Standing.COMING:
                self._set(worker, Standing.READY)
        elif isinstance(event, (Within, Done, Waits)):
            if worker.standing in (*_IN_GENERATION, *ENDS_WELL) and event.generation == self.state.generation:
                self._on_course(worker, event)
        elif isinstance(event, Committed):
            self._set(worker, worker.standing, has_state=True)
            self.state.has_trained = True
            self.state.committed = event.number
            if event.is_kept:
                self.state.kept = {**self.state.kept, worker.slot: event.number}
        elif isinstance(event, Ended):
            self._on_ended(worker, event)
        elif self.state.generation:
            self._on_ended(worker, Ended(worker.number, True, f"could not be started: {event.reason}"))
        else:
            self._leave_out(worker, event)

    def _on_course(self, worker: Worker, event: Within | Done | Waits) -> None:
        if isinstance(event, Within):
            self._set(worker, Standing.WITHIN, has_state=worker.has_state or event.generation == 1)
        elif isinstance(event, Done):
            self._set(worker, Standing.KEPT if event.is_kept else Standing.DONE)
            self._note_end(worker)
        else:
            self._on_waits(worker, event)

    def _note_end(self, worker: Worker) -> None:
        """The worker has come to the end of a training: others have some time, if they do not write their state.

        Those that are known to have come there before may be in the next training, and wait for this one.
        """
        if self.late.pop(worker.number, None) is None and self.state.leaves_s is None:
            due_s = self._now_s + self.state.limits.gather_timeout_s
            self.late |= {each.number: due_s for each in self._members() if each.standing is Standing.WITHIN}

    def _on_waits(self, worker: Worker, event: Waits) -> None:
        self._set(worker, Standing.READY, has_state=worker.has_state or event.has_state)
        self.suspects.pop(worker.number, None)
        self._break()
        if event.commit >= 0:
            self.state.committed = event.commit
        counts = [each for each in (self.state.steps_lost, event.steps_lost) if each is not None]
        self.state.steps_lost = max(counts, default=None)
        self._gather(f"worker {worker.number} has left it")
        culprit = None if event.culprit is None else self.workers.get(event.culprit)
        if culprit is not None and culprit.standing in _IN_GENERATION:
            self.suspects.setdefault(culprit.number, self._now_s + event.culprit_s)

    def _on_ended(self, worker: Worker, event: Ended) -> None:
        del self.workers[worker.number]
        self.suspects.pop(worker.number, None)
        is_member, is_sent_away = worker.number in self.state.members, worker.standing in _SENT_AWAY
        if is_member:
            self._break()
        may_end = (is_member or self.state.generation == 0) and not worker.is_going
        has_ended_well = worker.standing in ENDS_WELL or (may_end and not event.has_failed)
        if self.state.phase is Phase.FINISHING or has_ended_well:
            self._enter(Phase.FINISHING)
        elif event.is_error and not self.state.has_trained and not is_sent_away:
            self._finish(failed=worker.number)  # a mistake in the script, which others make, too
        else:
            if not is_sent_away:
                self._report(f"{self._name(worker)} {event.how}")
                if is_member:
                    self.state.error = event.how if event.is_error else ""
                self._note_failure(worker)
                if self.state.limits.on_failure == "host":
                    self._end_others(worker)
            if is_member:
                self._gather(f"{self._name(worker)} {event.how}")

    def _leave_out(self, worker: Worker, event: Refused) -> None:
        """The worker could not be started: the first generation does without its slot."""
        del self.workers[worker.number]
        self.state.refused = (*self.state.refused, event)
        host = self.hosts.get(worker.slot.host)
        if host is not None and host.free_s <= self._now_s:
            self._cool(host, self.state.limits.start_timeout_s)

    def _lose_worker(self, worker: Worker, how: str, may_run_s: float | None) -> None:
        """The host of the worker is lost, and so is the worker."""
        self.suspects.pop(worker.number, None)
        is_member, name = worker.number in self.state.members, self._name(worker)
        until_s = self._now_s + (may_run_s or 0.0)
        self.workers[worker.number] = replace(worker, standing=Standing.ADRIFT, until_s=until_s)
        if self.state.phase is Phase.FINISHING or worker.standing in ENDS_WELL:
            self._enter(Phase.FINISHING)
        elif is_member:
            self.state.error = ""
            if may_run_s is None and not self.state.is_broken:
                self.silent[worker.slot.host] = self._now_s + self.state.limits.elastic_timeout_s
            if self.state.phase in (Phase.FORMING, Phase.RUNNING):  # nothing may be broken for it and the others
                self._announce(replace(self.state.announced, removed=True))
            self._gather(f"{name} {how}")

    def _end_others(self, worker: Worker) -> None:
        """The worker has failed, and no other one is to run on its host, if other hosts can go on without."""
        host = self.hosts[worker.slot.host]
        others = [each for each in self.workers.values() if each.slot.host == host.name and self._stays(each)]
        elsewhere = [each for each in self.workers.values() if each.slot.host != host.name and self._stays(each)]
        goes_on = any(each.has_state for each in elsewhere) if self.state.generation else bool(elsewhere)
        if host.free_s > self._now_s and goes_on:
            for each in others:
                if each.standing not in ENDS_WELL:
                    self._dismiss(each, f"worker {worker.number} on its host has failed")

    # Decisions

    def settle(self) -> None:
        """Decides all that can be decided now."""
        self.forget_adrift()
        if self.state.phase is not Phase.FINISHING:
            self.reach_hosts()
        if self.state.phase is Phase.RUNNING and self.state.leaves_s is None:
            self._replace()  # changes depend on who is about to come
        before = None
        while before is not self.state.phase:
            before = self.state.phase
            _DECISIONS[before](self)
            self._leave_in_time()
            self._end_in_time()
        if self.state.phase in _REPLACING and self.state.leaves_s is None:
            self._replace()

    def connect(self) -> None:
        """CONNECTING: begins once there are slots for all ranks, or enough of them and nothing is awaited."""
        limits, waited_s = self.state.limits, self._now_s - self.state.since_s
        room = len(free_slots(self.state))
        is_coming = any(host.reach is Reach.COMING for host in self.hosts.values())
        may_grow = is_coming or (limits.is_discovered and waited_s < limits.start_timeout_s)
        if room >= limits.size or (room >= limits.min_size and not may_grow):
            self._enter(Phase.STARTING)
        elif waited_s >= limits.elastic_timeout_s or not (is_coming or limits.is_discovered):
            has = f"{room} slot{'' if room == 1 else 's'}"
            within = f" within {limits.elastic_timeout_s:g} s (--elastic-timeout)" if limits.is_discovered else ""
            code = EXIT_ELASTIC_TIMEOUT if limits.is_discovered else EXIT_UNREACHABLE
            self._finish(f"{has} for ranks{within}, of at least {limits.min_size} (--min-np)", code)

    def start(self) -> None:
        """STARTING: seats the first workers once all have come, or enough of them in time."""
        ready, limits = next_members(self.state), self.state.limits
        due_s = self.state.since_s + limits.start_timeout_s
        is_late = self._now_s >= due_s
        staying = [worker for worker in self.workers.values() if self._stays(worker)]
        if staying:
            self._dismiss_leavers()
        in_time = [slot for slot in free_slots(self.state) if free_time_s(self.state, slot) < due_s]
        expected = min(limits.size, len(staying) + len(in_time))
        may_grow = limits.is_discovered or any(host.reach is Reach.COMING for host in self.hosts.values())
        refused = self.state.refused[-1:]
        if len(ready) >= (limits.min_size if is_late else max(limits.min_size, expected)):
            self._seat()
        elif refused and expected < limits.min_size and not may_grow:
            self._finish(refused[0].reason, refused[0].code)
        elif is_late:
            came = f"{ranks_in_words(len(ready))} of {limits.size} called init() within {limits.start_timeout_s:g} s"
            self._finish(f"{came} (--start-timeout), of at least {limits.min_size} (--min-np)", EXIT_ELASTIC_TIMEOUT)
        elif self.state.started and not self.workers and not (refused and may_grow):
            self._finish()  # all have failed: so would others

    def form(self) -> None:
        """FORMING: trains once all are in the generation; gives it up where some are not in time."""
        late = [worker for worker in self._members() if worker.standing not in (Standing.WITHIN, *ENDS_WELL)]
        if not late:
            self._run()
        elif self._now_s >= self.state.since_s + self.state.limits.start_timeout_s:
            for worker in late:  # those that only wait for others leave now
                self.suspects.setdefault(worker.number, self._now_s + _LATE_S)
            self._gather(f"not all ranks were through init() after {self.state.limits.start_timeout_s:g} s")

    def train(self) -> None:
        """RUNNING: announces who has come or is to leave, and again once that is not so any more."""
        state = self.state
        change = changes_of(state, can_grow=not self._is_at_reset_limit())
        if change != state.announced:
            self._announce(change)
        if any(worker.has_state for worker in self._members() if self._stays(worker)):
            self._dismiss_leavers()

    def gather(self) -> None:
        """GATHERING: waits until no member is in the generation any more; kills those that do not leave."""
        begin_s, limit_s = _gather_limit(self.state)
        goes_on = self.state.is_broken and any(each.has_state for each in self.workers.values() if self._stays(each))
        for worker in self._members():
            if worker.standing in _IN_GENERATION:
                if goes_on and not self._is_found(worker):
                    self.suspects.setdefault(worker.number, self._now_s + _GONE_S)
                if self.suspects.get(worker.number, float("inf")) <= self._now_s:
                    self._kill(worker, "does not go on")
                elif self._now_s >= begin_s + limit_s:
                    self._kill(worker, f"has not left generation {self.state.generation} within {limit_s:g} s")
        if all(worker.standing is Standing.READY or self._cannot_train(worker) for worker in self._members()):
            self._hurry()
            if not (self.state.announced.added and awaited(self.state)):
                self._seat_or_wait()

    def wait(self) -> None:
        """SHORT: seats workers once there are enough; gives up in the end."""
        limits = self.state.limits
        self._seat_or_wait()
        if self.state.phase is Phase.SHORT and self._now_s >= self.state.since_s + limits.elastic_timeout_s:
            came = f"{ranks_in_words(len(self._standing(Standing.READY)))} within {limits.elastic_timeout_s:g} s"
            self._finish(f"{came} (--elastic-timeout), of at least {limits.min_size} (--min-np)", EXIT_ELASTIC_TIMEOUT)

    def end(self) -> None:
        """FINISHING: one worker has ended, well or after its training; the rest of its generation does so, too."""
        for worker in list(self.workers.values()):
            is_newcomer = self.state.generation > 0 and worker.number not in self.state.members
            if is_newcomer and worker.standing in (Standing.COMING, Standing.READY):
                self._dismiss(worker, "the training is over")
        left = [worker.number for worker in self._standing(Standing.READY)]
        if left and self.state.leaves_s is not None:
            self._finish("", 0)
        elif left:
            self._finish(
                f"worker {left[0]} has work left, but another one has come to its end: all ranks have to come to the "
                "end of the script together",
                1,
            )
        elif not self.workers:
            self._finish()
        elif self.state.leaves_s is None and _reminder_s(self.state, self._before_s) <= self._now_s:
            self._name_awaited()

    # Parts of decisions

    def _is_found(self, worker: Worker) -> bool:
        host = self.hosts.get(worker.slot.host)
        return host is not None and host.is_listed

    def _cannot_train(self, worker: Worker) -> bool:
        """Whether a member that may still run is not awaited: others have left the generation, and it is out of reach
        or has been killed on a host that may be."""
        is_away = worker.standing is Standing.ADRIFT or (worker.is_going and is_leaving(self.state, worker))
        return self.state.is_broken and is_away

    def _name_awaited(self) -> None:
        names = [self._name(worker) for worker in self.workers.values()]
        still = "still runs" if len(names) == 1 else "still run"
        self._report(
            f"{' and '.join(names)} {still}, {self._now_s - self.state.since_s:.0f} s after another one has ended: "
            "hororun waits without a limit, since ranks may save or evaluate for long; kill one that hangs, or end the "
            "job with Ctrl-C"
        )

    def _leave_in_time(self) -> None:
        """Ends the job once all have to leave and nobody is at work."""
        state = self.state
        if state.leaves_s is None or state.phase is Phase.OVER:
            return
        left = sorted(each.number for each in self.workers.values() if each.standing is not Standing.KEPT)
        if self._now_s >= state.leaves_s and left:
            names = ", ".join(map(str, left))
            names = f"worker {names} still runs" if len(left) == 1 else f"workers {names} still run"
            self._finish(f"the time to leave is over, and {names}", EXIT_TERMINATED)
        elif self._now_s >= state.leaves_s and self.workers:
            self._finish("", 0)  # all have kept their commit, and are about to end
        elif state.phase in (Phase.CONNECTING, Phase.STARTING):
            self._finish("", EXIT_TERMINATED)
        elif state.phase is Phase.SHORT:
            self._finish("", 0)

    def _end_in_time(self) -> None:
        """Kills members that do not come to the end of the training, where all others have."""
        if self.state.phase not in (Phase.RUNNING, Phase.GATHERING, Phase.FINISHING):
            return
        for worker in self._members():
            if worker.standing is Standing.WITHIN and self.late.get(worker.number, float("inf")) <= self._now_s:
                self._kill(worker, "does not come to the end of hvd.elastic.run like the others")

    def _seat_or_wait(self) -> None:
        living = [worker for worker in self.workers.values() if not worker.is_going]
        if self.state.leaves_s is not None:
            self._finish("", 0)
            return
        ready = next_members(self.state)
        needs_memory = self.state.has_learnt and not any(worker.has_state for worker in living)
        if not living or needs_memory:
            reason = self._why_not_from_memory()
            if reason is not None:
                self._finish(reason)
                return
        if self._is_at_reset_limit():
            limit = self.state.limits.reset_limit
            self._finish(f"ranks cannot be placed anew any more (--reset-limit {limit})")
        elif why := self._why_not_again():
            self._finish(why)
        elif len(ready) >= self.state.limits.min_size and not self.silent and self._has_state(ready):
            self._seat()
        elif self.state.phase is not Phase.SHORT:
            if self.silent:
                hosts, limit_s = " and ".join(self.silent), self.state.limits.elastic_timeout_s
                self._report(
                    f"generation {self.state.generation} may still train on {hosts}: new ranks wait until {hosts} "
                    f"answer{'s' if len(self.silent) == 1 else ''}, for at most {limit_s:g} s (--elastic-timeout)"
                )
            elif ready:
                self._report(
                    f"{ranks_in_words(len(ready))} left: training waits for {self.state.limits.min_size} (--min-np)"
                )
            self._enter(Phase.SHORT)
        elif any(worker.has_state for worker in ready):
            self._dismiss_leavers()


_DECISIONS: dict[Phase, Callable[[_Turn], None]] = {
    Phase.CONNECTING: _Turn.connect,
    Phase.STARTING: _Turn.start,
    Phase.FORMING: _Turn.form,
    Phase.RUNNING: _Turn.train,
    Phase.GATHERING: _Turn.gather,
    Phase.SHORT: _Turn.wait,
    Phase.FINISHING: _Turn.end,
    Phase.OVER: lambda _turn: None,
}
