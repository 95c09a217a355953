"""How long training stands still when a rank or an agent is killed: until the others have finished their next step.

    python benchmarks/elastic_kills.py                       one host and two, beside torchrun --max-restarts
    python benchmarks/elastic_kills.py --hosts 1 --kills 25 --json out.json

Each kill, by SIGKILL, is that of a job of its own with four ranks, which finish steps of a fraction of a millisecond.
horo's survivors go on from their last commit; torchrun restarts all ranks, which read no checkpoint here. Two hosts are
network namespaces, and need root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
AGENT = "agent"
VICTIMS = {1: ("rank 0", "rank 3"), 2: ("rank 0", "rank 1", "rank 2", AGENT)}
"""By the number of hosts; on two, rank 2 is the second one's leader, and the agent is there."""
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
    time_s: float


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time from a kill to the others' next step.")
    parser.add_argument("--hosts", choices=("1", "2", "1,2"), default="1,2", help="default: %(default)s")
    parser.add_argument("--peers", default="horo,torchrun", help="default: %(default)s")
    parser.add_argument("--kills", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: at least 1")
    if unknown := set(arguments.peers.split(",")) - {"horo", "torchrun"}:
        parser.error(f"--peers: {', '.join(sorted(unknown))} is not known; there are horo and torchrun")
    return arguments


def commands(peer: str, made: spaces.Spaces | None, folder: str) -> list[list[str]]:
    """The commands that start a job: torchrun needs one per host."""
    program = [RANK, peer, folder]
    enter = [made.enter(index) for index in range(len(made.names))] if made else [[]]
    if peer == "horo":
        words = [sys.executable, "-m", "horo.runner", "-np", str(RANKS), "--min-np", "1", "--grace-seconds", "1"]
        words += ["--no-prefix", "-H", made.slots(RANKS) if made else f"localhost:{RANKS}"]
        words += ["--remote-shell", str(made.remote_shell)] if made else []
        return [[*enter[0], *words, sys.executable, *program]]
    where = f"{made.addresses[0] if made else '127.0.0.1'}:{PORT}"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(enter))]
    words += ["--nproc-per-node", str(RANKS // len(enter)), "--max-restarts", "9"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-id", "kills"]
    return [[*each, *words, *program] for each in enter]


def noted_in(folder: str) -> list[Noted]:
    """The whole lines of all processes."""
    found = []
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                generation, rank, size, time_s = line.split()
                found.append(Noted(int(path.name), int(generation), int(rank), int(size), float(time_s)))
    return found


def await_notes(jobs: Sequence[Job], what: str, find: Callable[[], list[Noted]]) -> list[Noted]:
    """What ``find`` finds, once it finds some.

    Raises:
        ContestError: it takes too long, or a job has ended.
    """
    deadline = time.monotonic() + START_LIMIT_S
    while not (found := find()):
        ended = [job for job in jobs if job.process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise (ended or jobs)[0].error(f"no {what} {'before the end' if ended else f'after {START_LIMIT_S:g} s'}")
        time.sleep(POLL_S)
    return found


def kill_once(peer: str, victim: str, made: spaces.Spaces | None) -> float:
    """The time in seconds that one kill costs a new job."""
    with tempfile.TemporaryDirectory(prefix="horo-kills-") as folder, contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(words, APART)) for words in commands(peer, made, folder)]

        def whole() -> list[Noted]:
            notes = [note for note in noted_in(folder) if note.size == RANKS]
            return notes if len(notes) == RANKS else []

        members = await_notes(jobs, "first step of all ranks", whole)
        first = members[0].generation
        time.sleep(random.uniform(0.2, 0.5))  # anywhere between two commits
        if victim == AGENT and made is not None:
            pids = agents(made)
            dead = {note.pid for note in members if note.rank >= RANKS // 2}
        else:
            pids = [note.pid for note in members if note.rank == int(victim.split()[1])]
            dead = set(pids)
        begin_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        survivors = {note.pid for note in members} - dead

        def gone_on() -> list[Noted]:
            notes = [note for note in noted_in(folder) if note.generation > first]
            if peer == "torchrun":
                return notes if len(notes) == RANKS else []
            notes = [note for note in notes if note.pid in survivors]
            earliest = {note.pid: note for note in sorted(notes, key=lambda note: -note.generation)}
            return list(earliest.values()) if earliest.keys() == survivors else []

        return max(note.time_s for note in await_notes(jobs, "step after the kill", gone_on)) - begin_s


def agents(made: spaces.Spaces) -> list[int]:
    """The agent on the second host, without its guard, which is its child."""
    found = made.processes(1, "horo.runner.agent")
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return [
        pid
        for pid, parent in parents.items()
        if parent not in parents and "python" in str(Path(f"/proc/{pid}/exe").readlink())
    ]


def measure(peer: str, hosts: int, kills: int) -> list[dict[str, Any]]:
    rows = []
    with spaces.Spaces(hosts) if hosts > 1 else contextlib.nullcontext() as made:
        for victim in VICTIMS[hosts]:
            if victim == AGENT and peer == "torchrun":
                continue  # it does not go on without one of a fixed number of hosts
            seconds = [kill_once(peer, victim, made) for _ in range(kills)]
            rows.append({"contestant": peer, "hosts": hosts, "victim": victim, "seconds": seconds})
            least, middle, most = (report.time_text(f(seconds) * 1e6) for f in (min, statistics.median, max))
            is_reached = max(seconds) <= TARGET_S and statistics.median(seconds) <= MEDIAN_TARGET_S
            verdict = ("ok" if is_reached else "short") if peer == "horo" else ""
            print(
                f"{peer:<9} {hosts} host{'s' if hosts > 1 else ' '} {victim:<7} {least} / {middle} / {most}  {verdict}",
                flush=True,
            )
    return rows


def run(arguments: argparse.Namespace) -> int:
    print(f"From SIGKILL to the others' next step, {RANKS} ranks, {arguments.kills} kills each: min / median / max")
    rows = []
    for hosts in map(int, arguments.hosts.split(",")):
        reason = spaces.why_not() if hosts > 1 else ""
        if reason:
            print(f"elastic_kills.py: two hosts are left out: {reason}")
            continue
        for peer in arguments.peers.split(","):
            rows += measure(peer, hosts, arguments.kills)
    report.save(arguments, "elastic_kills", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
