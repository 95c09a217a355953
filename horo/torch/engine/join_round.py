"""Joining: a rank that has run out of data takes part in the operations of the others until they have, too."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from horo.core.context import OPS, Context, RequestBuffer
from horo.errors import HoroError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from horo.bootstrap.running_rank import RunningRank
    from horo.torch.engine.process_set_registry import Teams

__all__ = ["Joining"]


class Joins(Protocol):
    """A ``Runtime``, as its joins need it."""

    job: RunningRank
    core: Context
    teams: Teams
    is_joining: bool
    ended: bool
    active_calls: dict[object, object]
    abandoned: dict[int, object]
    sharded: weakref.WeakSet[Any]

    def raise_ended(self, operation: str) -> NoReturn:
        """As of ``Runtime``."""

    def restart_names(self) -> None:
        """As of ``Runtime``."""


class _Round:
    """One round of joining: from the first call of ``join`` until all ranks have joined."""

    def __init__(self, number: int, teams: Iterable[int], has_sets: bool) -> None:
        self.number = number
        """The number of rounds of the job that have ended when this one has."""
        self.teams = tuple(teams)
        """The teams that this rank joins. None comes or goes before the end."""
        self.has_sets = has_sets
        """Whether the job has process sets, whichever ranks are their members."""
        self.buffers: dict[int, RequestBuffer] = {}
        """The buffer of each team that this rank has joined, set before its handle, which no interrupt may lose."""
        self.end: RequestBuffer | None = None
        """The barrier after them, in a job that has process sets."""
        self.callers: set[object] = set()
        """The calls that wait for it, by tokens. The last one releases the handles."""
        self.last: int | None = None
        """The rank that joined last, once all have."""

    @property
    def handles(self) -> list[int]:
        """The handles of the teams that are joined, the team of all ranks first."""
        return [buffer.last_handle[0] for buffer in self.buffers.values() if buffer.last_handle[0]]

    @property
    def all_handles(self) -> list[int]:
        return [*self.handles, *self.end_handles]

    @property
    def end_handles(self) -> list[int]:
        """The handle of the barrier, if there is one."""
        return [handle for buffer in [self.end] if buffer is not None and (handle := buffer.last_handle[0])]


class Joining:
    """The joins of this rank in the job of a runtime.

    A round ends in two steps. When all members of each team have joined, names are counted anew, and this rank may
    submit again. If there are process sets, a barrier of all ranks follows: ranks outside a set may be done before its
    members, and members would lose their round if those left the job.

    A signal handler may end ``join`` by an exception anywhere. So each step may be done twice, and its last line notes
    that it is done. The next operation does the steps that are left, see ``settle``.
    """

    def __init__(self, runtime: Joins) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._lock = threading.RLock()  # a signal handler may communicate, too
        self._round: _Round | None = None
        self._rounds = 0

    @property
    def rounds(self) -> int:
        """The number of times that all ranks have joined; equal on all ranks where none has joined."""
        if self._runtime.is_joining:
            self.settle()
        return self._rounds

    def run(self) -> int:
        """Joins all process sets of this rank and blocks until all ranks have; the rank that joined last.

        If a call before was interrupted, or another thread is in one, this waits for the same round.

        Raises:
            HoroError: As ``Context.start_join``, or the group has ended.
            UnsupportedError: The job uses NCCL, which needs memory on the GPU of each rank.
            UsageError, AbortedError: As ``Runtime.raise_ended``.
            BaseException: The exception of a signal handler; this rank stays joined.
        """
        runtime, call = self._runtime, object()
        if runtime.job.nccl_device is not None and runtime.job.size > 1:
            raise UnsupportedError(
                "join: not with HORO_GPU_OPERATIONS=nccl, as NCCL needs a tensor of each rank; use "
                "HORO_GPU_OPERATIONS=staged, or give all ranks equally many batches"
            )
        if runtime.sharded and runtime.job.size > 1:
            gc.collect()
        if runtime.sharded and runtime.job.size > 1:
            raise UsageError(
                f"join: rank {runtime.job.rank} owns parameters of a DistributedOptimizer(sharding=...), and a rank "
                "that has joined steps nothing; give all ranks equally many batches"
            )
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended("join")
            return self._wait()
        finally:
            runtime.active_calls.pop(call, None)

    def settle(self) -> bool:
        """Ends the round of a call that was interrupted if all ranks have joined by now. Whether this rank still waits.

        Raises:
            HoroError: As ``Context.start_join``.
        """
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            with self._lock:
                current = self._round
                if current is None or runtime.ended:
                    runtime.is_joining = False
                    return False
                self._start(current)
                if any(map(self._core.in_progress, current.handles)):
                    return True
                self._complete(current)
                if not current.callers:
                    for handle in current.all_handles:
                        runtime.abandoned[handle] = current
                self._close(current)
                return False
        finally:
            runtime.active_calls.pop(call, None)

    def settle_before(self, operation: str) -> None:
        """As ``settle``, for an operation that this rank is about to submit.

        The core alone cannot refuse it: all ranks may have joined between ``settle`` and the submission. The operation
        would then be in progress before this rank has ended its round, and the others would wait for that.

        Raises:
            UsageError: This rank still waits.
            HoroError: As ``Context.start_join``.
        """
        if self.settle():
            raise UsageError(
                f"{operation}: rank {self._runtime.job.rank} has joined; it can submit nothing before all ranks have "
                "joined, which is when join returns"
            )

    def _wait(self) -> int:
        caller = object()
        with self._lock:
            self._runtime.is_joining = True
            teams = self._runtime.teams
            current = self._round = self._round or _Round(self._rounds + 1, teams.own(), bool(teams.sets))
            current.callers.add(caller)
        try:
            with self._lock:
                self._start(current)
            for handle in current.handles:
                self._core.wait(handle)
            with self._lock:
                self._complete(current)
            for handle in current.end_handles:
                self._core.wait(handle)
            with self._lock:
                self._close(current)
            return current.last or 0
        except HoroError:
            self._forget_failed(current)
            raise
        finally:
            with self._lock:
                current.callers.discard(caller)
                if not current.callers and self._round is not current:
                    for handle in current.all_handles:
                        self._core.release_if_done(handle)

    def _start(self, current: _Round) -> None:
        for team in current.teams:
            buffer = current.buffers.setdefault(team, RequestBuffer())
            if current.last is None and not buffer.last_handle[0]:
                self._core.start_join(team, buffer)

    def _complete(self, current: _Round) -> None:
        """Notes that all have joined each team: this rank may submit again."""
        if current.last is not None:
            return
        last = self._core.joined_last(current.handles[0])
        if last < 0:  # the group has ended
            return
        if current.has_sets:
            current.end = current.end or RequestBuffer.of(OPS["barrier"], "join.end", transient=True)
            if not current.end.last_handle[0]:
                self._core.submit(current.end)
        self._runtime.restart_names()
        self._rounds = current.number
        current.last = last

    def _close(self, current: _Round) -> None:
        if self._round is current:
            self._round = None
            self._runtime.is_joining = False

    def _forget_failed(self, current: _Round) -> None:
        """Lets a later call begin anew after an error of the core, unless this rank has joined and may still wait."""
        with self._lock:
            if not any(map(self._core.in_progress, current.all_handles)):
                self._close(current)
