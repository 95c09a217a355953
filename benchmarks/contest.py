"""The driver of a contest: starts every contestant as a job of its own and gives them turns, one after the other.

    with Contest(peers, ranks=2) as contest:
        results = rounds.play(contest, "allreduce", cases, plan)

Whoever does not have its turn sleeps in a read. So contestants can take turns in short rounds, and no library is in the
process of another. How to add a benchmark: README.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from channel import Channel, ChannelClosed, Message
from peers import Peer
from spaces import Spaces
from workloads import probe

START_LIMIT_S = 120.0
TURN_LIMIT_S = 120.0
END_LIMIT_S = 60.0
LEAVE_LIMIT_S = 3.0
KILL_LIMIT_S = 5.0
HELLO_LIMIT_S = 5.0
PROBE_READS = 4
# When one rank fails, others of its job fail because of it; the cause may arrive a moment after its consequences.
CAUSE_LIMIT_S = 0.5
OUTPUT_LINES = 15

# What a launcher above this process may have left; contestants must not take themselves for its ranks.
LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_")
LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("HORO_STORE", "HORO_SECRET", "HORO_JOB_ID", "HORO_HOST_MARK"),
}
PROBE = Peer("probe", "bare")
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ContestError(Exception):
    """The contest cannot go on; the text is a sentence for the user."""


@dataclass
class Team:
    """One contestant at work: its jobs, and what its ranks have sent."""

    peer: Peer
    ranks: int
    output: IO[bytes]
    jobs: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: dict[int, Channel] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    exchanged: dict[int, Any] = field(default_factory=dict)
    answers: dict[int, Message] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    processes: dict[int, int] = field(default_factory=dict)  # a descriptor for each rank's process

    def silent(self) -> str:
        """The ranks that have not answered."""
        missing = [str(rank) for rank in range(self.ranks) if rank not in self.answers]
        return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to its ranks. A descriptor, unlike a number, never comes to mean another process."""
        for descriptor in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for descriptor in self.processes.values():
            os.close(descriptor)
        self.output.close()

    def last_output(self) -> str:
        """The last lines that its processes wrote, indented; empty if they wrote nothing."""
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()[-OUTPUT_LINES:]
        return "".join(f"\n    {line}" for line in lines)


@dataclass(frozen=True)
class Turn:
    """One contestant's turn. Times are of one call, in microseconds.

    Attributes:
        micros: mean time of a call on the slowest rank: a collective is over when its last rank has the result.
        ranks: what each rank has measured (contestant.run_turn), rank 0 first.
    """

    micros: float
    ranks: list[Message]

    def slowest_calls(self) -> list[float]:
        """Call by call the time on the slowest rank; needs a plan with ``each``."""
        return [max(calls) for calls in zip(*(rank["calls_us"] for rank in self.ranks), strict=True)]

    def figure(self, name: str) -> float:
        """A figure of the workload, the largest of all ranks."""
        return max(float(rank["figures"][name]) for rank in self.ranks)

    def total(self, name: str) -> float:
        """The sum over ranks of what run_turn counts: cpu_s, switches_voluntary, switches_forced, page_faults."""
        return sum(float(rank[name]) for rank in self.ranks)


class Contest:
    """Contestants of ``ranks`` ranks each, beside a probe of the cores in two processes. A context manager.

    With ``hosts``, the ranks are spread over these in blocks of equal length.

    Raises:
        ContestError: a rank died, or did not answer in time. Leaving the ``with`` block ends all processes in any case.
    """

    def __init__(
        self, peers: Sequence[Peer], ranks: int, *, turn_limit_s: float = TURN_LIMIT_S, hosts: Spaces | None = None
    ) -> None:
        self.peers = list(peers)
        self.ranks = ranks
        self._hosts = hosts
        self._turn_limit_s = turn_limit_s
        self._limit_s = START_LIMIT_S  # of what is asked of a contestant; until all are ready, the probe included
        self._teams: dict[str, Team] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._descriptor = -1
        self._folder = ""
        self._shared: set[Path] = set()
        self._doing = "starting"

    # ---- life ----

    def __enter__(self) -> Contest:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self._end()
            finally:
                self._kill()
        else:
            self._kill()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="contest-")
        self._listener.bind(f"{self._folder}/socket")
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._descriptor = os.memfd_create("contest-probe")
        os.truncate(self._descriptor, probe.MEMORY_BYTES)
        for peer, ranks in [*((peer, self.ranks) for peer in self.peers), (PROBE, 2)]:
            team = Team(peer, ranks, tempfile.TemporaryFile())  # noqa: SIM115  (closed in _kill)
            self._teams[peer.name] = team
            self._launch(team)
        teams = self._teams.values()

        def who() -> str:
            late = [team.peer.name for team in teams if len(team.ready) < team.ranks]
            return f"{' and '.join(late)} did not start within {START_LIMIT_S:g} s"

        self._pump_until(lambda: all(len(team.ready) == team.ranks for team in teams), START_LIMIT_S, who)
        self._shared = self.shared_files()
        for peer in self.peers:
            self._let_run(self._teams[peer.name], False)
        self.prepare(PROBE, "probe", "probe", {"descriptor": self._descriptor})
        wrong = self.check(PROBE, "probe")
        if wrong:
            raise ContestError(f"the probe of the cores does not work: {wrong}")
        self._limit_s = self._turn_limit_s

    def _launch(self, team: Team) -> None:
        peer = team.peer
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
        }
        if peer.folder is not None:
            environment.pop("PYTHONPATH", None)
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": self._folder, **peer.environment}
        words = [f"{self._folder}/socket", peer.name, peer.library, str(team.ranks)]
        commands = peer.commands(team.ranks, words, None if peer is PROBE else self._hosts)
        for number, command in enumerate(commands):
            mine = {"RANK": str(number)} if peer.launcher == "plain" else {}
            try:
                job = subprocess.Popen(
                    command,
                    env={**environment, **mine},
                    stdin=subprocess.DEVNULL,
                    stdout=team.output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_driver if mine else _end_with_driver,  # noqa: PLW1509  (the driver has one thread)
                    pass_fds=(self._descriptor,) if peer is PROBE else (),
                )
            except OSError as error:
                raise ContestError(f"{peer.name} cannot be started: {command[0]}: {error.strerror}") from error
            team.jobs.append(job)

    def _end(self) -> None:
        """Lets everybody leave in order."""
        for team in self._teams.values():
            self._let_run(team, True)
            for channel in team.channels.values():
                with contextlib.suppress(ChannelClosed):
                    channel.send({"do": "end"})
        deadline = time.monotonic() + END_LIMIT_S
        for team in self._teams.values():
            for job in team.jobs:
                try:
                    code = job.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise ContestError(f"{team.peer.name} did not end within {END_LIMIT_S:g} s") from None
                if code != 0:
                    raise ContestError(f"{team.peer.name} ended with code {code} after its turns{team.last_output()}")

    def _kill(self) -> None:
        """Ends whatever is left: ranks that sleep leave when their channel closes, and the rest are killed."""
        teams = list(self._teams.values())
        jobs = [job for team in teams for job in team.jobs]
        for team in teams:
            team.send_signal(signal.SIGCONT)
            for channel in team.channels.values():
                channel.close()
        _wait_for(jobs, LEAVE_LIMIT_S)
        for team in teams:
            team.send_signal(signal.SIGKILL)
        for job in jobs:
            if job.poll() is None:
                job.terminate()
        _wait_for(jobs, KILL_LIMIT_S)
        for job in jobs:
            if job.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        for team in teams:
            team.close()
        self._teams.clear()
        self._selector.close()
        self._listener.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        # What a library cannot remove when it is killed.
        for path in self._shared:
            path.unlink(missing_ok=True)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- turns ----

    def versions(self) -> dict[str, dict[str, str]]:
        """What each contestant's numbers depend on."""
        return {peer.name: self._teams[peer.name].versions for peer in self.peers}

    def shared_files(self) -> set[Path]:
        """The named shared memory that ranks have mapped."""
        channels = [channel for team in self._teams.values() for channel in team.channels.values()]
        return {path for channel in channels for path in _shared_files(channel)}

    def prepare(self, peer: Peer, workload: str, case: str, parameters: dict[str, Any]) -> str:
        """Makes ``case``, a name of the caller's, known to ``peer``; returns "" or why its library cannot do it."""
        message = {"do": "prepare", "workload": workload, "parameters": parameters}
        return next((text for answer in self._ask(peer, case, message) if (text := answer["unsupported"])), "")

    def check(self, peer: Peer, case: str) -> str:
        """Compares a result with a known answer; returns "" or what is wrong, and on which rank."""
        answers = self._ask(peer, case, {"do": "check"})
        return "; ".join(f"rank {rank}: {answer['wrong']}" for rank, answer in enumerate(answers) if answer["wrong"])

    def turn(self, peer: Peer, case: str, count: int, *, warm: int = 1, each: bool = False) -> Turn:
        """``count`` calls, measured, after ``warm`` that are not; with ``each``, the time of every single call."""
        answers = self._ask(peer, case, {"do": "turn", "count": count, "warm": warm, "each": each})
        return Turn(max(float(answer["mean_us"]) for answer in answers), answers)

    def forget(self, peer: Peer, case: str) -> None:
        """Frees what ``prepare`` has made."""
        self._ask(peer, case, {"do": "forget"})

    def probe(self) -> float:
        """Microseconds in which a core reads 4 MiB that another core has just written, the slower of two."""
        return self.turn(PROBE, "probe", PROBE_READS).figure("read_us")

    def _ask(self, peer: Peer, case: str, message: Message) -> list[Message]:
        """Sends a message to all ranks of a contestant and waits for all answers, rank 0 first."""
        team = self._teams[peer.name]
        team.answers.clear()
        self._doing = f"{message['do']} '{case}'"
        self._let_run(team, True)
        for rank, channel in team.channels.items():
            try:
                channel.send({**message, "case": case})
            except ChannelClosed:
                raise ContestError(self._lost(team, rank)) from None

        def late() -> str:
            return (
                f"{peer.name} has not done {self._doing} within {self._limit_s:g} s: "
                f"{team.silent()} did not answer{team.last_output()}"
            )

        self._pump_until(lambda: len(team.answers) == team.ranks, self._limit_s, late)
        self._let_run(team, False)
        return [team.answers[rank] for rank in range(team.ranks)]

    @staticmethod
    def _let_run(team: Team, run: bool) -> None:
        """Stops or continues the ranks of a library that does not sleep by itself."""
        if not team.peer.sleeps:
            team.send_signal(signal.SIGCONT if run else signal.SIGSTOP)

    # ---- messages ----

    def _pump_until(self, done: Callable[[], bool], limit_s: float, late: Callable[[], str]) -> None:
        """Handles messages until ``done()``; raises with the sentence ``late()`` when that takes too long.

        Bad news from any contestant, whether or not it has its turn, end the contest.
        """
        deadline = time.monotonic() + limit_s
        trouble: list[tuple[bool, str]] = []  # (is it a cause, the sentence)
        while trouble or not done():
            if time.monotonic() > deadline:
                causes = [text for is_cause, text in trouble if is_cause]
                raise ContestError([*causes, *(text for _, text in trouble), late()][0])
            for key, _ in self._selector.select(0.05 if trouble else 0.5):
                found = self._accept() if key.data is None else self._read(*key.data)
                if found is not None:
                    if not trouble:
                        deadline = time.monotonic() + CAUSE_LIMIT_S
                    trouble.append(found)
            if not trouble:
                self._look_at_jobs()

    def _look_at_jobs(self) -> None:
        """A job that ends before all of its ranks are connected says nothing on any channel."""
        for team in self._teams.values():
            for job in team.jobs:
                if len(team.ready) < team.ranks and job.poll() is not None:
                    raise ContestError(
                        f"{team.peer.name} ended with code {job.returncode} before it was ready{team.last_output()}"
                    )

    def _accept(self) -> tuple[bool, str] | None:
        connection, _ = self._listener.accept()
        channel = Channel(connection)
        connection.settimeout(HELLO_LIMIT_S)
        try:
            if channel.peer()[1] != os.geteuid():
                raise ChannelClosed("not a process of this user")
            hello = channel.receive()
        except ChannelClosed:
            channel.close()
            return None
        team, rank = self._teams[hello["contestant"]], int(hello["rank"])
        if rank in team.channels or not 0 <= rank < team.ranks:
            raise ContestError(f"{team.peer.name} has started a rank {rank} where ranks 0 to {team.ranks - 1} were due")
        connection.settimeout(None)
        team.channels[rank] = channel
        team.processes[rank] = os.pidfd_open(channel.peer()[0])
        self._selector.register(connection, selectors.EVENT_READ, (team, rank))
        return self._read(team, rank) if channel.has_message() else None

    def _read(self, team: Team, rank: int) -> tuple[bool, str] | None:
        """Handles what a rank has sent; returns (is it a cause, sentence) when that was bad news."""
        channel = team.channels[rank]
        try:
            messages = channel.receive_all()
        except ChannelClosed:
            self._selector.unregister(channel.socket)
            sentence = self._lost(team, rank)
            team.channels.pop(rank).close()
            return True, sentence
        for message in messages:
            if "failed" in message:
                self._selector.unregister(channel.socket)  # that its channel ends now is no news
                return False, f"rank {rank} of {team.peer.name} failed at {self._doing}: {message['failed']}"
            if "exchange" in message:
                team.exchanged[rank] = message["exchange"]
                self._exchange(team)
            elif "ready" in message:
                team.ready.add(rank)
                team.versions = message["ready"]
            else:
                team.answers[rank] = message
        return None

    @staticmethod
    def _exchange(team: Team) -> None:
        if len(team.exchanged) == team.ranks:
            values = [team.exchanged[rank] for rank in range(team.ranks)]
            team.exchanged.clear()
            for channel in team.channels.values():
                with contextlib.suppress(ChannelClosed):  # its end will be read from it
                    channel.send({"exchange": values})

    def _lost(self, team: Team, rank: int) -> str:
        process = team.channels[rank].peer()[0]
        return f"rank {rank} of {team.peer.name} (process {process}) died at {self._doing}{team.last_output()}"


def _die_with_driver() -> None:
    """Runs in a new rank: when the driver is killed, so is it, even if it is stopped."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end_with_driver() -> None:
    """Runs in a new launcher: when the driver is killed, it is asked to end, and ends its ranks."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _shared_files(channel: Channel) -> list[Path]:
    """The named shared memory that a rank has mapped and that belongs to this user."""
    try:
        maps = Path(f"/proc/{channel.peer()[0]}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    names = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line}
    paths = [Path(name) for name in names if name.startswith("/dev/shm/")]
    return [path for path in paths if path.exists() and path.stat().st_uid == os.geteuid()]


def _wait_for(jobs: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Returns when all have ended, or after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    for job in jobs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(max(0.0, deadline - time.monotonic()))


def _on_signal(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)


def start(parse: Callable[[list[str]], Namespace], run: Callable[[Namespace], int]) -> NoReturn:
    """A benchmark's script. It ends with the code of ``run``, or 1 and a sentence on stderr if the contest broke."""
    arguments = parse(sys.argv[1:])
    sys.exit(_exit_code(lambda: run(arguments)))


def _exit_code(run: Callable[[], int]) -> int:
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGHUP, _on_signal)
    name = Path(sys.argv[0]).name
    if "RANK" in os.environ or "HOROVOD_RANK" in os.environ:
        print(f"{name}: start it without a launcher; it starts the ranks of all contestants itself", file=sys.stderr)
        return 2
    try:
        return run()
    except ContestError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
