"""Sets of ranks that do collectives among themselves, several at once and independently of each other.

A process set is a team of the core. Every function that takes ``process_set`` then concerns its members only: they
agree, wait and average among themselves, and other ranks go on with what they do.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable

from horo.errors import UnsupportedError, UsageError
from horo.torch import _runtime

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set", "resolve_process_set"]


class ProcessSet:
    """Some ranks of the job. It can be used once ``init(process_sets=...)`` or ``add_process_set`` has registered it.

    Args:
        ranks_or_comm: The members' ranks in the job, in any order.

    Raises:
        UsageError: They are not integers, or one is there twice, or there is none.
        UnsupportedError: A communicator of MPI was given; give the ranks of its members.

    Example:
        evens = hvd.ProcessSet(range(0, hvd.size(), 2))
        hvd.add_process_set(evens)  # on all ranks
        if evens.included():
            mean = hvd.allreduce(torch.ones(3), process_set=evens)
        hvd.remove_process_set(evens)  # on all ranks
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if hasattr(ranks_or_comm, "Get_rank"):
            raise UnsupportedError(
                "ProcessSet: a communicator of MPI is not supported; give the ranks of its members, as "
                "comm.allgather(hvd.rank()) finds them"
            )
        try:
            found = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise UsageError(f"ProcessSet({ranks_or_comm!r}): expected the ranks of the members, as integers") from None
        if not found or found[0] < 0 or len(set(found)) != len(found):
            raise UsageError(f"ProcessSet({found}): a process set has one or more ranks from 0, each once")
        self._ranks = found
        self._number = 0
        self._runtime: weakref.ref[_runtime.Runtime] | None = None

    @property
    def process_set_id(self) -> int | None:
        """Its number in the job, the same on all ranks. None while it is not registered, and after ``shutdown()``."""
        runtime = _runtime.find()
        registered = runtime is not None and self._runtime is not None and self._runtime() is runtime
        return self._number if registered else None

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the members in rising order; of ``global_process_set``, None before ``init()``."""
        return list(self._ranks)

    @property
    def mpi_comm(self) -> None:
        """None; Horovod has the communicator of MPI here that a set was made of."""
        return

    def size(self) -> int | None:
        """How many members it has; None while it is not registered."""
        return None if self.process_set_id is None else len(self._ranks)

    def rank(self) -> int | None:
        """This process's position among the members; None while the set is not registered.

        Raises:
            UsageError: This process is no member.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise UsageError(f"rank {_runtime.rank()} is not a member of {self}")
        return self._ranks.index(_runtime.rank())

    def included(self) -> bool | None:
        """Whether this process is a member.

        Raises:
            NotInitializedError: Before ``init()``. (``global_process_set`` gives None then.)
        """
        return _runtime.rank() in self._ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def _register(self, runtime: _runtime.Runtime) -> None:
        """Adds the set to the job of ``runtime``. All ranks come here with the same set."""
        self._number = runtime.add_team(self._ranks)
        self._runtime = weakref.ref(runtime)
        runtime.process_sets[self._number] = self

    def _unregister(self, runtime: _runtime.Runtime) -> None:
        """Removes the set from the job of ``runtime``. All ranks come here with the same set."""
        runtime.remove_team(self._number)
        del runtime.process_sets[self._number]
        self._runtime = None


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job, whichever that is."""

    def __init__(self) -> None:
        pass

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(_runtime.size())) if _runtime.is_initialized() else None

    def size(self) -> int | None:
        return _runtime.size() if _runtime.is_initialized() else None

    def rank(self) -> int | None:
        return _runtime.rank() if _runtime.is_initialized() else None

    def included(self) -> bool | None:
        return True if _runtime.is_initialized() else None


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks of the job."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set. All ranks of the job call it, members and others, with the same ranks.

    Blocks until all have; operations in progress go on meanwhile. Horovod needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` for
    it; horo does not.

    Args:
        process_set: A set that is not registered, or the ranks of its members.

    Returns:
        The set, with its ``process_set_id``.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: There is a set of these ranks already, or the job has no such rank. Nothing has changed.
        MismatchError: Ranks gave different sets.
        ResourceError: There are 63 sets already.
        GroupError: A rank is lost.

    Example:
        first = hvd.add_process_set([0])
        print("a member" if first.included() else "none")
        hvd.remove_process_set(first)
    """
    runtime = _runtime.current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    refuse_registered([*runtime.process_sets.values(), added], "add_process_set()")
    added._register(runtime)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks of the job call it, when none of them has an operation of the set in progress.

    Blocks until all have. The object can be added again.

    Args:
        process_set: The set.

    Returns:
        False, and nothing is done, where it is ``global_process_set`` or not registered.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: ``process_set`` is no process set, or this rank has an operation of it in progress.
        MismatchError: Ranks gave different sets.
        GroupError: A rank is lost.

    Example:
        last = hvd.add_process_set([hvd.size() - 1])
        hvd.remove_process_set(last)
    """
    runtime = _runtime.current()
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"remove_process_set(): expected a ProcessSet, not {process_set!r}")
    if not process_set.process_set_id:
        return False
    process_set._unregister(runtime)
    return True


def register_all(runtime: _runtime.Runtime, process_sets: list[ProcessSet]) -> None:
    """Registers the sets that ``init`` was given.

    Raises:
        UsageError: A set is there twice, or cannot be; says which.
        MismatchError: Ranks gave different sets.
    """
    refuse_registered(process_sets, "init(process_sets=...)")
    for item in process_sets:
        item._register(runtime)


def refuse_registered(process_sets: list[ProcessSet], what: str) -> None:
    """Refuses the first set that has the ranks of one before it, or of all ranks.

    Raises:
        UsageError: There is one.
    """
    known = [list(range(_runtime.size()))]
    for item in process_sets:
        if item.ranks in known:
            raise UsageError(f"{what}: {item} is a duplicate: there is a process set of these ranks already")
        if item.ranks is not None and item.ranks[-1] >= _runtime.size():
            raise UsageError(f"{what}: {item} has a rank that a job of {_runtime.size()} ranks does not have")
        known.append(item.ranks or [])


def resolve_process_set(process_set: ProcessSet, what: str) -> int:
    """The core's number of the team that an operation is to be done in.

    Raises:
        NotInitializedError: Before ``init()``, except for ``global_process_set``.
        UsageError: ``process_set`` is no process set, is not registered, or this process is no member.
    """
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"{what}: process_set must be a ProcessSet, not {process_set!r}")
    _runtime.current()
    number = process_set.process_set_id
    if number is None:
        raise UsageError(
            f"{what}: {process_set} does not exist in this job or has not been registered; call hvd.add_process_set() "
            "on all ranks first"
        )
    if not process_set.included():
        raise UsageError(f"{what}: rank {_runtime.rank()} is not a member of {process_set}")
    return number
