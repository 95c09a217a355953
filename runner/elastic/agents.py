"""The hosts of an elastic job as hororun reaches them: agents that come and go, and workers on them."""

from __future__ import annotations

from pathlib import Path

from horo.bootstrap.net.interfaces import LOOPBACK, is_loopback
from horo.runner.agent.command import StartError
from horo.runner.agent.machine import core_count, visible_gpus
from horo.runner.agent.ranks import Event, Leaving, NotStarted
from horo.runner.agent.workers import HostWorkers
from horo.runner.config import JobError
from horo.runner.elastic.state import ElasticEvent, FoundHost, HostLost, HostUp, Leave, StartWorker
from horo.runner.hosts import HostSpec
from horo.runner.job.host_addresses import find_addresses
from horo.runner.job.placement import Placement, slots_of
from horo.runner.job.remote import RemoteHost
from horo.runner.job.supervise import Supervisor
from horo.runner.network import is_local, own_addresses

__all__ = ["HostsSupervisor"]

_ANSWER_S = 8.0
"""The time that an agent has for its end beside the grace time."""


class HostsSupervisor(Supervisor):
    """Carries out what an elastic job does with hosts; a subclass decides about it, in ``_take``.

    A host keeps its index. Each agent of it has another mark for its processes, and ends those of the agents before
    before it starts any: these may have been stopped, or killed with their guards.
    """

    process_word = "worker"
    _least_slots = 0
    """The slots of a host that has fewer; more than 0 with ``--oversubscribe``."""
    _came: list[int]

    def _take(self, event: ElasticEvent) -> None:
        raise NotImplementedError

    def _connect(self) -> None:
        """Agents are started where workers are needed, see ``_reach``."""
        self._routes: dict[int, tuple[str, ...]] = {}  # this host's addresses, for each host that uses some
        self._going: set[int] = set()  # hosts whose agents are to end
        self._again: set[int] = set()  # those that are to have another one then
        self._agents_failing: set[int] = set()  # those whose agents have failed and have not ended
        self._marks: dict[int, list[str]] = {}  # of the agents of a host that have got the job
        self._indices = {host.name: index for index, host in enumerate(self._hosts)}

    def _serve_hosts(self, *, may_grow: bool) -> None:
        """Opens the store where all hosts can reach it, also those that come later."""
        is_alone = not may_grow and all(is_local(host) for host in self._hosts)
        self._serve_store([LOOPBACK] if is_alone else own_addresses(self._job.interfaces))

    def _found(self, host: HostSpec) -> FoundHost:
        slots = None if host.slots is None else max(host.slots, self._least_slots)
        return FoundHost(host.name, slots)

    def _know(self, host: HostSpec) -> None:
        """A host that the job may use: a new one, or another number of slots of one."""
        hosts = list(self._hosts)
        index = self._indices.setdefault(host.name, len(hosts))
        hosts[index : index + 1] = [host]
        self._hosts = hosts

    # Agents

    def _reach(self, name: str) -> None:
        """Starts an agent on a host; an event follows."""
        index = self._indices[name]
        host = self._hosts[index]
        if is_local(host):
            if self._local is None:
                self._local = HostWorkers(self._loop, self._guard, self._tree, self._job.grace_s, self._on_event)
            gpus = len(visible_gpus(self._environment))
            up = HostUp(name, max(slots_of(host, self._job.size, core_count(), gpus), self._least_slots))
            self._loop.call_later(0.0, lambda: self._take(up))
            return
        if index in self._remotes:
            self._again.add(index)
            return
        remote = RemoteHost(self._loop, host, self._on_event, self._on_remote, self._signals.came_to)
        try:
            remote.connect(self._launcher, host_timeout_s=self._job.host_timeout_s)
        except JobError as error:
            lost = HostLost(name, f"cannot be used ({error})")
            self._loop.call_later(0.0, lambda: self._take(lost))
            return
        self._tree.spared.add(remote.pid)
        self._remotes[index] = remote

    def _leave(self, name: str) -> None:
        """Ends the agent of a host; nothing answers."""
        index = self._indices[name]
        self._again.discard(index)
        remote = self._remotes.get(index)
        if remote is not None and index not in self._going:
            self._going.add(index)
            remote.terminate()
            self._loop.call_later(self._job.grace_s + _ANSWER_S, remote.hang_up)

    def _on_remote(self) -> None:
        for index, remote in list(self._remotes.items()):
            if remote.finished:
                self._on_agent_end(index, remote)
            elif remote.error is not None:
                self._on_agent_failure(index, remote)
            elif remote.host_info is not None and not remote.job_sent and index not in self._going:
                self._use(index, remote)

    def _use(self, index: int, remote: RemoteHost) -> None:
        """An agent has answered: workers can be started there."""
        host = self._hosts[index]
        try:
            route = find_addresses(host.name, remote.host_info or {}, self._job.interfaces)
            slots = max(self._slots_of(index, host), self._least_slots)
        except JobError as error:
            self._lose(index, f"cannot be used ({error})")
            self._going.add(index)
            remote.hang_up()
            return
        self._routes[index] = route.launcher
        before = self._marks.get(index, [])
        mark = f"{super()._mark(index)}.{len(before)}"
        self._marks[index] = [*before, mark]
        remote.send_job(self._job, self._environment, {}, mark=mark, binding=self._binding, marks_before=before)
        self._take(HostUp(host.name, slots))

    def _on_agent_failure(self, index: int, remote: RemoteHost) -> None:
        """The agent cannot go on: its host is lost when it has ended."""
        if index in self._agents_failing:
            return
        self._agents_failing.add(index)
        if remote.job_sent:
            self._loop.call_later(self._job.grace_s + _ANSWER_S, remote.hang_up)
        else:
            remote.hang_up()

    def _on_agent_end(self, index: int, remote: RemoteHost) -> None:
        del self._remotes[index]
        self._tree.spared.discard(remote.pid)
        self._routes.pop(index, None)
        self._agents_failing.discard(index)
        is_asked = index in self._going
        self._going.discard(index)
        why = f"is lost ({remote.why_lost})" if remote.job_sent else f"cannot be used ({remote.why_lost})"
        for worker in sorted(worker for worker in self._running if self._host_of_rank[worker] == index):
            self._running.discard(worker)
            self._console.rank_ended(worker)
            self._end(worker, asked=self._stopping, lost=remote.why_lost)
        if not is_asked:
            self._lose(index, why, remote.may_run_s)
        if index in self._again:
            self._again.discard(index)
            self._reach(self._hosts[index].name)

    def _stop(self) -> None:
        self._again.clear()
        super()._stop()

    def _release(self) -> None:
        """No worker runs, and none will: ends all agents."""
        self._again.clear()
        for host in self._ranks_by_host():
            host.release()

    def _mark(self, host: int) -> str:
        return self._marks[host][-1] if host in self._remotes else super()._mark(host)

    def _lose(self, index: int, how: str, may_run_s: float | None = 0.0) -> None:
        self._take(HostLost(self._hosts[index].name, how, may_run_s))

    # Workers

    def _start_worker(self, action: StartWorker) -> None:
        index, number = self._indices[action.slot.host], action.slot.number
        self._came.append(action.worker)
        self._names[action.worker] = action.slot.host
        self._host_of_rank[action.worker] = index
        self._console.place([self._names[worker] for worker in self._came])
        self._running.add(action.worker)
        self._stores[index] = self._store_for(index)
        variables = self._variables_of(self._forecast(action, index))
        own = {**variables, "HORO_GENERATION": str(action.generation)}
        if index in self._remotes:
            self._remotes[index].start_worker(action.worker, number, own)
            return
        cwd = str(Path.cwd())
        try:
            command = self._command_in(cwd, action.slot.host)
            if not isinstance(self._local, HostWorkers):
                raise StartError(f"host {action.slot.host} is not reached", 1)
            environment = {**self._environment, **own}
            place = (index, number)
            self._local.start_worker(command, action.worker, place, environment, cwd=cwd, host=action.slot.host)
        except StartError as error:
            event = NotStarted(action.worker, str(error), error.code)
            self._loop.call_later(0.0, lambda: self._on_event(event))

    def _forecast(self, action: StartWorker, index: int) -> Placement:
        """The place that the worker is to have: in its generation it may be another one."""
        number = action.slot.number
        hosts = sorted({self._host_of_rank[worker] for worker in self._running})
        on_host = sum(1 for worker in self._running if self._host_of_rank[worker] == index)
        local_size = max(on_host, number + 1, min(self._hosts[index].slots or 0, action.size))
        return Placement(action.rank, action.size, number, local_size, hosts.index(index), len(hosts), index)

    def _end_worker(self, worker: int, *, at_once: bool) -> None:
        remote = self._remotes.get(self._host_of_rank[worker])
        if remote is not None:
            remote.end_worker(worker, at_once=at_once)
        elif isinstance(self._local, HostWorkers):
            self._local.end_worker(worker, at_once=at_once)

    def _store_for(self, index: int) -> str:
        """The addresses of the store for a host. On this one they are those that other hosts use: the address from
        which a rank reaches the store is its own for others."""
        there = self._routes.values() if index not in self._routes else [self._routes[index]]
        endpoints = [] if self._store is None else self._store.endpoints
        wanted = {address for addresses in there for address in addresses}
        named = [endpoint for endpoint in endpoints if endpoint.address in wanted]
        return ",".join(map(str, named or [each for each in endpoints if not is_loopback(each.address)] or endpoints))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, NotStarted):
            self._running.discard(event.rank)
            self._on_not_started(event)
        elif isinstance(event, Leaving):
            self._take(Leave(event.host, self._job.grace_s, "SIGTERM has come to its agent"))
        else:
            super()._on_event(event)

    def _on_not_started(self, event: NotStarted) -> None:
        raise NotImplementedError
