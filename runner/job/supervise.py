"""The whole job: connect to the hosts, place and start the ranks, forward their output, end them, report the cause."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horo.config.hosts import ranges
from horo.config.sources import encode_sources
from horo.errors import HoroError
from horo.runner.agent.command import StartError, with_python
from horo.runner.agent.machine import Binding, core_count
from horo.runner.agent.rank_reports import Note, NoteReader
from horo.runner.agent.ranks import Event, Exited, HostRanks, Noted, Remained, Started, Wrote, reap
from horo.runner.config import EXIT_USAGE, Job, JobError
from horo.runner.hosts import HostSpec, written
from horo.runner.job.card import card, facts_of
from horo.runner.job.console import Console
from horo.runner.job.forwarded_variables import (
    common_variables,
    default_variables,
    inherited,
    outer_rank,
    rank_variables,
)
from horo.runner.job.host_addresses import HostAddresses, find_addresses, open_store, store_addresses
from horo.runner.job.init_tracker import Arrivals, side_by_side
from horo.runner.job.json_report import report_of, write_report
from horo.runner.job.placement import Placement, PlacementError, explain_idle_hosts, place, slots_of
from horo.runner.job.remote import RemoteHost, explain_absence
from horo.runner.job.report import Ending, awaited, exit_code, overdue, report, root_cause, signal_name
from horo.runner.job.signals import SignalsToRanks
from horo.runner.job.watching import RanksSeen, Watching
from horo.runner.loop import Loop
from horo.runner.network import NetworkError, free_port, is_local
from horo.runner.processes import Guard, Tree, unread_input
from horo.runner.start.remote_launcher import RemoteLauncher
from horo.runner.stdout import explain_stdout

if TYPE_CHECKING:
    from horo.bootstrap.store.server import StoreServer

__all__ = ["Supervisor"]

_STDERR_TAIL_BYTES = 16384
_REMOTE_ANSWER_TIMEOUT_S = 8.0  # longer than an agent waits behind SIGKILL
_SILENT_END_S = 2.0
"""The time after Ctrl-C at which the user learns that ranks still run."""
_CAUSE_S = 2.0
"""The time for which to wait for the end of the rank that the first failure points at."""


class Supervisor:
    """State of one job. ``run`` goes through it top down; everything else is called back by the loop.

    Another kind of job replaces ``_start_ranks``, ``_on_note``, ``_on_ending`` and ``_conclude``.
    """

    process_word = "rank"
    """The name for a process and its number in messages."""

    def __init__(
        self,
        job: Job,
        hosts: Sequence[HostSpec],
        launcher: RemoteLauncher,
        environment: Mapping[str, str],
        loop: Loop,
        *,
        guard: Guard,
        spared: set[int],
    ) -> None:
        self._job = job
        self._hosts = hosts
        self._launcher = launcher
        self._outer_rank = outer_rank({**environment, **job.exports})
        self._environment = {**inherited(environment), **job.exports, **encode_sources(job.exports, job.sources)}
        self._loop = loop
        self._guard = guard
        self._id = secrets.token_hex(16)
        self._tree = Tree(f"{self._id}.local", ancestor=os.getpid(), spared=spared)
        self._console = Console(loop, job.output, job.size)
        self._local: HostRanks | None = None
        self._remotes: dict[int, RemoteHost] = {}  # by index of the host
        self._store: StoreServer | None = None
        self._stores: dict[int, str] = {}  # its addresses for each host
        self._secret = b""
        self._master: tuple[str, int] | None = None
        self._arrivals: Arrivals | None = None
        self._host_of_rank: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._running: set[int] = set()
        self._stderr_tails: dict[int, bytes] = {}
        self._notes: dict[int, NoteReader] = {}
        self._endings: list[Ending] = []
        self._failing = False
        self._reacted = False
        self._stopping = False
        self._starting = False
        self._errors: tuple[JobError, ...] = ()
        self._signal = 0
        self._paused = False
        seen = RanksSeen(self._notes, self._names, self._ranks_by_host, self.process_word)
        self._watching = Watching(loop, job, self._console, seen)
        self._signals = SignalsToRanks(loop, self._ranks_by_host)
        self._signals.listen(loop, self._on_signal, lambda: bool(self._running), batch=job.in_batch)
        loop.on_signal(signal.SIGTSTP, self._on_stop_key)
        loop.on_signal(signal.SIGCHLD, self._on_child)
        loop.on_wake(self._on_console)

    def run(self) -> int:
        """Runs the job and returns the exit code."""
        began_s = time.time()
        if self._outer_rank:
            self._console.say(f"warning: this hororun is itself {self._outer_rank} and starts a whole job of its own")
        try:
            self._connect()
            if not self._stopping:
                self._start_ranks()
        except JobError as error:
            self._stop_for(error)
        except (PlacementError, StartError, NetworkError, HoroError) as error:
            self._stop_for(JobError(str(error), getattr(error, "code", EXIT_USAGE)))
        self._loop.run_until(self._over)
        if self._store is not None:
            self._store.close()
        self._watching.close()
        self._console.flush(wait_for_all=not self._signal)
        if not self._signal and not any(ending.failed for ending in self._endings):
            self._on_console()  # the last that was written may have failed
        if unread_input():
            self._console.say("nothing was read from stdin: that of every rank is /dev/null")
        endings = list(self._endings)
        code, seconds = self._conclude(), time.time() - began_s
        facts = facts_of(endings, failed=code != 0, word=self.process_word)
        if self._job.json_report:
            values = self._report_of(endings, facts, code=code, began_s=began_s, seconds=seconds)
            write_report(self._job.json_report, values, self._console.say)
        late = overdue(self._endings, self._job.grace_s, self.process_word)
        if late:
            self._console.say(late)
        if self._job.summary or (self._job.summary is None and facts["steps"] and os.isatty(2)):
            number = signal_name(self._signal) if self._signal else ""
            lines = card(facts, seconds=seconds, code=code, signal=number, word=self.process_word)
            self._console.say("\n".join(lines))
        self._console.flush(wait_for_all=False)
        return code

    # Reaching and starting

    def _connect(self) -> None:
        """Starts an agent on every host that is not this one and waits until all have answered."""
        if self._job.hosts_from:
            self._console.explain(f"hosts from the {self._job.hosts_from}: {written(self._job.hosts)}")
        for index, host in enumerate(self._hosts):
            if is_local(host):
                continue
            remote = RemoteHost(self._loop, host, self._on_event, self._on_remote, self._signals.came_to)
            command = remote.connect(self._launcher, host_timeout_s=self._job.host_timeout_s)
            self._console.explain(f"{host.name}: {shlex.join(command)}")
            self._tree.spared.add(remote.pid)
            self._remotes[index] = remote
        if not self._remotes:
            return
        self._starting, remotes = True, self._remotes.values()
        over: list[bool] = []
        timer = self._loop.call_later(self._job.start_timeout_s, lambda: over.append(True))
        self._loop.run_until(
            lambda: self._stopping or bool(over) or all(each.host_info or each.error for each in remotes)
        )
        timer.cancel()
        self._starting = False
        errors = explain_absence(list(remotes), self._launcher, self._job.start_timeout_s)
        if errors and not self._stopping:
            absent = sum(1 for each in remotes if each.error or not each.host_info)
            if absent > 1:
                self._console.say(f"{absent} of {len(self._hosts)} hosts cannot be used, and no rank was started")
            self._stop_for(*errors)

    def _start_ranks(self) -> None:
        hosts = self._hosts
        slots = [self._slots_of(index, host) for index, host in enumerate(hosts)]
        placements = place(
            slots,
            self._job.size or sum(slots),
            evenly=self._job.shares_evenly,
            oversubscribe=self._job.oversubscribe,
            most=[host.max_slots for host in hosts],
        )
        used = {placement.host for placement in placements}
        for index in self._remotes.keys() - used:
            self._remotes[index].hang_up()
        self._host_of_rank = {placement.rank: placement.host for placement in placements}
        self._names.update({placement.rank: hosts[placement.host].name for placement in placements})
        self._console.place(list(self._names.values()))
        routes = {
            index: find_addresses(hosts[index].name, self._remotes[index].host_info or {}, self._job.interfaces)
            if index in self._remotes
            else None
            for index in sorted(used)
        }
        idle = explain_idle_hosts(self._job, self._names.values())
        if idle:
            self._console.say(idle)
        addresses = self._open_store(routes)
        if self._job.torch_env:
            first = placements[0].host
            route = routes[first]
            self._master = (addresses[first] if route is None else route.host), self._master_port(first)
        variables = {placement.rank: self._variables_of(placement) for placement in placements}
        self._running = set(variables)
        for index in sorted(used):
            ranks = {rank: own for rank, own in variables.items() if self._host_of_rank[rank] == index}
            if index in self._remotes:
                mark, binding = self._mark(index), self._binding
                self._remotes[index].send_job(self._job, self._environment, ranks, mark=mark, binding=binding)
            else:
                self._start_local(hosts[index].name, ranks)

    def _slots_of(self, index: int, host: HostSpec) -> int:
        host_info = {} if host.slots is not None else self._remotes[index].host_info or {}
        return slots_of(host, self._job.size, int(host_info.get("cores", 0)), int(host_info.get("gpus", 0)))

    def _open_store(self, routes: Mapping[int, HostAddresses | None]) -> dict[int, str]:
        """Opens the key-value server for the ranks of hosts, which reach it by ``routes``; returns its addresses."""
        addresses, by_host = store_addresses(list(routes.values()))
        endpoints = self._serve_store(addresses)
        reached = dict(zip(routes, by_host, strict=True))
        self._stores = {index: ",".join(endpoints[each] for each in mine) for index, mine in reached.items()}
        return {index: mine[0] for index, mine in reached.items()}

    def _serve_store(self, addresses: Sequence[str]) -> dict[str, str]:
        """Opens the key-value server at addresses of this host; returns its endpoint at each of them."""
        from horo.bootstrap.auth.handshake import SECRET_BYTES  # noqa: PLC0415 - --help does without

        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._store = open_store(self._job, addresses, self._secret, self._console.say)
        self._arrivals = Arrivals(self._store, self._secret, self._id)
        endpoints = {endpoint.address: str(endpoint) for endpoint in self._store.endpoints}
        self._console.explain(f"key-value server at {', '.join(endpoints.values())}")
        return endpoints

    def _variables_of(self, placement: Placement) -> dict[str, str]:
        remote = self._remotes.get(placement.host)
        return {
            **default_variables(self._environment, keep_memory=self._job.keep_memory),
            **common_variables(self._id, self._secret.hex()),
            **rank_variables(
                placement,
                host=self._hosts[placement.host].name,
                mark=self._mark(placement.host),
                store=self._stores[placement.host],
                master=self._master,
                exports=self._job.exports,
                cores=core_count() if remote is None else int((remote.host_info or {})["cores"]),
                threads_set=self._binding.threads_set,
            ),
        }

    def _master_port(self, first_host: int) -> int:
        remote = self._remotes.get(first_host)
        if remote is None:
            return free_port(self._job.master_port, self._job.ports)
        last = self._job.ports[-1] if self._job.ports else 0  # horo's own listeners take any of them
        return self._job.master_port or last or int((remote.host_info or {})["free_port"])

    @property
    def _binding(self) -> Binding:
        return Binding(self._job.bind_to, self._job.bind_gpus, "OMP_NUM_THREADS" in self._environment)

    def _mark(self, host: int) -> str:
        return f"{self._id}.{host}" if host in self._remotes else self._tree.mark

    def _start_local(self, name: str, ranks: Mapping[int, Mapping[str, str]]) -> None:
        if self._local is None:
            self._local = HostRanks(self._loop, self._guard, self._tree, self._job.grace_s, self._on_event)
        environments = {rank: {**self._environment, **own} for rank, own in ranks.items()}
        cwd = str(Path.cwd())
        self._local.start(self._command_in(cwd, name), environments, cwd, name, binding=self._binding)

    def _command_in(self, cwd: str, name: str) -> list[str]:
        """The command of a rank on this host, which has that name."""
        return with_python(self._job.command, cwd, self._environment.get("PATH", os.defpath), name)

    # What happens

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Wrote):
            self._on_output(event)
        elif isinstance(event, Noted):
            self._on_note(event)
        elif isinstance(event, Exited):
            self._on_exit(event)
        elif isinstance(event, Remained):
            self._console.say(event.sentence)
        elif isinstance(event, Started):
            who = f"{self.process_word} {event.rank} on {self._names[event.rank]}"
            self._console.explain(f"{who} runs as process {event.pid}{event.bound and f', bound to {event.bound}'}")
        self._watching.on_event(event)

    def _on_note(self, event: Noted) -> None:
        reader = self._notes.setdefault(event.rank, NoteReader())
        reader.feed(event.data)
        if self._arrivals is not None:
            self._arrivals.on_note(reader.note)
        self._stop_if_clear()

    def _on_output(self, event: Wrote) -> None:
        if event.stream == 2:
            tail = self._stderr_tails.get(event.rank, b"")
            self._stderr_tails[event.rank] = (tail + event.data)[-_STDERR_TAIL_BYTES:]
        if self._stopping and self._console.full:
            return  # nothing reads the output, and ranks that wait for a reader cannot end
        self._console.output(event.rank, event.stream, event.data)
        if self._console.full and not self._stopping:
            self._pause(True)

    def _on_exit(self, event: Exited) -> None:
        self._running.discard(event.rank)
        self._console.rank_ended(event.rank)
        asked = event.asked and self._stopping  # else another process ended it
        self._end(event.rank, code=event.code, signal=event.signal, asked=asked, overdue=event.overdue)

    def _end(
        self, rank: int, *, code: int = 0, signal: int = 0, asked: bool = False, lost: str = "", overdue: bool = False
    ) -> None:
        tail = self._stderr_tails.get(rank, b"")
        note = self._notes[rank].note if rank in self._notes else Note()
        passed_on = signal in self._signals.came
        ending = Ending(rank, self._names[rank], code, signal, asked, lost, tail, note, overdue, passed_on)
        self._endings.append(ending)
        self._on_ending(ending)

    def _on_ending(self, ending: Ending) -> None:
        if self._arrivals is not None:
            self._arrivals.on_end(ending)
        if ending.failed and not ending.asked:
            self._fail()
        self._stop_if_clear()

    def _on_remote(self) -> None:
        for index, remote in self._remotes.items():
            if remote.error is not None and not (self._starting and remote.host_info is None):
                self._stop_for(remote.error)
            if not remote.finished:
                continue
            for rank in sorted(rank for rank in self._running if self._host_of_rank[rank] == index):
                self._running.discard(rank)
                self._console.rank_ended(rank)
                self._end(rank, asked=self._stopping, lost=remote.why_lost)

    def _on_child(self, _number: int) -> None:
        reap([host.on_child for host in self._ranks_by_host()])

    def _on_console(self) -> None:
        if self._console.stdout_error is not None and not self._stopping:
            error = explain_stdout(self._console.stdout_error)
            self._stop_for(JobError(f"{error}; the job was ended", error.code))
        if self._paused and not self._console.full:
            self._pause(False)

    def _on_signal(self, number: int) -> None:
        if not self._signal and not self._stopping:
            self._signal = number
            self._console.interrupted = True
            self._stop()
        elif self._stopping:
            self._signal = self._signal or number
            self._console.interrupted = True
            for host in self._ranks_by_host():
                host.kill()

    def _on_stop_key(self, _number: int) -> None:
        if self._remotes:
            if os.isatty(0):  # else it was no key: Slurm announces so that it will stop all of the job
                self._console.say(
                    "Ctrl-Z does not stop a job with remote hosts: their agents would take hororun for dead"
                )
            return
        self._signals.to_all(signal.SIGSTOP)
        self._loop.stop_process()
        self._signals.to_all(signal.SIGCONT)  # this process runs again

    def _say_what_is_awaited(self) -> None:
        if self._running:
            who = ranges(sorted(self._running))
            self._console.say(f"still waiting for the end of {self.process_word}s {who}; Ctrl-C again kills them")

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        for host in self._ranks_by_host():
            host.pause(paused)

    # Ending

    def _ranks_by_host(self) -> list[HostRanks | RemoteHost]:
        return [*self._remotes.values(), *([self._local] if self._local is not None else [])]

    def _stop_for(self, *errors: JobError) -> None:
        if not self._stopping:
            self._errors = errors
        self._stop()

    def _fail(self) -> None:
        """A rank has failed: the others get a moment to see their error, and so does the cause if that is another."""
        if self._failing or self._stopping:
            return
        self._failing = True
        self._loop.call_later(self._job.failure_s, self._on_reacted)
        self._loop.call_later(max(self._job.failure_s, _CAUSE_S), self._stop)

    def _on_reacted(self) -> None:
        self._reacted = True
        self._stop_if_clear()

    def _stop_if_clear(self) -> None:
        """Ends the job once the other ranks have had their moment and the rank that failed first is known."""
        if self._reacted and awaited(self._endings, {rank: each.note for rank, each in self._notes.items()}) is None:
            self._stop()

    def _stop(self) -> None:
        """Ends the job on all hosts; later failures are not the cause."""
        if self._stopping:
            return
        self._stopping = True
        if self._paused:
            self._pause(False)
        interrupted = self._signal == signal.SIGINT
        for host in self._ranks_by_host():
            (host.interrupt if interrupted else host.terminate)()
        if interrupted and os.isatty(2):
            self._loop.call_later(_SILENT_END_S, self._say_what_is_awaited)
        grace_s = self._job.grace_s * (2 if interrupted else 1)
        self._loop.call_later(grace_s + _REMOTE_ANSWER_TIMEOUT_S, self._give_up_hosts)

    def _give_up_hosts(self) -> None:
        for remote in self._remotes.values():
            remote.hang_up()

    def _over(self) -> bool:
        return all(host.finished for host in self._ranks_by_host())

    def _report_of(
        self, endings: Sequence[Ending], facts: Mapping[str, Any], *, code: int, began_s: float, seconds: float
    ) -> dict[str, Any]:
        """The values of ``--json-report``."""
        cause = self._cause() if code else None
        told = [str(error) for error in self._errors]
        return report_of(
            self._job,
            self.process_word,
            endings,
            cause=cause,
            code=code,
            number=self._signal,
            told=told,
            began_s=began_s,
            seconds=seconds,
            training=facts,
        )

    def _cause(self) -> Ending | None:
        """The end that has ended the job; None: none has, or a signal has."""
        cause = root_cause(self._endings)
        return None if cause is not None and cause.asked and self._signal else cause

    def _conclude(self) -> int:
        """Prints why the job failed, if it did; returns the exit code."""
        for error in self._errors:
            self._console.say(str(error))
        if self._errors:
            return self._errors[0].code
        cause = self._cause()
        if self._signal and cause is None:
            ended = sorted(ending.rank for ending in self._endings if ending.asked)
            what = f"{self.process_word}s {ranges(ended)} were ended" if len(ended) > 1 else "the job was ended"
            self._console.say(f"{signal_name(self._signal)}: {what}")
            return 128 + self._signal
        if cause is None:
            if remark := side_by_side(self._job.command, self._endings, self._store):
                self._console.say(remark)
            return 0
        shown = self._console.shows(cause.rank)
        self._console.say_lines(report(cause, self._endings, self.process_word, shown=shown))
        return exit_code(cause)
