"""Carries out the decisions of the driver of an elastic job."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from horo.config.hosts import ranges
from horo.runner.agent.rank_reports import NoteReader
from horo.runner.agent.ranks import Noted, NotStarted, reap
from horo.runner.config import EXIT_SETUP, EXIT_USAGE, JobError
from horo.runner.elastic import driver
from horo.runner.elastic.agents import HostsSupervisor
from horo.runner.elastic.discovery import Discovery
from horo.runner.elastic.state import (
    Action,
    Announce,
    Committed,
    Connect,
    Disconnect,
    Dismiss,
    Done,
    DriverState,
    ElasticEvent,
    Ended,
    Fail,
    Finish,
    HostsFound,
    Kill,
    Leave,
    Phase,
    Ready,
    Refused,
    Report,
    StartWorker,
    Tick,
    Waits,
    Within,
    WriteSeats,
)
from horo.runner.elastic.table import courses, table
from horo.runner.job.placement import PlacementError
from horo.runner.job.report import Ending, how_it_ended, how_it_failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from horo.bootstrap.store.client import StoreClient
    from horo.runner.hosts import HostSpec
    from horo.runner.loop import Timer

__all__ = ["ElasticSupervisor"]

_STORE_S = 10.0
_LEAVE_SHARE = 0.5
"""Of the grace time, that which ranks have until they commit. After it they get SIGTERM, and keep the last commit."""


class ElasticSupervisor(HostsSupervisor):
    """A job that goes on without a rank that has failed; its processes are workers, see ``driver``."""

    _state: DriverState
    _client: StoreClient

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seats_given: dict[int, int] = {}
        self._came: list[int] = []
        self._dismissed: dict[int, str] = {}  # workers for which there was nothing left to do, and the reason
        self._timer: Timer | None = None
        self._discovery: Discovery | None = None
        self._is_finished = False
        self._finish = Finish()

    def _start_ranks(self) -> None:
        from horo.bootstrap.store.client import StoreClient  # noqa: PLC0415 - --help does without

        limits = self._job.elastic
        if limits is None:
            raise JobError("an elastic job has limits", EXIT_USAGE)
        slots = [host.slots for host in self._hosts if host.slots is not None]
        is_open = limits.is_discovered or len(slots) < len(self._hosts)
        if self._job.oversubscribe:
            self._least_slots = -(-limits.max_size // max(1, len(self._hosts)))
        elif limits.max_size > sum(slots) and not is_open:
            raise PlacementError(
                f"up to {limits.max_size} ranks (--max-np, or else -np) need as many slots, and there "
                f"{'is 1' if sum(slots) == 1 else f'are {sum(slots)}'}: name more with -H HOST:N, or allow it with "
                "--oversubscribe"
            )
        self._serve_hosts(may_grow=limits.is_discovered)
        if self._store is None:
            raise JobError("the store is not open")
        *others, last = self._store.endpoints
        self._client = StoreClient(*last, self._secret, _STORE_S, others)  # that of loopback
        self._state, actions = driver.begin(limits, list(map(self._found, self._hosts)), self._loop.now_s)
        self._do(actions)
        if limits.is_discovered:
            self._discovery = Discovery(
                self._loop,
                limits.script,
                self._environment,
                slots_per_host=limits.slots_per_host,
                found=self._on_found,
                failed=lambda sentence: self._stop_for(JobError(sentence, EXIT_SETUP)),
                say=self._console.say,
            )
            self._discovery.run()

    # Events

    def _on_found(self, hosts: list[HostSpec]) -> None:
        for host in hosts:
            self._know(host)
        self._take(HostsFound(tuple(map(self._found, hosts))))

    def _on_note(self, event: Noted) -> None:
        for report in self._notes.setdefault(event.rank, NoteReader()).feed(event.data):
            for told in _events_of(event.rank, report):
                self._take(self._with_time_to_end(told))
        self._stop_if_clear()

    def _with_time_to_end(self, event: ElasticEvent) -> ElasticEvent:
        """A worker that an exception ends has the grace time for its exit handlers; one that hangs has not."""
        if isinstance(event, Waits) and event.culprit is not None:
            culprit = self._notes.get(event.culprit)
            if culprit is not None and culprit.note.error:
                return replace(event, culprit_s=self._job.grace_s)
        return event

    def _on_ending(self, ending: Ending) -> None:
        if not ending.lost:  # else all of its host is
            is_error = bool(ending.code or ending.note.error)
            self._take(Ended(ending.rank, ending.failed, how_it_failed(ending), is_error))
        self._stop_if_clear()
        if self._is_finished and not self._running and not self._stopping:
            self._release()

    def _end(self, rank: int, *, asked: bool = False, **how: Any) -> None:
        super()._end(rank, asked=asked or rank in self._dismissed, **how)

    def _on_signal(self, number: int) -> None:
        limits = self._job.elastic
        keeps = limits is not None and limits.keeps and self._running and not self._stopping
        if number == signal.SIGTERM and keeps and self._state.leaves_s is None:
            self._take(Leave(None, _LEAVE_SHARE * self._job.grace_s))
        else:
            super()._on_signal(number)

    def _take(self, event: ElasticEvent) -> None:
        if not self._stopping:
            now_s = self._loop.now_s
            self._state, actions = driver.step(self._state, event, now_s)
            if self._state.now_s >= now_s:  # else nothing was to be decided
                self._do(actions)

    # Actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            self._do_one(action)
        if self._timer is not None:
            self._timer.cancel()
        due_s = driver.deadline_s(self._state)
        if due_s is not None:
            self._timer = self._loop.call_later(due_s - self._loop.now_s, lambda: self._take(Tick()))

    def _do_one(self, action: Action) -> None:
        from horo.bootstrap.generations import change_key, seat_entries  # noqa: PLC0415
        from horo.bootstrap.rendezvous import rank_is_missing  # noqa: PLC0415

        if isinstance(action, Connect):
            self._reach(action.host)
        elif isinstance(action, Disconnect):
            self._leave(action.host)
        elif isinstance(action, StartWorker):
            self._start_worker(action)
        elif isinstance(action, WriteSeats):
            self._console.first = action.workers[0]
            self._seats_given |= {worker: self._seats_given.get(worker, 0) + 1 for worker in action.workers}
            hosts = [self._host_of_rank[worker] for worker in action.workers]
            numbers = [self._seats_given[worker] for worker in action.workers]
            for key, value in seat_entries(self._id, action.generation, action.workers, hosts, numbers):
                self._client.set(key, value)
        elif isinstance(action, Fail):
            self._client.set(*rank_is_missing(self._id, action.generation, action.reason))
        elif isinstance(action, Announce):
            key = change_key(self._id, action.generation, action.number)
            self._client.set(key, action.change.encode())
        elif isinstance(action, (Kill, Dismiss)):
            if isinstance(action, Dismiss):
                self._dismissed[action.worker] = action.why
            self._end_worker(action.worker, at_once=isinstance(action, Kill))
        elif isinstance(action, Report):
            self._console.say(action.text)
        elif isinstance(action, Finish):
            self._end_all(action)

    def _on_not_started(self, event: NotStarted) -> None:
        self._take(Refused(event.rank, event.reason, event.code))

    def _end_all(self, finish: Finish) -> None:
        self._finish, self._is_finished = finish, True
        if self._discovery is not None:
            self._discovery.stop()
        if not self._running:
            self._release()
        elif finish.failed is not None:
            self._fail()
        else:
            self._stop()

    def _stop(self) -> None:
        if self._discovery is not None:
            self._discovery.stop()
        super()._stop()

    def _on_child(self, _number: int) -> None:
        parents = [*self._ranks_by_host(), *([self._discovery] if self._discovery is not None else [])]
        reap([each.on_child for each in parents])

    def _over(self) -> bool:
        is_discovering = self._discovery is not None and self._discovery.pid is not None
        return super()._over() and (self._stopping or self._is_finished) and not is_discovering

    # The end

    def _conclude(self) -> int:
        if not self._came and not self._finish.reason:
            return super()._conclude()
        if self._finish.reason:
            self._console.say(self._finish.reason)
        self._say_what_happened()
        members = self._state.members or self._came
        if self._finish.failed is None:
            self._endings = [ending for ending in self._endings if ending.rank in members]
        else:  # its failure is the first one, whatever others have failed before it
            self._endings.sort(key=lambda ending: ending.rank != self._finish.failed)
        if self._signal and self._state.phase is not Phase.OVER:  # the job has gone on after the failures before
            self._endings = [ending for ending in self._endings if ending.asked]
        if self._finish.code == 0 and not self._signal and not self._errors:
            return 0  # all were to leave: no failure before that is the cause
        code = super()._conclude()
        if self._finish.code is not None and not self._signal and not self._errors:
            return self._finish.code
        return code or (1 if self._finish.reason else 0)

    def _say_what_happened(self) -> None:
        """A table of the generations, and the workers that were in none; nothing if all has gone as it began."""
        if self._state.generation < 2:
            return
        still_s = driver.lost_s(self._state)
        count = f"{self._state.generation} generations of workers {ranges(self._came)}"
        self._console.say(f"{count}; training stood still for {still_s:.1f} s")
        for line in table(self._state.history, self._failed(self._endings), self._dismissed):
            self._console.say(line)

    def _failed(self, endings: Sequence[Ending]) -> dict[int, str]:
        """The failures of workers, by number."""
        gone = [each for each in endings if each.rank not in self._dismissed and each.failed and not each.asked]
        return {each.rank: each.note.error or how_it_ended(each) for each in gone}

    def _report_of(self, endings: Sequence[Ending], facts: Mapping[str, Any], **course: Any) -> dict[str, Any]:
        values = super()._report_of(endings, facts, **course)
        if self._finish.reason:
            values["exit"]["reasons"].append(self._finish.reason)
        if not self._came:
            return {**values, "generations": [], "stood_still_s": 0.0, "steps_lost": None}
        history = self._state.history
        steps = [each.steps_lost for each in history if each.steps_lost is not None]
        return {
            **values,
            "generations": courses(history, self._failed(endings), self._dismissed),
            "stood_still_s": driver.lost_s(self._state),
            "steps_lost": sum(steps) if steps else None,
        }


def _events_of(worker: int, report: dict[str, object]) -> list[ElasticEvent]:
    """The events in what a worker reports, which may be anything."""
    events: list[ElasticEvent] = []
    generation, culprit, commit = report.get("waits"), report.get("culprit"), report.get("commit")
    if isinstance(generation, int):
        named = culprit if isinstance(culprit, int) else None
        steps = report.get("steps")
        lost = steps if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0 else None
        last = commit if isinstance(commit, int) else -1
        events.append(Waits(worker, generation, named, commit is not None, steps_lost=lost, commit=last))
    elif isinstance(commit, int):
        events.append(Committed(worker, commit, report.get("kept") is True))
    within = report.get("within")
    if isinstance(within, int):
        events.append(Within(worker, within))
    done = report.get("done")
    if isinstance(done, int):
        events.append(Done(worker, done, report.get("kept") is True))
    if report.get("ready") is True:
        events.append(Ready(worker))
    return events
