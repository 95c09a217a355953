"""Carries out the decisions of the driver of an elastic job, on this host."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horo.config.hosts import ranges
from horo.runner.agent.command import StartError, with_python
from horo.runner.agent.rank_reports import NoteReader
from horo.runner.agent.ranks import Noted
from horo.runner.agent.workers import HostWorkers
from horo.runner.config import EXIT_USAGE, JobError
from horo.runner.elastic import driver
from horo.runner.elastic.state import (
    Action,
    Announce,
    Committed,
    Connect,
    Dismiss,
    Done,
    DriverState,
    ElasticEvent,
    Ended,
    Fail,
    Finish,
    FoundHost,
    HostUp,
    Kill,
    Leave,
    Phase,
    Ready,
    Report,
    StartWorker,
    Tick,
    Waits,
    Within,
    WriteSeats,
)
from horo.runner.job.placement import Placement, PlacementError
from horo.runner.job.report import Ending, how_it_ended, how_it_failed
from horo.runner.job.supervise import Supervisor

if TYPE_CHECKING:
    from horo.bootstrap.store.client import StoreClient
    from horo.runner.loop import Timer

__all__ = ["ElasticSupervisor"]

_STORE_S = 10.0
_LEAVE_SHARE = 0.5
"""Of the grace time, that which ranks have until they commit. After it they get SIGTERM, and keep the last commit."""


class ElasticSupervisor(Supervisor):
    """A job that goes on without a rank that has failed; its processes are workers, see ``driver``."""

    process_word = "worker"
    _state: DriverState
    _client: StoreClient
    _host_ranks: HostWorkers

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seats_given: dict[int, int] = {}
        self._came: list[int] = []
        self._dismissed: set[int] = set()  # newcomers for which there was nothing left to do
        self._timer: Timer | None = None
        self._finish = Finish()

    def _start_ranks(self) -> None:
        from horo.bootstrap.store.client import StoreClient  # noqa: PLC0415 - --help does without

        limits = self._job.elastic
        if limits is None:
            raise JobError("an elastic job has limits", EXIT_USAGE)
        (host,) = self._hosts
        slots = self._slots_of(0, host)
        if self._job.oversubscribe:
            slots = max(slots, limits.max_size)
        elif limits.max_size > slots:
            raise PlacementError(
                f"up to {limits.max_size} ranks (--max-np, or else -np) need as many slots, and there "
                f"{'is 1' if slots == 1 else f'are {slots}'}: name more with -H localhost:N, or allow it with "
                "--oversubscribe"
            )
        self._open_store({0: None})
        if self._store is None:
            raise JobError("the store is not open")
        first, *others = self._store.endpoints
        self._client = StoreClient(*first, self._secret, _STORE_S, others)
        self._host_ranks = self._local = HostWorkers(
            self._loop, self._guard, self._tree, self._job.grace_s, self._on_event
        )
        self._state, actions = driver.begin(limits, [FoundHost(host.name, slots)], self._loop.now_s)
        self._do(actions)

    # Events

    def _on_note(self, event: Noted) -> None:
        for report in self._notes.setdefault(event.rank, NoteReader()).feed(event.data):
            for told in _events_of(event.rank, report):
                self._take(told)

    def _on_ending(self, ending: Ending) -> None:
        self._take(Ended(ending.rank, ending.failed, how_it_failed(ending)))

    def _on_signal(self, number: int) -> None:
        limits = self._job.elastic
        keeps = limits is not None and limits.keeps and self._running and not self._stopping
        if number == signal.SIGTERM and keeps and self._state.leaves_s is None:
            self._take(Leave(None, _LEAVE_SHARE * self._job.grace_s))
        else:
            super()._on_signal(number)

    def _take(self, event: ElasticEvent) -> None:
        if not self._stopping:
            self._state, actions = driver.step(self._state, event, self._loop.now_s)
            self._do(actions)

    # Actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            self._do_one(action)
            if isinstance(action, Connect):  # this host has an agent from the start
                self._take(HostUp(action.host, 0))
        if self._timer is not None:
            self._timer.cancel()
        due_s = driver.deadline_s(self._state)
        if due_s is not None:
            self._timer = self._loop.call_later(due_s - self._loop.now_s, lambda: self._take(Tick()))

    def _do_one(self, action: Action) -> None:
        from horo.bootstrap.generations import Change, change_key, seat_entries  # noqa: PLC0415
        from horo.bootstrap.rendezvous import rank_is_missing  # noqa: PLC0415

        if isinstance(action, StartWorker):
            self._start_worker(action)
        elif isinstance(action, WriteSeats):
            self._seats_given |= {worker: self._seats_given.get(worker, 0) + 1 for worker in action.workers}
            hosts = [self._host_of_rank[worker] for worker in action.workers]
            numbers = [self._seats_given[worker] for worker in action.workers]
            for key, value in seat_entries(self._id, action.generation, action.workers, hosts, numbers):
                self._client.set(key, value)
        elif isinstance(action, Fail):
            self._client.set(*rank_is_missing(self._id, action.generation, action.reason))
        elif isinstance(action, Announce):
            key = change_key(self._id, action.generation, action.number)
            self._client.set(key, Change(action.added, action.removed, action.leave).encode())
        elif isinstance(action, (Kill, Dismiss)):
            if isinstance(action, Dismiss):
                self._dismissed.add(action.worker)
            self._host_ranks.kill_rank(action.worker)
        elif isinstance(action, Report):
            self._console.say(action.text)
        elif isinstance(action, Finish):
            self._end_all(action)

    def _start_worker(self, action: StartWorker) -> None:
        name = self._hosts[0].name
        self._came.append(action.worker)
        self._names[action.worker] = name
        self._host_of_rank[action.worker] = 0
        self._console.place([name] * len(self._came))
        self._running.add(action.worker)
        local_rank = action.slot.number
        local_size = max(action.size, local_rank + 1)
        placement = Placement(action.rank, action.size, local_rank, local_size, 0, 1, 0)
        own = {"HORO_GENERATION": str(action.generation)}
        environment = {**self._environment, **self._variables_of(placement), **own}
        cwd = str(Path.cwd())
        command = with_python(self._job.command, cwd, self._environment.get("PATH", os.defpath), name)
        try:
            self._host_ranks.start_worker(command, action.worker, local_rank, environment, cwd=cwd, host=name)
        except StartError as error:
            if self._state.generation == 0:
                raise
            self._running.discard(action.worker)
            ended = Ended(action.worker, True, f"could not be started: {error}")
            self._loop.call_later(0.0, lambda: self._take(ended))

    def _end_all(self, finish: Finish) -> None:
        self._finish = finish
        if self._running:
            self._stop()
        else:
            self._host_ranks.release()

    # The end

    def _conclude(self) -> int:
        if not self._came:
            return super()._conclude()
        if self._finish.reason:
            self._console.say(self._finish.reason)
        self._say_what_happened()
        members = self._state.members or self._came
        self._endings = [ending for ending in self._endings if ending.rank in members]
        if self._signal and self._state.phase is not Phase.OVER:  # the job has gone on after the failures before
            self._endings = [ending for ending in self._endings if ending.asked]
        code = super()._conclude()
        if self._finish.code is not None and not self._signal and not self._errors:
            return self._finish.code
        return code or (1 if self._finish.reason else 0)

    def _say_what_happened(self) -> None:
        """One line on the generations of the job and the workers that have failed; none if nothing has happened."""
        if self._state.generation < 2:
            return
        gone = [each for each in self._endings if each.rank not in self._dismissed and each.failed and not each.asked]
        failed = [f"{each.rank} ({each.note.error or how_it_ended(each)})" for each in gone]
        words = [f"{self._state.generation} generations of workers {ranges(self._came)}"]
        if failed:
            words.append(f"failed: {', '.join(failed)}")
        words.append(f"training stood still for {driver.lost_s(self._state):.1f} s")
        self._console.say("; ".join(words))


def _events_of(worker: int, report: dict[str, object]) -> list[ElasticEvent]:
    """The events in what a worker reports, which may be anything."""
    events: list[ElasticEvent] = []
    generation, culprit = report.get("waits"), report.get("culprit")
    if isinstance(generation, int):
        named = culprit if isinstance(culprit, int) else None
        events.append(Waits(worker, generation, named, report.get("commit") is not None))
    elif isinstance(commit := report.get("commit"), int):
        events.append(Committed(worker, commit, report.get("kept") is True))
    within = report.get("within")
    if isinstance(within, int):
        events.append(Within(worker, within))
    done = report.get("done")
    if isinstance(done, int):
        events.append(Done(worker, done))
    if report.get("ready") is True:
        events.append(Ready(worker))
    return events
