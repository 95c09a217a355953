"""The job to which this process belongs, from ``init`` to ``shutdown``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import torch

from horo.core.calls import Caller, Numbers
from horo.core.signal_safe_call import ThreadCall
from horo.diagnostics.frames import is_within
from horo.errors import AbortedError, NotInitializedError, UsageError
from horo.torch.engine.course import SHUT_DOWN, Course
from horo.torch.engine.devices import let_go
from horo.torch.engine.join_round import Joining
from horo.torch.engine.operation import StagedTensors
from horo.torch.engine.process_set_registry import Teams
from horo.torch.engine.request_cache import AUTOMATIC, CachedRequest, RequestCache, taken_name
from horo.torch.engine.results import fill_out, gathered

if TYPE_CHECKING:
    from types import FrameType

    from horo.bootstrap.running_rank import RunningRank

__all__ = [
    "FIRST_HANDLE_BASE",
    "REQUESTS_CHECKED_AT",
    "Forecast",
    "Runtime",
    "current",
    "find",
    "place",
    "process",
]


_Result = TypeVar("_Result")

_CALLS_END_S = 10.0
"""Time within which all operations of a job that has ended have got their errors."""
_CALLS_LOOK_S = 0.001
_HERE = str(Path(__file__).parents[1]) + os.sep

FIRST_HANDLE_BASE = 2**20
"""Below the first handle. Python has one object for all uses of a small integer, so nobody could see a handle's end."""

REQUESTS_CHECKED_AT = 32
"""The smallest number of unfinished requests at which those are dropped that nobody can ask for any longer."""


class Shares(Protocol):
    """The sharding of an optimizer, as the job needs it."""

    def leave(self) -> None:
        """Called when this rank leaves the job, and in a forked child: what it writes from now on is its own."""


class Runtime(Caller):
    """The time from one ``init`` to ``shutdown``: the job, its open requests and its counters of names.

    Requests refer to their runtime also after its end, so that their calls can raise the right error.
    """

    def __init__(self, job: RunningRank, handle_base: int) -> None:
        super().__init__()
        self.job = job
        self.core = job.context
        self.requests: dict[int, Any] = {}
        """Each ``Request`` that is not finished, by number. They own the memory that the core reads and writes."""
        self.requests_checked_at = REQUESTS_CHECKED_AT
        """At how many of them those are dropped that nobody can ask for any longer."""
        self.taken_names: dict[str | None, Any] = {}
        """The requests of public handles that have a name, by ``CachedRequest.taken_name``; not all are still held."""
        self.abandoned: dict[int, object] = {}
        """Memory of calls that an exception from a signal handler has left while the core may still use the memory. By
        the core's handle, which is stored nowhere else."""
        self.uses_gpus = False  # else requests may be on GPUs
        self.request_cache = RequestCache(self, casts=job.settings.get("gpu_operations") == "nccl")
        """Requests for calls with the same arguments as an earlier call."""
        self.kept = self.request_cache.kept
        self.handle_base = handle_base
        """The number of a request is this plus the core's handle. Lower numbers belong to earlier runtimes."""
        self.teams = Teams(job, self._forget_team)
        """Its process sets."""
        self.is_joining = False  # else a call of join() has not returned, or was interrupted: operations settle it
        self.joining = Joining(self)
        self.course = Course(job)
        self._gradient_names: Counter[tuple[int, str]] = Counter()
        """The number of gradients of optimizers that have had a name, by the id of their team and that name."""
        self.active_calls: dict[object, object] = {}
        """The calls that are inside the core, each with the memory that it passes to the core. They keep the context
        open.

        A signal handler may raise wherever Python calls or has called a function. So a call stores itself here by an
        assignment inside ``try``, then checks ``ended``, and pops itself in ``finally``, whether it is there or not."""
        self.ended = False
        """No call may enter any more: the runtime is closed, or this is a forked child."""
        self.sharded: weakref.WeakSet[Shares] = weakref.WeakSet()
        """The sharded optimizers of this rank: a rank that has joined steps nothing for the others."""
        self._names: defaultdict[tuple[int, str], Numbers] = defaultdict(Numbers)
        self._orders: defaultdict[tuple[int, str], threading.RLock] = defaultdict(threading.RLock)
        self._forked = False
        self.use(self.core.place)

    def name(self, kind: str, name: str | None, team: int = 0) -> str:
        """The name on the wire of one operation.

        Automatic names count per team and kind of operation, so ranks that issue the same operations in the same
        order agree on them whatever else they have done.
        """
        if name is None:
            if self.is_joining:  # the number would be one of before the join
                self.joining.settle_before(kind)
            return f"{kind}{AUTOMATIC}{self._names[team, kind].take()}"
        if not isinstance(name, str) or "\0" in name or name.encode(errors="ignore").decode() != name:
            raise UsageError(f"{kind}: name must be a string without NUL characters and lone surrogates, not {name!r}")
        return f"{kind}.{name}"

    def same_number(self, kind: str, like: str, team: int = 0) -> None:
        """Gives the next automatic name of ``kind`` the number of the last one of ``like``.

        So the operations of one call have equal numbers, also after a call that was interrupted between them. The
        caller is ``in_order``.
        """
        self._names[team, kind].next = self._names[team, like].next - 1

    def numbers(self, kind: str, team: int) -> Numbers:
        """The numbers of automatic names of one kind of operation. A join restarts them."""
        return self._names[team, kind]

    def in_order(self, kind: str, name: str | None, team: int = 0) -> AbstractContextManager[object]:
        """Held by a call that does several operations: those of other threads with automatic names come after it.

        Raises:
            UsageError, AbortedError: As ``raise_ended``.
        """
        if self.ended:  # in a forked child, nobody may be left to release the lock
            self.raise_ended(kind)
        return self._orders[team, kind] if name is None else nullcontext()

    def admit(self, cached: CachedRequest) -> None:
        """Lets a call that is in ``active_calls`` go on to the core, after what is to be done before.

        Raises:
            UsageError, AbortedError: As ``raise_ended``; or its name is taken.
        """
        self.admit_unnamed(cached.wire_name)
        if cached.taken_name in self.taken_names:
            self.taken_names[cached.taken_name].check_name()

    def admit_unnamed(self, label: str) -> None:
        """As ``admit``, for what takes no name. ``label``: what messages call it.

        Raises:
            UsageError, AbortedError: As ``raise_ended``.
        """
        if self.ended:
            self.raise_ended(label)
        if self.abandoned:
            self.release_abandoned()
        if self.is_joining:
            self.joining.settle_before(f"'{label}'")

    def go_on(self, cached: CachedRequest) -> None:
        """Goes on with a request that the core has refused, that has failed, or that takes long, in ``execute``.

        Raises:
            HoroError, BaseException: As ``Context.run``.
        """
        self.core.go_on(cached.buffer)

    def submit_again(self, cached: CachedRequest) -> None:
        """Submits a request that the core has refused, in ``submit_each``.

        Raises:
            HoroError: As ``Context.submit``.
        """
        self.core.submit(cached.buffer)

    def take_left(
        self, cached: CachedRequest, tensor: torch.Tensor, output: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """The result of an allgather or alltoall that did not fit ``output``, or for which the wait was long.

        Raises:
            UsageError: It does not fit ``out``.
        """
        handle = cached.buffer.last_handle[0]
        buffer, rows = self.core.take_result(handle, 0)
        if buffer is not None:
            cached.forget()
            output = fill_out(out, gathered(buffer, rows, tensor).tensor, cached.spec)
        self.core.release_if_done(handle)
        return output

    def inside(self, what: str, step: Callable[[], _Result]) -> _Result:
        """Does a step while the context is kept open.

        Raises:
            UsageError, AbortedError: As ``raise_ended``.
        """
        call = object()
        try:
            self.active_calls[call] = None
            if self.ended:
                self.raise_ended(what)
            return step()
        finally:
            self.active_calls.pop(call, None)

    def change_teams(self, what: str, step: Callable[[ThreadCall], Any]) -> Any:
        """Does a step that adds or removes teams; blocks until it is done, see ``Teams.change``.

        Raises:
            UsageError, AbortedError: As ``raise_ended``.
            BaseException: As ``Teams.change``.
        """

        def guarded(call: ThreadCall) -> Any:
            try:
                self.active_calls[call] = None
                if self.ended:
                    self.raise_ended(what)
                return step(call)
            finally:
                self.active_calls.pop(call, None)

        if self.ended:  # in a forked child, the thread that is to do it would wait for one that is not there
            self.raise_ended(what)
        if self.is_joining:
            self.joining.settle_before(what)
        return self.teams.change(what, guarded)

    def restart_names(self) -> None:
        """Starts the counts of names anew after a join: ranks that joined early have counted less than others."""
        for numbers in list(self._names.values()):
            numbers.next = 0
        self._gradient_names.clear()
        self.request_cache.clear()  # for gradients it has names of before

    def _forget_team(self, team: int) -> None:
        """Drops the kept requests of a removed team; since its id is never used again, nothing depends on this."""
        self.request_cache.clear()
        for name in list(self.taken_names):
            if name is not None and name.startswith(taken_name(team, "")):
                self.taken_names.pop(name, None)
        for counters in (self._names, self._orders, self._gradient_names):
            for key in list(counters):
                if key[0] == team:
                    counters.pop(key, None)

    def gradient_kind(self, name: str, team: int = 0) -> str:
        """The kind of operation for the gradient of a parameter: each call gives one for another optimizer.

        Equal names of two models stay distinct by a number. Names that do not collide have none, so an optimizer that
        only one rank has does not shift those of others.
        """
        number = self._gradient_names[team, name]
        self._gradient_names[team, name] = number + 1
        return f"gradient{number}" if number else "gradient"

    def raise_ended(self, operation: str) -> NoReturn:
        """Raises the error of a call that found ``ended`` set.

        Raises:
            AbortedError: ``shutdown()`` came first.
            UsageError: This is a forked child.
        """
        if self._forked:
            raise UsageError(
                f"{operation}: this process was forked from rank {self.job.rank} and is not a rank itself; "
                "only the process that called init() can communicate"
            )
        raise AbortedError(f"{operation}: horo was shut down")

    def release_abandoned(self) -> None:
        """Releases abandoned memory that the core no longer uses. The caller is in ``active_calls``."""
        for handle in list(self.abandoned):
            memory = self.abandoned.get(handle)
            if isinstance(memory, StagedTensors) and memory.device and not self.core.in_progress(handle):
                if torch.cuda.is_current_stream_capturing():
                    continue  # that stream cannot wait for anything; a later call comes here again
                let_go(memory.device, self.core, handle, memory.on_device())
            if self.core.release_if_done(handle):
                self.abandoned.pop(handle, None)

    def close(self, end: str) -> int:
        """Leaves the job. Other ranks that wait for this one get ``end`` as the reason.

        Returns:
            The highest number that a request had.

        Raises:
            UsageError: a thread (or the code that a signal handler interrupted) is inside an operation.
        """
        self.ended = True  # before the next line: a call that enters between the two is refused
        calls = list(self.active_calls)
        left = [call for call in calls if isinstance(call, ThreadCall) and call.is_left]
        if len(left) < len(calls):
            self.ended = False
            raise UsageError("shutdown() was called while another thread waits in an operation of horo")
        for call in left:
            self.teams.give_up(call)
        for each in list(self.sharded):
            each.leave()
        last_number = self.handle_base + self.core.counters()["requests"]
        self.course.warn()
        self.course.stop()
        with contextlib.suppress(Exception):  # others wait for this rank's leave, and nobody for its sums
            self.course.report()
        self.job.close(self.course.words(end))
        self.requests.clear()
        self.abandoned.clear()
        self.request_cache.clear()
        return last_number

    def mark_forked(self) -> None:
        """Refuses all calls from now on, in a forked child. The job closes its descriptors by itself."""
        self._forked = self.ended = True
        for each in list(self.sharded):
            each.leave()

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return self._forked


@dataclass(frozen=True)
class Forecast:
    """The place that is planned for a newcomer of an elastic job, which is in no generation yet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    gradients_ready: str


class _Process:
    """The state of this process: at most one runtime at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may come here again
        self.runtime: Runtime | None = None
        self.forecast: Forecast | None = None
        """Between the ``init()`` of a newcomer of an elastic job and its first generation."""
        self.registered = False
        self.init: Callable[[], Any]
        """``hvd.init``, which is above this room."""
        self.handle_base = FIRST_HANDLE_BASE
        """Handles up to this number belong to earlier jobs. No handle is used twice, so an old one is an error."""

    def leave(self, end: str = SHUT_DOWN) -> None:
        """Leaves the job, if there is one. The caller holds the lock.

        Raises:
            UsageError: As ``Runtime.close``.
        """
        runtime = self.runtime  # a signal handler may leave it meanwhile
        if runtime is not None and not runtime.forked:
            self.handle_base = max(self.handle_base, runtime.close(end))
        self.runtime = None

    def leave_ended(self, what: str, caller: FrameType | None) -> None:
        """Leaves a job that has ended, if there is one. The caller holds the lock.

        Blocks until operations of other threads have got their errors. ``caller``: may be within an operation.

        Raises:
            UsageError: An operation goes on: one that the signal handler that calls this has interrupted, say.
        """
        until_s = time.monotonic() + (0.0 if is_within(caller, _HERE) else _CALLS_END_S)
        while self.runtime is not None and self.runtime.core.health() is not None:
            try:
                self.leave()
            except UsageError:
                if time.monotonic() >= until_s:
                    raise UsageError(f"{what}: the job has ended, and an operation of it has not") from None
                time.sleep(_CALLS_LOOK_S)


process = _Process()


def current() -> Runtime:
    """The runtime of this process.

    Raises:
        NotInitializedError: Without one.
        UsageError: This newcomer of an elastic job is in no generation yet.
    """
    runtime = process.runtime
    if runtime is None:
        if process.forecast is not None:
            raise UsageError(
                "this process has come to a job that runs already, and joins it when it calls the function of "
                "hvd.elastic.run: call operations inside that function; its state is synced there"
            )
        raise NotInitializedError("horo is not initialized; call hvd.init() first")
    return runtime


def begin_first_job() -> None:
    """``init()``, if this process has never been in a job: for the calls that are enough for a script.

    Raises:
        NotInitializedError: After ``shutdown()``.
        HoroError: As ``init``.
    """
    if not process.registered and process.runtime is None and process.forecast is None:
        process.init()
    place()


def place() -> RunningRank | Forecast:
    """The place of this process in its job.

    Raises:
        NotInitializedError: It has none.
    """
    forecast = process.forecast
    return current().job if forecast is None else forecast


def find() -> Runtime | None:
    """The runtime of this process, if there is one."""
    return process.runtime
