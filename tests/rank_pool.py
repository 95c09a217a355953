"""Real rank processes that stay, so that many checks share the price of starting them."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from rank_worker import STACKS_END, serve

from horo.bootstrap.store.server import StoreServer

# Ranks are forked from a process that has imported torch once and nothing else has happened in. torch._dynamo is what
# the first optimizer of a process imports, as long as all of torch again, and compile_fx what the first torch.compile
# does; horo is there before, as in scripts. The last one is what init() imports.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "horo.torch",
        "pytest",
        "rank_worker",
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "horo.bootstrap.job",
    ]
)
_START_S = 60.0
_GRACE_S = 8.0
"""How long the other ranks may take after one has failed, before their stacks are asked for."""


class RankError(AssertionError):
    """What went wrong on which rank; with stacks of ranks that hung."""


class RankPool:
    """``size`` processes on this host, each in the same job; ``init``: they call ``hvd.init()`` before the first check.

    A check that fails on a rank spoils the pool (the ranks are out of step); it is replaced at the next ``run``.
    ``ranks_per_host``: on hosts as far as horo can see; 0: all on one.
    """

    def __init__(
        self, size: int, *, init: bool = True, environment: dict[str, str] | None = None, ranks_per_host: int = 0
    ) -> None:
        self.size = size
        self.processes: list[ForkServerProcess] = []
        self._init = init
        self._environment = environment or {}
        self._ranks_per_host = ranks_per_host
        self._channels: list[Connection[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: StoreServer | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
        """Runs ``function(*args)`` on every rank; results in rank order, or ``RankError`` if it failed or hung on one.

        The function travels by value with what it uses of its module, so the module is not imported there.
        """
        return self.run_each(function, [args] * self.size, deadline_s=deadline_s)

    def run_each(
        self,
        function: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        *,
        deadline_s: float = 60.0,
        lost: Sequence[int] = (),
    ) -> list[Any]:
        """As ``run``, with arguments per rank. Ranks in ``lost`` are expected to die and give None."""
        if not self.processes:
            self._start()
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            # once for ranks with the same arguments: it takes longer than many a test
            pickled = {id(arguments): cloudpickle.dumps((function, arguments)) for arguments in args}
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        for channel, arguments in zip(self._channels, args, strict=True):
            channel.send_bytes(pickled[id(arguments)])
        results = self._collect(deadline_s, lost)
        if lost:
            self.close()
        return results

    def close(self) -> None:
        """Ends the ranks: politely, and after a second not."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.cleanup()
        self.processes, self._channels, self._server, self._folder = [], [], None, None

    def _start(self) -> None:
        secret = secrets.token_hex(32)
        self._server = StoreServer(["127.0.0.1"], bytes.fromhex(secret))
        self._folder = tempfile.TemporaryDirectory()
        endpoint = self._server.endpoints[0]
        for rank in range(self.size):
            environment = {
                "HORO_DEADLOCK_TIME_SECONDS": "30",  # tests wait for signals and others, for long on a busy machine
                **({"HORO_HOST_ID": f"host {rank // self._ranks_per_host}"} if self._ranks_per_host else {}),
                **self._environment,
                "HOROVOD_SIZE": str(self.size),
                "HOROVOD_RANK": str(rank),
                "HOROVOD_LOCAL_SIZE": str(self.size),
                "HOROVOD_LOCAL_RANK": str(rank),
                "HORO_STORE": f"{endpoint.address}:{endpoint.port}",
                "HORO_SECRET": secret,
            }
            ours, theirs = _context.Pipe()
            self._log_path(rank).touch()
            process = _context.Process(
                target=serve, args=(theirs, environment, str(self._log_path(rank)), self._init), daemon=False
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._channels.append(ours)
        self._collect(_START_S, ())

    def _collect(self, deadline_s: float, lost: Sequence[int]) -> list[Any]:
        """One answer per rank, in rank order."""
        results: dict[int, Any] = dict.fromkeys(lost)
        failures: dict[int, str] = {}
        deadline = time.monotonic() + deadline_s
        while len(results) + len(failures) < self.size:
            waiting = [rank for rank in range(self.size) if rank not in results and rank not in failures]
            ready = wait([self._channels[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._stacks(waiting))
                break
            for rank in (rank for rank in waiting if self._channels[rank] in ready):
                try:
                    fine, value = pickle.loads(self._channels[rank].recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(10)
                    fine, value = False, f"the process ended with {self.processes[rank].exitcode}\n{self._log(rank)}"
                if fine:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            self.close()
            raise RankError("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.size)]

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """The stacks of ranks that did not answer."""
        texts = {}
        for rank in ranks:
            before = len(self._log(rank))
            pid = self.processes[rank].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
            deadline = time.monotonic() + 5
            while STACKS_END not in self._log(rank)[before:] and time.monotonic() < deadline:
                time.sleep(0.02)
            texts[rank] = f"no answer in time; its output and stacks:\n{self._log(rank)}"
        return texts

    def _log_path(self, rank: int) -> Path:
        return Path(self._folder.name if self._folder else "", f"rank{rank}.log")

    def _log(self, rank: int) -> str:
        return self._log_path(rank).read_text(errors="replace")


def on(fixture: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The body of a test runs on every rank of the pool of a fixture, with the test's other arguments."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            pool: RankPool = given.pop(fixture)
            pool.run(body, *given.values(), **options)

        return _as_test(test, body, fixture)

    return decorate


def on_own(
    size: int, *, init: bool = True, ranks_per_host: int = 0, deadline_s: float = 60.0, **environment: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``on``, in a job of the test's own, with ``environment``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            with RankPool(size, init=init, environment=environment, ranks_per_host=ranks_per_host) as pool:
                pool.run(body, *given.values(), deadline_s=deadline_s)

        return _as_test(test, body)

    return decorate


def _as_test(test: Callable[..., None], body: Callable[..., None], *fixtures: str) -> Callable[..., None]:
    """``test``, of which pytest sees the name of ``body``, and its parameters besides the fixtures."""
    functools.update_wrapper(test, body)
    names = [*fixtures, *inspect.signature(body).parameters]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return test


def one_of(*names: str) -> Any:
    """A fixture that is one pool after the other: those of the fixtures with these names."""

    @pytest.fixture(params=names)
    def pool(request: pytest.FixtureRequest) -> RankPool:
        found: RankPool = request.getfixturevalue(request.param)
        return found

    return pool
