"""Real rank processes that stay, so that many checks share the price of starting them."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from horo._bootstrap.store import StoreServer

__all__ = ["RankError", "RankPool"]

_WORKER = Path(__file__).with_name("rank_worker.py")
_START_S = 60.0
_GRACE_S = 8.0
"""How long the other ranks may take after one has failed, before their stacks are asked for."""


class RankError(AssertionError):
    """What went wrong on which rank; with stacks of ranks that hung."""


class RankPool:
    """``size`` processes on this host, each in the same job.

    A check that fails on a rank spoils the pool (the ranks are out of step); it is replaced at the next ``run``.

    Args:
        size: number of ranks.
        init: whether the ranks call ``hvd.init()`` before the first check.
        environment: added to the ranks' environment.
    """

    def __init__(self, size: int, *, init: bool = True, environment: dict[str, str] | None = None) -> None:
        self.size = size
        self.processes: list[subprocess.Popen[bytes]] = []
        self._init = init
        self._environment = environment or {}
        self._channels: list[Connection] = []
        self._errors: list[Any] = []
        self._server: StoreServer | None = None

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0) -> list[Any]:
        """Runs ``function(*args)`` on every rank and returns the results in rank order.

        The function travels by value with what it uses of its module, so the module is not imported there.

        Raises:
            RankError: it failed or hung on a rank.
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
            messages = [cloudpickle.dumps((function, arguments)) for arguments in args]
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        for channel, message in zip(self._channels, messages, strict=True):
            channel.send_bytes(message)
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
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._errors:
            log.close()
        if self._server is not None:
            self._server.close()
        self.processes, self._channels, self._errors, self._server = [], [], [], None

    def _start(self) -> None:
        secret = secrets.token_hex(32)
        self._server = StoreServer(["127.0.0.1"], bytes.fromhex(secret))
        endpoint = self._server.endpoints[0]
        shared = {
            **os.environ,
            **self._environment,
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_SIZE": str(self.size),
            "HORO_STORE": f"{endpoint.address}:{endpoint.port}",
            "HORO_SECRET": secret,
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(self.size):
            ours, theirs = socket.socketpair()
            log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close())
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, str(_WORKER), str(theirs.fileno()), str(int(self._init))],
                    env={**shared, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self.processes.append(process)
            self._channels.append(Connection(ours.detach()))
            self._errors.append(log)
        self._collect(_START_S, ())

    def _collect(self, deadline_s: float, lost: Sequence[int]) -> list[Any]:
        """One answer per rank, in rank order."""
        results: dict[int, Any] = dict.fromkeys(lost)
        failures: dict[int, str] = {}
        deadline = time.monotonic() + deadline_s
        while len(results) + len(failures) < self.size:
            open_ranks = {self._channels[r]: r for r in range(self.size) if r not in results and r not in failures}
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._stacks(open_ranks.values()))
                break
            for channel in ready:
                rank = open_ranks[channel]  # type: ignore[index]
                try:
                    fine, value = pickle.loads(channel.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    fine, value = False, f"the process ended with {self.processes[rank].wait(10)}\n{self._log(rank)}"
                if fine:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            self.close()
            raise RankError("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.size)]

    def _stacks(self, ranks: Any) -> dict[int, str]:
        """The stacks of ranks that did not answer."""
        texts = {}
        for rank in ranks:
            before = len(self._log(rank))
            self.processes[rank].send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + 5
            while "rank_worker.py" not in self._log(rank)[before:] and time.monotonic() < deadline:
                time.sleep(0.02)
            texts[rank] = f"no answer in time; its output and stacks:\n{self._log(rank)}"
        return texts

    def _log(self, rank: int) -> str:
        log = self._errors[rank]
        log.seek(0, os.SEEK_END)
        return os.pread(log.fileno(), log.tell(), 0).decode(errors="replace")
