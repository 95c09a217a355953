"""The job to which this process belongs, from ``init`` to ``shutdown``."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from horo._config import check_arguments
from horo._stack_frames import is_within
from horo._thread_call import ThreadCall
from horo.errors import AbortedError, NotInitializedError, UsageError
from horo.torch._compile import keep_from_dynamo, let_dynamo_go
from horo.torch._course import SCRIPT_ENDED, SHUT_DOWN, Course
from horo.torch._devices import let_go
from horo.torch._joining import Joining
from horo.torch._request_cache import RequestCache, taken_name
from horo.torch._staging import StagedTensors
from horo.torch._teams import Teams

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Unpack

    from horo._bootstrap.job import RunningRank
    from horo._init_settings import InitSettings
    from horo._settings import Settings
    from horo.torch._backward_reducer import BackwardReducer
    from horo.torch._request import Request
    from horo.torch.process_sets import ProcessSet

__all__ = [
    "FIRST_HANDLE_BASE",
    "REQUESTS_CHECKED_AT",
    "Runtime",
    "config",
    "current",
    "find",
    "init",
    "is_initialized",
    "shutdown",
]


_Result = TypeVar("_Result")

_CALLS_END_S = 10.0
"""Time within which all operations of a job that has ended have got their errors."""
_CALLS_LOOK_S = 0.001
_HERE = str(Path(__file__).parent) + os.sep

FIRST_HANDLE_BASE = 2**20
"""Below the first handle. Python has one object for all uses of a small integer, so nobody could see a handle's end."""

REQUESTS_CHECKED_AT = 32
"""The smallest number of unfinished requests at which those are dropped that nobody can ask for any longer."""


class Runtime:
    """The time from one ``init`` to ``shutdown``: the job, its open requests and its counters of names.

    Requests refer to their runtime also after its end, so that their calls can raise the right error.
    """

    def __init__(self, job: RunningRank, handle_base: int) -> None:
        self.job = job
        self.core = job.context
        self.requests: dict[int, Request] = {}
        """The requests that are not finished, by number. They own the memory that the core reads and writes."""
        self.requests_checked_at = REQUESTS_CHECKED_AT
        """At how many of them those are dropped that nobody can ask for any longer."""
        self.taken_names: dict[str | None, Request] = {}
        """The requests of public handles that have a name, by ``CachedRequest.taken_name``; not all are still held."""
        self.abandoned: dict[int, object] = {}
        """Memory of calls that an exception from a signal handler has left while the core may still use the memory. By
        the core's handle, which is stored nowhere else."""
        self.uses_gpus = False  # else requests may be on GPUs
        self.request_cache = RequestCache(self.name, casts=job.settings.get("gpu_operations") == "nccl")
        """Requests for calls with the same arguments as an earlier call."""
        self.handle_base = handle_base
        """The number of a request is this plus the core's handle. Lower numbers belong to earlier runtimes."""
        self.teams = Teams(job, self._forget_team)
        """Its process sets."""
        self.is_joining = False  # else a call of join() has not returned, or was interrupted: operations settle it
        self.joining = Joining(self)
        self.course = Course(job)
        self._gradient_names: Counter[tuple[int, str]] = Counter()
        """The number of gradients of optimizers that have had a name, by the id of their team and that name."""
        self.backward_runs: dict[int, weakref.WeakSet[BackwardReducer]] = {}
        """The reducers that each run of autograd concerns, by its number, until its end."""
        self.active_calls: dict[object, object] = {}
        """The calls that are inside the core, each with the memory that it passes to the core. They keep the context
        open.

        A signal handler may raise wherever Python calls or has called a function. So a call stores itself here by an
        assignment inside ``try``, then checks ``ended``, and pops itself in ``finally``, whether it is there or not."""
        self.ended = False
        """No call may enter any more: the runtime is closed, or this is a forked child."""
        self._names: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)
        self._orders: defaultdict[tuple[int, str], threading.RLock] = defaultdict(threading.RLock)
        self._forked = False

    def name(self, kind: str, name: str | None, team: int = 0) -> str:
        """The name on the wire of one operation.

        Automatic names count per team and kind of operation, so ranks that issue the same operations in the same
        order agree on them whatever else they have done.
        """
        if name is None:
            if self.is_joining:  # the number would be one of before the join
                self.joining.settle_before(kind)
            return f"{kind}.noname.{next(self._names[team, kind])}"
        if not isinstance(name, str) or "\0" in name or name.encode(errors="ignore").decode() != name:
            raise UsageError(f"{kind}: name must be a string without NUL characters and lone surrogates, not {name!r}")
        return f"{kind}.{name}"

    def same_number(self, kind: str, like: str, team: int = 0) -> None:
        """Gives the next automatic name of ``kind`` the number of the last one of ``like``.

        So the operations of one call have equal numbers, also after a call that was interrupted between them. The
        caller is ``in_order``.
        """
        number = next(self._names[team, like]) - 1
        self._names[team, like] = itertools.count(number + 1)
        self._names[team, kind] = itertools.count(number)

    def in_order(self, kind: str, name: str | None, team: int = 0) -> AbstractContextManager[object]:
        """Held by a call that does several operations: those of other threads with automatic names come after it.

        Raises:
            UsageError, AbortedError: As ``raise_ended``.
        """
        if self.ended:  # in a forked child, nobody may be left to release the lock
            self.raise_ended(kind)
        return self._orders[team, kind] if name is None else nullcontext()

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
        self._names.clear()
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
        """Leaves the job. Other ranks that wait for this one are told of that ``end``.

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
        last_number = self.handle_base + self.core.counters()["requests"]
        self.course.warn()
        self.course.stop()
        self.job.close(self.course.words(end))
        let_dynamo_go()
        self.requests.clear()
        self.abandoned.clear()
        self.request_cache.clear()
        return last_number

    def mark_forked(self) -> None:
        """Refuses all calls from now on, in a forked child. The job closes its descriptors by itself."""
        self._forked = self.ended = True

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return self._forked


class _Process:
    """The state of this process: at most one runtime at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may come here again
        self.runtime: Runtime | None = None
        self.registered = False
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


_process = _Process()


def _refuse_within(caller: FrameType | None) -> None:
    """Refuses an ``init()`` whose thread is at work at the beginning or the end of a job, as a signal handler's may be.

    One that has come to the end of its own has left a job behind, and is as any other code.

    Raises:
        UsageError: The call that it has interrupted is not at that end.
    """
    runtime = _process.runtime
    while caller is not None:
        is_init = caller.f_code is init.__code__
        if caller.f_code is shutdown.__code__ or (is_init and (runtime is None or runtime.ended)):
            raise UsageError(
                f"init() was called while {'init()' if is_init else 'shutdown()'} was at work, by a signal handler "
                "perhaps: call it behind that"
            )
        caller = caller.f_back


def init(comm: Any = None, process_sets: Any = None, **settings: Unpack[InitSettings]) -> None:
    """Joins the job that the launcher (hororun, mpirun, srun, torchrun) has started; without one, a job of size 1.

    Blocks until all ranks have come. Does nothing if the process is in a job already. Where that has ended, since
    another rank has called ``shutdown()`` or is lost, begins a new one. ``shutdown()`` happens at exit.

    Args:
        comm: Which processes form the job. None: all that were started. A list of their ranks: those, numbered by
            their place in the list; each of them calls ``init`` with the same list, the others do not call it.
            A communicator of mpi4py: its ranks, whoever started them.
        process_sets: Sets of ranks to register at once, as by ``add_process_set``: a list of ``ProcessSet`` or of lists
            of ranks, the same on all ranks. ``"dynamic"`` (Horovod's word for sets that come later) is as None: they
            may always come.
        settings: Settings by their names, such as ``cycle_time_ms=1``; they come before those of the environment. All
            names are in the reference of the environment, and in ``hvd.config()``. None: as if it were not given.

    Raises:
        UsageError: The launcher's environment is incomplete, MPI and its launcher disagree, ``comm``,
            ``process_sets`` or a setting does not fit, this is a forked child of a rank, ``process_sets`` or another
            value of a setting came after the first ``init()``, or a signal handler that has interrupted ``init()`` or
            ``shutdown()`` calls it.
        ResourceError: An MPI started the job, but mpi4py or its MPI library is not there.
        GroupError: Not all ranks came, or they do not fit together.

    Example:
        hvd.init()
        print(f"rank {hvd.rank()} of {hvd.size()}")
    """
    _refuse_within(sys._getframe(1))
    added = _listed(process_sets)
    keep_from_dynamo()
    with _process.lock:
        if _process.runtime is not None and _process.runtime.forked:
            raise UsageError("init(): this process was forked from a rank; start ranks as new processes instead")
        _process.leave_ended("init()", sys._getframe(1))
        if _process.runtime is not None:
            if added:
                raise UsageError("init(process_sets=...): horo is initialized already; use hvd.add_process_set()")
            _check_unchanged(settings, _process.runtime.job.settings)
            return
        from horo._bootstrap.job import start  # noqa: PLC0415  (the bootstrap is needed only here)

        _process.runtime = Runtime(start(None, comm, settings, torch.get_num_threads()), _process.handle_base)
        if not _process.registered:
            _process.registered = True
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_after_fork_in_child)
    if added:
        from horo.torch.process_sets import register_all  # noqa: PLC0415  (it imports this module)

        try:
            register_all(current(), added)
        except BaseException:
            shutdown()
            raise


def _check_unchanged(wanted: Mapping[str, Any], settings: Settings) -> None:
    for name, value in check_arguments(wanted).items():
        if value != settings[name]:
            raise UsageError(f"init({name}={wanted[name]!r}): horo is initialized already; call hvd.shutdown() before")


def _listed(process_sets: Any) -> list[ProcessSet]:
    from horo.torch.process_sets import ProcessSet  # noqa: PLC0415  (it imports this module)

    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise UsageError(f"init(process_sets={process_sets!r}): expected a list of process sets, or 'dynamic'")
    return [item if isinstance(item, ProcessSet) else ProcessSet(item) for item in process_sets]


def config() -> Settings:
    """The settings that are in force in this job, and where each comes from. Returns at once.

    Returns:
        A mapping from names to values. The names are those of the arguments of ``init()``; only ``horovod`` is no
        argument: ``hororun --horovod`` sets it. Printed, it is a table with the sources;
        ``config().source(name)`` is one of them: ``"init()"``, the name of an environment variable,
        ``"hororun --OPTION"``, ``"file NAME"`` for a file of ``hororun --config-file``, ``"default"``, or
        ``"autotune"``: it has another value in force than the job began with. The mapping itself does not change later;
        the next call returns what is in force then.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: In a forked child of a rank whose job is autotuned.
        AbortedError: After ``shutdown()`` in another thread.

    Example:
        settings = hvd.config()
        print(settings["cycle_time_ms"], settings.source("cycle_time_ms"))
        print(settings)
    """
    runtime = current()
    job = runtime.job
    return runtime.inside("config", job.settings_now) if job.is_tuned else job.settings


def shutdown() -> None:
    """Leaves the job; pending operations, here and on other ranks, fail with ``AbortedError``.

    Does not block: it does not wait for the other ranks. In a job that has ended, operations of other threads get their
    errors first, which takes a moment; a GPU that still works for horo is waited for, up to about half a minute if it
    hangs. A second call does nothing; ``init()`` may follow. It happens by itself when the process ends.

    Raises:
        UsageError: Another thread is inside an operation of horo.

    Example:
        hvd.barrier()  # the others have finished their operations, too
        hvd.shutdown()
    """
    _leave(SHUT_DOWN, sys._getframe(1))


def _leave(end: str, caller: FrameType | None) -> None:
    with _process.lock:
        if _process.runtime is not None and not _process.runtime.forked:
            _process.leave_ended("shutdown()", caller)
        _process.leave(end)


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not. Returns at once and raises nothing.

    Example:
        if not hvd.is_initialized():
            hvd.init()
    """
    return _process.runtime is not None


def current() -> Runtime:
    """The runtime of this process.

    Raises:
        NotInitializedError: There is none.
    """
    runtime = _process.runtime
    if runtime is None:
        raise NotInitializedError("horo is not initialized; call hvd.init() first")
    return runtime


def find() -> Runtime | None:
    """The runtime of this process, if there is one."""
    return _process.runtime


def _at_exit() -> None:
    # A daemon thread may be inside the core. Then its memory must stay; the peers see the end of the process.
    try:
        _leave(SCRIPT_ENDED, None)
    except UsageError:
        if _process.runtime is not None:
            _process.runtime.core.log_lines.stop()


def _after_fork_in_child() -> None:
    _process.lock = threading.RLock()
    if _process.runtime is not None:
        _process.runtime.mark_forked()
