"""Sets of ranks that do collectives among themselves, several at once and independently of each other.

A process set is a team of the core. Every function that takes ``process_set`` then concerns its members only: they
agree, wait and average among themselves, and other ranks go on meanwhile.

A set is registered exactly if ``Teams.sets`` has it under its id. The core gives no id twice, so an operation that
was begun in a set that has been removed since, such as a backward, can meet no other set.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from horo.errors import UsageError
from horo.torch.engine import runtime as _runtime
from horo.torch.engine import topology
from horo.torch.engine.process_set_registry import RegisteredSet, public_id
from horo.torch.engine.submit import start_allgather

if TYPE_CHECKING:
    from horo.core.signal_safe_call import ThreadCall

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set", "resolve_process_set"]


_BY_INIT = "init(process_sets=...)"


class ProcessSet:
    """Some ranks of the job. It can be used once ``init(process_sets=...)`` or ``add_process_set`` has registered it.

    ``copy.copy`` and ``copy.deepcopy`` return the object itself, so that a copy of an optimizer uses the same set. A
    pickled set becomes one of the same ranks that is not registered.

    Args:
        ranks_or_comm: The members' ranks in the job, in any order. Or a communicator of mpi4py, such as
            ``MPI.COMM_WORLD.Split(...)`` returns. Each process passes its own, and all these sets are registered
            together; a process that is in none passes ``MPI.COMM_NULL``.

    Raises:
        UsageError: They are not integers, or one is there twice, or there is none.

    Example:
        evens = hvd.ProcessSet(range(0, hvd.size(), 2))
        if hvd.size() > 1:  # a set of all ranks is there already
            hvd.add_process_set(evens)  # on all ranks
            if evens.included():
                mean = hvd.allreduce(torch.ones(3), process_set=evens)
            hvd.remove_process_set(evens)  # on all ranks
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._comm: Any = None
        self._together: list[ProcessSet] = []
        """The sets that were registered together with this one, this one among them."""
        self._team = 0
        if hasattr(ranks_or_comm, "Get_rank"):
            self._comm, self._ranks = ranks_or_comm, []
            return
        try:
            found = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise UsageError(f"ProcessSet({ranks_or_comm!r}): expected the ranks of the members, as integers") from None
        if not found or found[0] < 0 or len(set(found)) != len(found):
            raise UsageError(f"ProcessSet({found}): a process set has one or more ranks from 0, each once")
        self._ranks = found

    @property
    def process_set_id(self) -> int | None:
        """Its number in the job, the same on all ranks. None while it is not registered, and after ``shutdown()``."""
        team = self.team_in(_runtime.find())
        return None if team is None else public_id(team)

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the members in rising order; of ``global_process_set``, None before ``init()``. Of a set of a
        communicator, None until it is registered."""
        return list(self._ranks) or None

    @property
    def mpi_comm(self) -> Any:
        """The communicator of mpi4py that the set was made of; else None."""
        return self._comm

    def size(self) -> int | None:
        """The number of its members; None while it is not registered."""
        return None if self.process_set_id is None else len(self._ranks)

    def rank(self) -> int | None:
        """This process's position among the members; None while the set is not registered.

        Raises:
            UsageError: This process is no member.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise UsageError(f"Process is not part of provided process set. Rank {topology.rank()} is none of {self}")
        return self._ranks.index(topology.rank())

    def included(self) -> bool | None:
        """Whether this process is a member.

        Raises:
            NotInitializedError: Before ``init()``. (``global_process_set`` gives None then.)
        """
        return topology.rank() in self._ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    def __copy__(self) -> ProcessSet:
        return self

    def __deepcopy__(self, memo: object) -> ProcessSet:
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        return ProcessSet, (self._ranks,)

    def find_members(self) -> list[list[int]]:
        """The ranks of this set; of a communicator, those of all sets that come of it, for which all ranks ask at once.

        Raises:
            GroupError: A rank is lost.
        """
        if self._comm is None:
            return [self._ranks]
        own = sorted(self._comm.allgather(topology.rank())) if self._comm else []  # COMM_NULL is false
        tensor = torch.tensor(own, dtype=torch.int64, device="cpu")
        (gathered,) = start_allgather([tensor], "process_set", "members", sync=True).wait()
        parts = gathered.tensor.split(gathered.rows)
        found = sorted({tuple(ranks) for part in parts if (ranks := part.tolist())})
        self._ranks = own or (list(found[0]) if len(found) == 1 else [])
        return [list(ranks) for ranks in found]

    def team_in(self, runtime: _runtime.Runtime | None) -> int | None:
        """The core's id of the set in a job; None where it is not registered there."""
        # What another job has under this id is another object.
        return self._team if runtime is not None and runtime.teams.sets.get(self._team) is self else None

    def _register(
        self, runtime: _runtime.Runtime, what: str, call: ThreadCall, members: Sequence[list[int]]
    ) -> ProcessSet:
        """Adds the set to the job of ``runtime``; all ranks come here with the same ``find_members()``.

        Returns:
            What is registered then.
        """
        if self._comm is None:
            return self._register_one(runtime, what, call)
        self._together = [self if ranks == self._ranks else ProcessSet(ranks) for ranks in members]
        refuse_registered([*runtime.teams.sets.values(), *self._together], what)
        for item in self._together:
            item._register_one(runtime, what, call)
        return self

    def _register_one(self, runtime: _runtime.Runtime, what: str, call: ThreadCall) -> ProcessSet:
        for team, other in list(runtime.teams.sets.items()):
            if other.ranks == self._ranks and runtime.teams.was_left(other):
                runtime.teams.sets[team] = self
                self._team = team
                return self
        refuse_registered([*runtime.teams.sets.values(), self], what)
        self._team = runtime.teams.add(self, self._ranks, call)
        return self

    def _unregister(self, runtime: _runtime.Runtime) -> bool:
        """Removes the set from the job of ``runtime``; all ranks come here with the same set."""
        together, self._together = self._together, []
        found = [team for item in together or [self] if (team := item.team_in(runtime)) is not None]
        for team in found:
            runtime.teams.remove(team)
        return bool(found)


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job, whichever that is."""

    def __init__(self) -> None:
        self._comm = None

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(topology.size())) if _runtime.find() else None

    def size(self) -> int | None:
        return topology.size() if _runtime.find() else None

    def rank(self) -> int | None:
        return topology.rank() if _runtime.find() else None

    def included(self) -> bool | None:
        return True if _runtime.find() else None

    def __reduce__(self) -> str:
        return "global_process_set"

    def team_in(self, runtime: _runtime.Runtime | None) -> int:
        return 0


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks of the job."""


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Registers a process set. All ranks of the job call it, members and others, with the same ranks.

    Blocks until all have; operations in progress go on meanwhile. Threads that add or remove sets take turns, in the
    same order on all ranks. An exception of a signal handler ends the wait, not the change: another call with these
    ranks returns the set.

    A rank that leaves the job, by ``shutdown()`` or at the end of its script, ends the operations of all sets. One that
    is agreed on at that very moment may succeed on some members and raise ``AbortedError`` on others.

    Args:
        process_set: A set that is not registered, or the ranks of its members, or a communicator, see ``ProcessSet``.

    Returns:
        The set, with its ``process_set_id``.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: There is a set of these ranks already, or the job has no such rank. Nothing has changed.
        MismatchError: Ranks gave different sets, or another removes one.
        ResourceError: There are 63 sets already, or no thread can be started.
        GroupError: A rank is lost, or members cannot be connected.

    Example:
        if hvd.size() > 1:  # a set of all ranks is there already
            first = hvd.add_process_set([0])
            print("a member" if first.included() else "none")
            hvd.remove_process_set(first)
    """
    runtime, what = _runtime.current(), "add_process_set()"
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    members = added.find_members()
    registered: ProcessSet = runtime.change_teams(what, lambda call: added._register(runtime, what, call, members))
    return registered


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks of the job call it, when none of them has an operation of the set in progress.

    Blocks until all have. The object can be added again. An exception of a signal handler ends the wait, not the
    change.

    Args:
        process_set: The set.

    Returns:
        False if it is ``global_process_set`` or not registered; nothing is done then.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: ``process_set`` is no process set, or this rank has an operation of it in progress.
        MismatchError: Ranks gave different sets, or another adds one.
        ResourceError: No thread can be started.
        GroupError: A rank is lost.

    Example:
        if hvd.size() > 1:  # a set of all ranks is there already
            last = hvd.add_process_set([hvd.size() - 1])
            hvd.remove_process_set(last)
    """
    runtime = _runtime.current()
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"remove_process_set(): expected a ProcessSet, not {process_set!r}")
    if process_set is global_process_set:
        return False
    removed: bool = runtime.change_teams("remove_process_set()", lambda _: process_set._unregister(runtime))
    return removed


def register_all(runtime: _runtime.Runtime, process_sets: list[ProcessSet]) -> None:
    """Registers the sets that ``init`` was given.

    Raises:
        UsageError: A set is given twice, or is wrong; names it.
        MismatchError: Ranks gave different sets.
    """
    what = _BY_INIT
    members = {item: item.find_members() for item in process_sets}
    refuse_registered([item for item in process_sets if item.mpi_comm is None], what)

    def register(call: ThreadCall) -> None:
        for item in process_sets:
            item._register(runtime, what, call, members[item])

    runtime.change_teams(what, register)


def refuse_registered(process_sets: Iterable[RegisteredSet], what: str) -> None:
    """Refuses the first set that has the ranks of one before it, or of all ranks.

    Raises:
        UsageError: There is one.
    """
    known = [list(range(topology.size()))]
    for number, item in enumerate(process_sets):
        if item.ranks in known:
            again = f"{what}: process_sets entry number {number} is a duplicate"
            again = again if what == _BY_INIT else "Attempted to add a duplicate process set"
            raise UsageError(f"{again}: {item}; there is a process set of these ranks already")
        if item.ranks is not None and item.ranks[-1] >= topology.size():
            raise UsageError(f"{what}: {item} has a rank that a job of {topology.size()} ranks does not have")
        known.append(item.ranks or [])


def refuse_unregistered(process_set: ProcessSet, what: str) -> NoReturn:
    """Refuses an operation in a set that is not registered.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: Else.
    """
    _runtime.current()
    raise UsageError(
        f"{what}: Process set provided does not exist, or has not been registered. {process_set} is none of this job: "
        "call hvd.add_process_set() on all ranks first"
    )


def resolve_process_set(process_set: ProcessSet, what: str) -> int:
    """The core's id of the team that an operation is to be done in.

    Raises:
        NotInitializedError: Before ``init()``, except for ``global_process_set``.
        UsageError: ``process_set`` is no process set, is not registered, or this process is no member.
    """
    if process_set is global_process_set:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"{what}: process_set must be a ProcessSet, not {process_set!r}")
    team = process_set.team_in(_runtime.current())
    if team is None:
        refuse_unregistered(process_set, what)
    if not process_set.included():
        rank = topology.rank()
        raise UsageError(f"{what}: Rank {rank} is not a member of the provided process set. It is {process_set}")
    return team
