"""The job this process belongs to: begun by ``init``, ended by ``shutdown``."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from horo._errors import AbortedError, NotInitializedError, UnsupportedError, UsageError
from horo.torch._prepared import Shelf

if TYPE_CHECKING:
    from horo._bootstrap.job import Job
    from horo.torch._requests import Request
    from horo.torch._staging import Load

__all__ = [
    "Session",
    "cross_rank",
    "cross_size",
    "current",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_under_mpi",
    "local_rank",
    "local_size",
    "next_handle",
    "rank",
    "shutdown",
    "size",
]


class Session:
    """One span from ``init`` to ``shutdown``: the job, its open requests and its counters of names.

    A session outlives its end in the requests that refer to it, so that they can say what became of them.
    """

    def __init__(self, job: Job, first_handle: int) -> None:
        self.job = job
        self.core = job.context
        self.requests: set[Request] = set()
        """Every request that is not finished. They own the memory that the core reads and writes."""
        self.held: list[Load] = []
        """Memory of operations that the caller waited for until a signal handler raised; the core works on it."""
        self.shelf = Shelf(self.name)
        """Requests for the next call that is like the last."""
        self.handles: dict[int, tuple[Request, Callable[[Any], Any]]] = {}
        """Requests behind the integers that the asynchronous functions returned."""
        self.first_handle = first_handle
        """Integers below it belong to earlier sessions."""
        self.optimizers = itertools.count()
        """Numbers distributed optimizers, so that equal parameter names of two models stay apart."""
        self._names: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._calls: set[object] = set()
        self._closed = False
        self._forked = False

    def name(self, kind: str, name: str | None) -> str:
        """The name on the wire of one operation.

        Automatic names count per kind of operation, so ranks that issue the same operations in the same
        order agree on them whatever else they have done.
        """
        if name is None:
            return f"{kind}.noname.{next(self._names[kind])}"
        if not isinstance(name, str) or "\0" in name:
            raise UsageError(f"{kind}: name must be a string without NUL characters, not {name!r}")
        return f"{kind}.{name}"

    def enter(self, what: str) -> object:
        """Holds the context open while ``what`` is inside the core; the result is for ``leave``.

        Raises:
            AbortedError: ``shutdown()`` came first.
            UsageError: This is a forked child.
        """
        token = object()
        self._calls.add(token)
        if self._closed or self._forked:
            self._calls.discard(token)
            if self._forked:
                raise UsageError(
                    f"{what}: this process was forked from rank {self.job.rank} and is not a rank itself; "
                    "only the process that called init() can communicate"
                )
            raise AbortedError(f"{what}: horo was shut down")
        return token

    def leave(self, token: object) -> None:
        """Undoes ``enter``."""
        self._calls.discard(token)

    def close(self) -> None:
        """Leaves the job.

        Raises:
            UsageError: a thread (or the code that a signal handler interrupted) is inside an operation.
        """
        if self._calls:
            raise UsageError("shutdown() was called while another thread waits in an operation of horo")
        self._closed = True
        self.job.close()
        self.requests.clear()
        self.held.clear()
        self.shelf.clear()

    def abandon(self) -> None:
        """In a forked child: refuses what is the parent's from now on. The job lets go of descriptors by itself."""
        self._forked = True

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a forked child."""
        return self._forked


class _Process:
    """What this process knows: at most one session at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.registered = False
        self.handle_numbers = itertools.count(1)
        """Public handles; never used twice, so a stale one cannot mean another request."""


_process = _Process()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the job that the launcher (hororun, mpirun, srun, torchrun) has started; without one, a job of size 1.

    Blocks until all ranks have come. Does nothing if the process is in a job already. ``shutdown()`` happens at exit.

    Args:
        comm: Which processes form the job. None: all that were started. A list of their ranks: those, numbered by
            their place in the list; each of them calls ``init`` with the same list, the others do not call it.
            A communicator of mpi4py: its ranks, whoever started them.
        process_sets: Only None for now.

    Raises:
        UnsupportedError: ``process_sets`` was given.
        UsageError: The environment is half there, MPI and its launcher disagree, ``comm`` does not fit, or this is a
            forked child of a rank.
        ResourceError: An MPI started the job, but mpi4py or its MPI library is not there.
        GroupError: Not all ranks came, or they do not fit together.
    """
    if process_sets is not None:
        raise UnsupportedError(f"init(process_sets={process_sets!r}): only process_sets=None is supported yet")
    with _process.lock:
        if _process.session is not None:
            if _process.session.forked:
                raise UsageError("init(): this process was forked from a rank; start ranks as new processes instead")
            return
        from horo._bootstrap.job import start  # noqa: PLC0415  (the bootstrap is needed only here)

        _process.session = Session(start(comm=comm), next(_process.handle_numbers))
        if not _process.registered:
            _process.registered = True
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_after_fork_in_child)


def shutdown() -> None:
    """Leaves the job; what is pending, here and on other ranks, fails with ``AbortedError``. Idempotent.

    ``init()`` may follow.

    Raises:
        UsageError: Another thread is inside an operation of horo.
    """
    with _process.lock:
        session = _process.session
        if session is None:
            return
        if not session.forked:
            session.close()
        _process.session = None


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not."""
    return _process.session is not None


def current() -> Session:
    """The session of this process.

    Raises:
        NotInitializedError: There is none.
    """
    session = _process.session
    if session is None:
        raise NotInitializedError("horo is not initialized; call hvd.init() first")
    return session


def next_handle() -> int:
    """A number for a public handle."""
    return next(_process.handle_numbers)


def rank() -> int:
    """This process's number in the job, from 0.

    Raises:
        NotInitializedError: Before ``init()``; so do all functions below.
    """
    return current().job.rank


def size() -> int:
    """How many ranks the job has."""
    return current().job.size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0."""
    return current().job.local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return current().job.local_size


def cross_rank() -> int:
    """The number of this host among the hosts that have a rank of this ``local_rank``, from 0."""
    return current().job.cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this ``local_rank``."""
    return current().job.cross_size


def is_under_mpi() -> bool:
    """Whether this process is in a job whose ranks met through MPI; False before ``init()``."""
    session = _process.session
    return session is not None and session.job.mpi is not None


def is_homogeneous() -> bool:
    """Whether every host has equally many ranks."""
    return current().job.is_homogeneous


def _at_exit() -> None:
    # A daemon thread may be inside the core; then its memory must stay, and the end of the process says goodbye.
    try:
        shutdown()
    except UsageError:
        return


def _after_fork_in_child() -> None:
    _process.lock = threading.Lock()
    if _process.session is not None:
        _process.session.abandon()
