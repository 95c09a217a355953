"""How long training stands still when a rank or an agent is killed: until the others have finished their next step.

    python benchmarks/elastic_kills.py --peers horo --kills 50 --json out.json
    python benchmarks/elastic_kills.py --hosts 1 --peers torchrun --kills 4      beside torchrun --max-restarts

Kills are by SIGKILL: in a step, a commit, the sync of the state, and ``init()``, which a newcomer brings about. A job
of four ranks, which finish steps of a fraction of a millisecond, has many kills of horo's one after the other, each
once the one before is replaced. horo's survivors go on from their last commit; torchrun restarts all ranks, which read
no checkpoint here. Two hosts are network namespaces, and need root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import spaces
from contest import START_LIMIT_S, start
from launching import Job

RANK = str(Path(__file__).with_name("elastic_kills_rank.py"))
RANKS = 4
TARGET_S = 1.0
MEDIAN_TARGET_S = 0.3
AGENT, LEADER, OTHER = "agent", "leader of host 2", "another"
VICTIMS = {1: ("rank 0", OTHER), 2: ("rank 0", LEADER, OTHER)}
"""By the number of hosts."""
MOMENTS = ("step", "sync", "commit", "init")
FORMING = ("sync", "init")
"""Moments of a new generation, which begins when a newcomer is ready."""
PER_JOB = {1: 1000, 2: 8}
"""The kills of a job: a slot whose workers fail several times soon after their start waits before the next one. On one
host there are enough slots for all."""
PORT = 29411
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else ranks that torchrun has restarted find ports of those before
POLL_S = 0.01


@dataclass(frozen=True)
class Noted:
    """The first step of a process in a generation."""

    pid: int
    generation: int
    rank: int
    size: int
    host: int
    gap_s: float
    time_s: float


@dataclass(frozen=True)
class Case:
    """A victim, and the moment at which it is killed."""

    victim: str
    moment: str


JOIN = Case("none", "a newcomer joins")
JOIN_TARGET_S = 0.5


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time from a kill to the others' next step.")
    parser.add_argument("--hosts", choices=("1", "2", "1,2"), default="1,2", help="default: %(default)s")
    parser.add_argument("--peers", default="horo,torchrun", help="default: %(default)s")
    parser.add_argument(
        "--kills", type=int, default=13, help="for each peer and number of hosts (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: at least 1")
    if unknown := set(arguments.peers.split(",")) - {"horo", "torchrun"}:
        parser.error(f"--peers: {', '.join(sorted(unknown))} is not known; there are horo and torchrun")
    return arguments


def cases(peer: str, hosts: int) -> list[Case]:
    if peer == "torchrun":  # its agents do not go on without one of a fixed number of hosts
        return [Case(victim, "step") for victim in VICTIMS[hosts]]
    ranks = [Case(victim, moment) for moment in MOMENTS for victim in VICTIMS[hosts]]
    return [*ranks, Case(AGENT, "step")] if hosts > 1 else ranks


def commands(peer: str, made: spaces.Spaces | None, folder: str) -> list[list[str]]:
    """The commands that start a job: torchrun needs one per host."""
    program = [RANK, peer, folder]
    enter = [made.enter(index) for index in range(len(made.names))] if made else [[]]
    if peer == "horo":
        words = [sys.executable, "-m", "horo.runner", "-np", str(RANKS), "--min-np", "1", "--grace-seconds", "1"]
        words += ["--no-prefix", "-H", made.slots(RANKS) if made else f"localhost:{PER_JOB[1]}"]
        words += ["--blacklist-cooldown-range", "1", "1"]
        words += ["--remote-shell", str(made.remote_shell)] if made else []
        return [[*enter[0], *words, sys.executable, *program]]
    where = f"{made.addresses[0] if made else '127.0.0.1'}:{PORT}"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(enter))]
    words += ["--nproc-per-node", str(RANKS // len(enter)), "--max-restarts", "9"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", "kills"]
    return [[*each, *words, *program] for each in enter]


class Training:
    """A job in progress.

    Args:
        peer: Its launcher.
        made: Its hosts; None: this one.
        folder: Of its notes.
        jobs: Its processes.

    Attributes:
        gaps_s: The longest time between two steps of a rank while a newcomer has joined, each time.
    """

    def __init__(self, peer: str, made: spaces.Spaces | None, folder: str, jobs: Sequence[Job]) -> None:
        self._peer, self._made, self._folder, self._jobs = peer, made, Path(folder), jobs
        self.gaps_s: list[float] = []

    def kill(self, case: Case) -> float:
        """The time in seconds that one kill costs."""
        if case.moment in FORMING:
            members = self._await("step of fewer ranks", lambda: self._last(below=RANKS))
        else:
            members = self._await("step of all ranks", lambda: self._last(RANKS))
            self.gaps_s += [gap_s for gap_s in [max(note.gap_s for note in members)] if gap_s]
            time.sleep(random.uniform(0.2, 0.5))  # anywhere between two commits
        dead = _dead(case.victim, members)
        begin_s = self._kill(case, dead)
        survivors = {note.pid for note in members} - {note.pid for note in dead}

        def gone_on() -> list[Noted]:
            notes = sorted((note for note in self._notes() if note.time_s > begin_s), key=lambda note: -note.time_s)
            if self._peer == "torchrun":
                return notes if len(notes) == RANKS else []
            first = {note.pid: note for note in notes if note.pid in survivors}
            return list(first.values()) if first.keys() == survivors else []

        notes: list[Noted] = self._await("step after the kill", gone_on)
        return max(note.time_s for note in notes) - begin_s

    def _kill(self, case: Case, dead: Sequence[Noted]) -> float:
        """Kills them, or has one of them do so; the time at which that was."""
        if self._peer == "torchrun" or case.victim == AGENT:
            pids = [note.pid for note in dead] if self._made is None or case.victim != AGENT else _agents(self._made)
            begin_s = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return begin_s
        (victim,) = dead
        order = self._folder / f"new.{victim.pid}"
        order.write_text(case.moment)
        order.rename(self._folder / f"kill.{victim.pid}")
        died = self._folder / f"died.{victim.pid}"
        times: list[float] = self._await(f"death in {case.moment}", lambda: _times_in(died))
        return times[0]

    def _notes(self) -> list[Noted]:
        """The whole lines of all processes."""
        found = []
        for path in self._folder.iterdir():
            for line in path.read_text().splitlines(keepends=True) if path.name.isdigit() else ():
                if line.endswith("\n"):
                    generation, rank, size, host, gap_s, time_s = line.split()
                    numbers = int(generation), int(rank), int(size), int(host)
                    found.append(Noted(int(path.name), *numbers, float(gap_s), float(time_s)))
        return found

    def _last(self, size: int = 0, below: int = 0) -> list[Noted]:
        """The members of the last generation, if all have finished a step and it has that size."""
        notes = self._notes()
        last = max((note.generation for note in notes), default=0)
        members = sorted((note for note in notes if note.generation == last), key=lambda note: note.rank)
        is_whole = bool(members) and len(members) == members[0].size
        return members if is_whole and (len(members) == size or len(members) < below) else []

    def _await(self, what: str, find: Callable[[], list[Any]]) -> list[Any]:
        """What ``find`` finds, once it finds some.

        Raises:
            ContestError: it takes too long, or a job has ended.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while not (found := find()):
            ended = [job for job in self._jobs if job.process.poll() is not None]
            if ended or time.monotonic() > deadline:
                when = "before the end" if ended else f"after {START_LIMIT_S:g} s"
                raise (ended or self._jobs)[0].error(f"no {what} {when}")
            time.sleep(POLL_S)
        return found


def _dead(victim: str, members: Sequence[Noted]) -> list[Noted]:
    """Those that a kill ends. On two hosts, the other rank is a neighbour of rank 0, where it has one."""
    away = [note for note in members if note.host != members[0].host]
    if victim == AGENT:
        return away
    if victim == LEADER:
        return away[:1] or list(members[-1:])
    own = [note for note in members if note.host == members[0].host]
    return list(members[:1]) if victim == "rank 0" else own[1:][-1:] or away[-1:]


def _times_in(path: Path) -> list[float]:
    text = path.read_text() if path.exists() else ""
    return [float(text)] if text.endswith("\n") else []


def _agents(made: spaces.Spaces) -> list[int]:
    """The agent on the second host, without its guard, which is its child."""
    found = made.processes(1, "horo.runner.agent")
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return [
        pid
        for pid, parent in parents.items()
        if parent not in parents and "python" in str(Path(f"/proc/{pid}/exe").readlink())
    ]


@contextlib.contextmanager
def training(peer: str, made: spaces.Spaces | None) -> Iterator[Training]:
    with tempfile.TemporaryDirectory(prefix="horo-kills-") as folder, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(words, APART)) for words in commands(peer, made, folder)]
        yield Training(peer, made, folder, jobs)


def in_turn(rows: Sequence[Case], kills: int) -> list[Case]:
    """So many of them, alike often. One at the begin of a generation comes behind another, whose newcomer brings it."""
    chosen = list(itertools.islice(itertools.cycle(rows), kills))
    steady = sorted((case for case in chosen if case.moment not in FORMING), key=lambda case: case.victim == AGENT)
    forming = [case for case in chosen if case.moment in FORMING]
    pairs = itertools.zip_longest(steady, forming)
    return [case for pair in pairs for case in pair if case is not None]


def measure(peer: str, hosts: int, kills: int) -> list[dict[str, Any]]:
    rows = cases(peer, hosts)
    seconds: dict[Case, list[float]] = {case: [] for case in [*rows, JOIN]}
    left = in_turn(rows, kills)
    with spaces.Spaces(hosts) if hosts > 1 else contextlib.nullcontext() as made:
        while left:
            count = PER_JOB[hosts] if peer == "horo" else 1
            with training(peer, made) as job:
                for case in left[:count]:
                    seconds[case].append(job.kill(case))
                seconds[JOIN] += job.gaps_s
            left = left[count:]
    return [row(peer, hosts, case, values) for case, values in seconds.items() if values]


def row(peer: str, hosts: int, case: Case, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "contestant": peer,
        "hosts": hosts,
        "victim": case.victim,
        "moment": case.moment,
        "kills": len(seconds),
        "min_s": min(seconds),
        "median_s": statistics.median(seconds),
        "p99_s": sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1],
        "max_s": max(seconds),
        "seconds": list(seconds),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each case, and one for all kills."""
    peer, hosts = rows[0]["contestant"], rows[0]["hosts"]
    seconds = [second for each in rows if each["victim"] != JOIN.victim for second in each["seconds"]]
    for each in [*rows, row(peer, hosts, Case("all", ""), seconds)]:
        times = " ".join(f"{report.time_text(each[name] * 1e6):>8}" for name in ("min_s", "median_s", "p99_s", "max_s"))
        is_join = each["victim"] == JOIN.victim
        is_reached = each["max_s"] <= (JOIN_TARGET_S if is_join else TARGET_S)
        is_reached &= is_join or each["median_s"] <= MEDIAN_TARGET_S
        verdict = ("ok" if is_reached else "short") if peer == "horo" else ""
        print(f"{peer:<9} {hosts:>5}  {each['victim']:<16} {each['moment']:<16} {each['kills']:>5} {times}  {verdict}")
    sys.stdout.flush()


def run(arguments: argparse.Namespace) -> int:
    print(f"From SIGKILL to the others' next step, and longest pause of a step while a newcomer joins, {RANKS} ranks")
    names = " ".join(f"{name:>8}" for name in ("min", "median", "p99", "max"))
    print(f"{'':<9} hosts  {'victim':<16} {'moment':<16} kills {names}", flush=True)
    rows = []
    for hosts in map(int, arguments.hosts.split(",")):
        reason = spaces.why_not() if hosts > 1 else ""
        if reason:
            print(f"elastic_kills.py: two hosts are left out: {reason}")
            continue
        for peer in arguments.peers.split(","):
            rows += (measured := measure(peer, hosts, arguments.kills))
            show(measured)
    report.save(arguments, "elastic_kills", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
