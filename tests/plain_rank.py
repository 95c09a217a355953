"""One rank that needs no torch and does what it reads from stdin: a program for ``plain_ranks.PlainRanks``.

Each line it reads is ``[command, argument...]`` in JSON, each line it writes the answer: ``{"value": ...}`` or
``{"error": class, "lost": whether HorovodInternalError catches it, "text": ...}``.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horo.bootstrap import job as bootstrap
from horo.bootstrap.running_rank import RunningRank
from horo.core.context import DTYPES, OPS, REDUCE_OPS, RequestBuffer, Tensor
from horo.errors import HoroError, HorovodInternalError


class Rank:
    """The commands."""

    def __init__(self) -> None:
        self._job: RunningRank | None = None
        self._pending: dict[str, tuple[int, array.array[float], array.array[float]]] = {}
        self.hasty = False

    def start(self, comm: Any = None) -> list[int]:
        """``init(comm)``; answers rank and size."""
        self._job = bootstrap.start(comm=comm)
        return [self._job.rank, self._job.size]

    def start_and_die_in(self, where: str, name: str) -> None:
        """``init()``, but SIGKILL where ``name`` of ``where`` (``Rendezvous`` or ``module``) would be called."""
        target: Any = bootstrap.Rendezvous if where == "Rendezvous" else bootstrap
        getattr(target, name)  # it is there
        setattr(target, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        self.start()

    def submit(self, name: str, count: int = 1000) -> None:
        """Submits the sum of ``count`` numbers, each this rank's number plus one."""
        self._submit(name, array.array("f", [self.job.rank + 1.0]) * count, array.array("f", [0.0]) * count)

    def _submit(self, name: str, values: array.array[float], result: array.array[float], team: int = 0) -> None:
        count = len(values)
        tensor = Tensor(values.buffer_info()[0], result.buffer_info()[0], (count,), DTYPES["float32"])
        request = RequestBuffer.of(OPS["allreduce"], name, [tensor], reduce_op=REDUCE_OPS["sum"], team=team)
        handle = self.job.context.submit(request)
        self._pending[name] = handle, values, result

    def add_team(self, ranks: list[int]) -> int:
        """Answers its number."""
        return self.job.add_team(ranks)

    def remove_team(self, team: int) -> None:
        """Together with all ranks."""
        self.job.context.remove_team(team)

    def sum_in(self, team: int, name: str, count: int) -> list[float]:
        """As ``allreduce``, in a team."""
        self._submit(name, array.array("f", [self.job.rank + 1.0]) * count, array.array("f", [0.0]) * count, team)
        return self.wait(name)

    def descriptors(self) -> int:
        """How many are open."""
        return len(list(Path("/proc/self/fd").iterdir()))

    def wait(self, name: str) -> list[float]:
        """Answers the lowest and the highest number of the sum."""
        result = self._wait(name)
        return [min(result), max(result)]

    def _wait(self, name: str) -> array.array[float]:
        handle, _, result = self._pending[name]
        try:
            self.job.context.wait(handle)
        finally:
            self.job.context.release(handle)
            del self._pending[name]
        return result

    def allreduce(self, name: str, count: int = 1000) -> list[float]:
        """``submit`` and ``wait``."""
        self.submit(name, count)
        return self.wait(name)

    def join(self) -> int:
        """Answers the rank that joined last."""
        handle = self.job.context.start_join(0)
        try:
            self.job.context.wait(handle)
            return self.job.context.joined_last(handle)
        finally:
            self.job.context.release(handle)

    def repeat(self, name: str, count: int, times: int) -> list[float]:
        """Many of one tensor, with next to nothing between two of them; the first is told at once."""
        values = array.array("f", [self.job.rank + 1.0]) * count
        result = array.array("f", [0.0]) * count
        for index in range(times):
            self._submit(name, values, result)
            self._wait(name)
            if index == 0:
                say({"value": "going"})
        return [min(result), max(result)]

    def counters(self) -> dict[str, int]:
        """The core's."""
        return self.job.context.counters()

    def be_hasty(self) -> None:
        """From now on the process ends at once after any error, as a script does that does not catch it."""
        self.hasty = True

    def keep_interpreter(self, fifo: str) -> None:
        """A call that keeps the interpreter until a byte comes, so that no other thread of Python runs."""
        pipe = os.open(fifo, os.O_RDWR)  # which, unlike opening for reading alone, waits for nobody
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
        os.close(pipe)

    def close(self) -> None:
        """``shutdown()``."""
        self.job.close()

    def exit(self, code: int) -> None:
        """Ends the process without ``shutdown()``."""
        os._exit(code)

    @property
    def job(self) -> RunningRank:
        """The job, once started."""
        if self._job is None:
            raise RuntimeError("start first")
        return self._job


def say(answer: dict[str, Any]) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


def main() -> None:
    """Serves until stdin ends."""
    rank = Rank()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        method: Callable[..., Any] = getattr(rank, command)
        try:
            say({"value": method(*arguments)})
        except HoroError as error:
            lost = isinstance(error, HorovodInternalError)
            say({"error": type(error).__name__, "lost": lost, "text": str(error)})
            if rank.hasty:
                os._exit(1)


if __name__ == "__main__":
    main()
