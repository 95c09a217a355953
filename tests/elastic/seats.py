"""Elastic jobs whose driver is the test: it starts workers, seats those that are ready, and replaces the dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import rank_pool  # noqa: F401  (workers are forked from a process that has imported all that they need)

from horo.bootstrap.generations import Change, change_key, seat_entries
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.server import StoreServer
from horo.elastic import commits

__all__ = ["Seats"]

_DEADLINE_S = 60.0
_SECRET = b"s" * 32
_JOB = "job"


def _work(environment: dict[str, str], files: tuple[str, ...], program: Callable[..., None], args: Any) -> None:
    """The life of a worker; ``files``: its pipe to the driver, the memory of its slot and of all slots, its log."""
    pipe, memory, common, log = files
    sink = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.update(environment)
    end = os.open(pipe, os.O_WRONLY)
    os.environ["HORO_END_PIPE"] = f"{end}:{os.fstat(end).st_ino}"
    os.environ["HORO_COMMIT_FD"] = commits.words_of(os.open(memory, os.O_RDWR))
    os.environ["HORO_HOST_COMMIT_FD"] = commits.words_of(os.open(common, os.O_RDWR))
    program(*args)
    os._exit(0)  # an interpreter with torch takes a second to end


class Seats:
    """The driver of one job on one host; used as a context that ends whatever is left of it.

    Args:
        program: What a worker does, with the arguments behind it.
        replace: Whether a dead worker's slot gets another one.
        environment: Further variables of workers.
        agents: The number of those among which slots are dealt out: each has a memory for its workers together.
    """

    def __init__(
        self,
        program: Callable[..., None],
        *args: Any,
        replace: bool,
        environment: dict[str, str] | None = None,
        agents: int = 1,
    ) -> None:
        self._environment = environment or {}
        self.leaves = False
        """Whether all are to leave at the first commit after the begin."""
        self._program, self._args, self._replace = program, args, replace
        self._folder = tempfile.TemporaryDirectory()
        self._server = StoreServer(["127.0.0.1"], _SECRET)
        self._store = StoreClient(*self._server.endpoints[0], _SECRET, 10.0)
        self.generations: list[list[int]] = []
        """The workers of each, by rank."""
        self._workers: dict[int, BaseProcess] = {}
        self._pipes: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._memories: list[int] = []
        self._common = [commits.create() for _ in range(agents)]
        self._seated: dict[int, int] = {}
        self._ready: set[int] = set()
        self.reports: list[tuple[int, dict[str, Any]]] = []

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            if worker.is_alive():
                worker.kill()
            worker.join()
        for fd in [*self._pipes.values(), *self._memories, *self._common]:
            os.close(fd)
        self._store.close()
        self._server.close()
        self._folder.cleanup()

    def run(self, size: int) -> dict[int, int]:
        """Runs the job to its end, begun with so many workers; the exit status of each worker."""
        for slot in range(size):
            self._memories.append(commits.create())
            self._start(slot, size)
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            self._read()
            self._replace_dead()
            alive = [worker for worker, process in self._workers.items() if process.is_alive()]
            if not alive and not self._dead() & self._slots.keys():
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"the job does not end; {self.generations=} {alive=} {self.reports=}{self.logs()}")
            self._seat(size)
            select.select(list(self._pipes.values()), [], [], 0.05)
        return {worker: process.exitcode or 0 for worker, process in self._workers.items()}

    def logs(self) -> str:
        """The words of all workers."""
        return "".join(
            f"\n--- {path.name}\n{path.read_text()}" for path in sorted(Path(self._folder.name).glob("log.*"))
        )

    def _start(self, slot: int, size: int) -> None:
        worker = len(self._workers)
        pipe = f"{self._folder.name}/pipe.{worker}"
        os.mkfifo(pipe)
        self._pipes[worker] = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._slots[worker] = slot
        environment = {
            "HORO_WORKER": str(worker),
            "HORO_GENERATION": str(len(self.generations) + 1),
            "HOROVOD_RANK": str(slot),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(slot),
            "HOROVOD_LOCAL_SIZE": str(size),
            "HORO_STORE": str(self._server.endpoints[0]),
            "HORO_SECRET": _SECRET.hex(),
            "HORO_JOB_ID": _JOB,
            "OMP_NUM_THREADS": "1",
            **self._environment,
        }
        both = self._memories[slot], self._common[slot % len(self._common)]
        memories = [f"/proc/{os.getpid()}/fd/{each}" for each in both]
        log = f"{self._folder.name}/log.{worker}"
        arguments = (environment, (pipe, *memories, log), self._program, self._args)
        process = multiprocessing.get_context("forkserver").Process(target=_work, args=arguments)
        process.start()
        self._workers[worker] = process

    def _read(self) -> None:
        for worker, fd in self._pipes.items():
            try:
                lines = os.read(fd, 1 << 16).splitlines()
            except BlockingIOError:
                continue
            for line in lines:
                report = json.loads(line).get("elastic")
                if report is not None:
                    self.reports.append((worker, report))
                    if report.get("ready"):
                        self._ready.add(worker)

    def _dead(self) -> set[int]:
        return {worker for worker, process in self._workers.items() if process.exitcode}

    def _replace_dead(self) -> None:
        dead = self._dead()
        self._ready -= dead
        for worker in dead & self._slots.keys():
            slot = self._slots.pop(worker)
            if self._replace:
                self._start(slot, len(self._memories))

    def _seat(self, size: int) -> None:
        """The next generation, if all that live of this one wait for it; a change, if newcomers wait for them."""
        members = set(self.generations[-1]) if self.generations else set(range(size))
        living = {worker for worker in members if self._workers[worker].exitcode is None}
        newcomers = self._ready - members
        if self._ready and living <= self._ready:
            generation, workers = len(self.generations) + 1, sorted(self._ready)
            if not living and self._replace and len(workers) < len(self._memories):
                return  # all have died: each slot gets another one
            self.generations.append(workers)
            self._ready.clear()
            self._seated |= {worker: self._seated.get(worker, 0) + 1 for worker in workers}
            numbers = [self._seated[worker] for worker in workers]
            for key, value in seat_entries(_JOB, generation, workers, [0] * len(workers), numbers):
                self._store.set(key, value)
        elif self.leaves and any("commit" in report for _, report in self.reports):
            self._store.set(change_key(_JOB, len(self.generations), 1), Change(leave=True).encode())
            self.leaves = False
        elif newcomers and self.generations:
            self._store.set(change_key(_JOB, len(self.generations), 1), Change(added=True).encode())
