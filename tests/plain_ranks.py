"""Real rank processes without torch that a test leads step by step, and that may be killed, stopped or cut off."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import marked_processes, wait_until

from horo.bootstrap.store.server import StoreServer

ANSWER_S = 20.0
"""Far below HORO_PEER_TIMEOUT and HORO_START_TIMEOUT: what comes by those only comes too late."""
_SECRET = "5a" * 32
_PROGRAM = Path(__file__).with_name("plain_rank.py")
_SERVE = """
import sys
from horo.bootstrap.store.server import StoreServer
with StoreServer(sys.argv[1:], bytes.fromhex(sys.stdin.readline().strip())) as server:
    print(",".join(map(str, server.endpoints)), flush=True)
    sys.stdin.read()
"""


@dataclass
class PlainRanks:
    """The ranks of one job; used as a context that ends whatever is left of them.

    ``hosts``: a label per rank; ranks with the same label share memory. ``enter``: how a command is run on a host,
    where hosts have networks of their own; ``serve_at``: address of the host of rank 0, then.
    """

    folder: Path
    hosts: str
    environment: dict[str, str] = field(default_factory=dict)
    enter: dict[str, Callable[[Sequence[str]], list[str]]] = field(default_factory=dict)
    serve_at: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    server: StoreServer | None = None

    def __enter__(self) -> PlainRanks:
        self.mark = f"HORO_TEST_MARK={uuid.uuid4().hex}"
        self._unread = [b""] * len(self.hosts)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._end)
        store = self._serve()
        for rank, host in enumerate(self.hosts):
            self.processes.append(self._launch(rank, host, store))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def tell(self, rank: int, *words: object) -> None:
        """Gives a rank a command of ``plain_rank.Rank``."""
        pipe = self.processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps(words).encode() + b"\n")
        pipe.flush()

    def tell_others(self, rank: int, *words: object) -> list[int]:
        """Tells all ranks but one the same; returns those."""
        told = [each for each in range(len(self.hosts)) if each != rank]
        for each in told:
            self.tell(each, *words)
        return told

    def answer(self, rank: int) -> dict[str, Any]:
        """What a rank answers; waits for it, with a deadline."""
        pipe = self.processes[rank].stdout
        assert pipe is not None
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._unread[rank]:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(pipe.fileno(), 1 << 16) if ready else b""
            if not data:
                what = "has ended" if ready else f"does not answer within {ANSWER_S:g} s"
                raise AssertionError(f"rank {rank} {what}; it wrote: {self.log(rank)}")
            self._unread[rank] += data
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def value(self, rank: int) -> Any:
        """The value of an answer that is no error."""
        answer = self.answer(rank)
        assert "error" not in answer, f"rank {rank}: {answer}"
        return answer["value"]

    def all(self, *words: object, ranks: Iterable[int] | None = None) -> list[Any]:
        """Tells ranks, by default all, the same and returns their values."""
        told = list(range(len(self.hosts)) if ranks is None else ranks)
        for rank in told:
            self.tell(rank, *words)
        return [self.value(rank) for rank in told]

    def assert_sum_is_of_all(self) -> None:
        """Of an ``allreduce`` that all ranks were told to do."""
        total = float(sum(range(len(self.hosts) + 1)))
        assert [self.value(rank) for rank in range(len(self.hosts))] == [[total, total]] * len(self.hosts)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal."""
        self.processes[rank].send_signal(number)

    def log(self, rank: int) -> str:
        """What it has written to stderr."""
        return (self.folder / f"stderr.{rank}").read_text()

    def shut_down(self) -> None:
        """All leave the job, and end by themselves."""
        self.all("close")
        assert set(self.finish()) == {0}

    def finish(self) -> list[int]:
        """Lets all ranks end by themselves; returns their codes. Nothing of the job is left then."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        codes = [process.wait(ANSWER_S) for process in self.processes]
        self._stack.close()
        wait_until(lambda: not marked_processes(self.mark), "no process of the job is left")
        return codes

    def _serve(self) -> str:
        if not self.enter:
            self.server = StoreServer(["127.0.0.1"], bytes.fromhex(_SECRET))
            self._stack.callback(self.server.close)
            return ",".join(map(str, self.server.endpoints))
        command = self.enter[self.hosts[0]]([sys.executable, "-c", _SERVE, self.serve_at])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environ())
        assert process.stdin is not None
        assert process.stdout is not None
        self._stack.callback(process.communicate, timeout=ANSWER_S)
        process.stdin.write(_SECRET.encode() + b"\n")
        process.stdin.flush()
        return process.stdout.readline().decode().strip()

    def _launch(self, rank: int, host: str, store: str) -> subprocess.Popen[bytes]:
        told = {
            "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(len(self.hosts)), "HOROVOD_HOSTNAME": f"host-{host}",
            "HORO_STORE": store, "HORO_SECRET": _SECRET, **({} if self.enter else {"HORO_HOST_ID": host}),
        }  # fmt: skip
        command = self.enter.get(host, list)([sys.executable, str(_PROGRAM)])
        with (self.folder / f"stderr.{rank}").open("wb") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._environ(told)
            )

    def _environ(self, more: dict[str, str] | None = None) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        return {**os.environ, "PYTHONWARNINGS": "ignore", **self.environment, **(more or {}), name: value}

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
