"""The two meetings of all ranks in each step of a sharded optimizer."""

from __future__ import annotations

import array
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horo.torch.engine import runtime as _runtime
from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import repeat, run_allreduce
from horo.torch.functions.objects import gather_objects
from horo.torch.ops.allreduce import Max
from horo.torch.optimizer.membership import Membership

__all__ = ["Meeting", "is_alive", "own_process"]

FLAGS = 2


class Meeting:
    """The ranks of one optimizer in one job, those of this host among them.

    Args:
        member: The optimizer's place in the job; the job and the process set are its present ones.
    """

    def __init__(self, member: Membership) -> None:
        self.runtime = _runtime.current()
        self.team = member.team
        self._label = f"{member.label}.step"
        self._process_set = member.options.process_set
        members = self.runtime.teams.find(self.team).ranks
        job = self.runtime.job
        self.rank = job.rank
        self.host_ranks = tuple(rank for rank in job.host_ranks if rank in members)
        """Its ranks on this host, ascending. The first one makes the memory."""
        self.index = self.host_ranks.index(job.rank)
        self.is_on_hosts = len(self.host_ranks) < len(members)
        """Whether other hosts take part."""
        self.timeout_s = job.directory.timeout_s
        self._flags = array.array("q", [0] * FLAGS)
        self._tensor = torch.frombuffer(self._flags, dtype=torch.int64)
        self._specs = {what: Operation(self._label, what, Max, team=self.team) for what in ("entry", "exit")}

    def is_of(self, runtime: _runtime.Runtime, team: int) -> bool:
        """Whether it is a meeting in that job, of that process set."""
        return self.runtime is runtime and self.team == team

    def meet(self, what: str, *flags: bool) -> list[int]:
        """Blocks until all ranks have come; which flags a rank has raised.

        Args:
            what: ``entry`` or ``exit``.
            flags: At most ``FLAGS``.

        Raises:
            GroupError: A rank is lost or has shut down.
        """
        for index, flag in enumerate(flags):
            self._flags[index] = flag
        spec = self._specs[what]
        if repeat(spec, self._tensor, True, None) is None:
            run_allreduce([self._tensor], spec, in_place=True, key=spec)
        return self._flags.tolist()

    def gather(self, what: str, value: Any) -> dict[int, Any]:
        """The values of all ranks, by rank. Blocks until all have come.

        Raises:
            GroupError: A rank is lost or has shut down.
        """
        return gather_objects(value, f"{self._label}.{what}", self._process_set)

    def refuse_ended(self) -> None:
        """Raises if the job has ended.

        Raises:
            GroupError: It has.
        """
        error = self.runtime.core.health()
        if error is not None:
            raise error

    def refuse_failures(self, what: str, failure: Exception | None) -> None:
        """Raises on all ranks if a rank has failed: there its own error, elsewhere one of the same class.

        Raises:
            HoroError: A rank has failed.
        """
        told = self.gather(what, None if failure is None else (type(failure), str(failure)))
        if failure is not None:
            raise failure
        for rank, failed in told.items():
            if failed is not None:
                kind: Callable[[str], Exception] = failed[0]
                raise kind(f"rank {rank}: {failed[1]}")


def own_process() -> tuple[str, int, str]:
    """The identity of this process on its host: the space of its number, its number, the time of its start."""
    return _number_space(), os.getpid(), _started(os.getpid())


def is_alive(process: tuple[str, int, str]) -> bool:
    """Whether a process runs still; True where it cannot be seen."""
    space, number, started = process
    return space != _number_space() or _started(number) == started


def _number_space() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _started(number: int) -> str:
    """The time at which a process was started; empty if it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
