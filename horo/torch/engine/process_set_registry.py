"""The process sets of a running job, and their changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from horo.core.signal_safe_call import CallQueue, ThreadCall
from horo.errors import UsageError

if TYPE_CHECKING:
    from horo.bootstrap.running_rank import RunningRank

__all__ = ["RegisteredSet", "Team", "Teams", "public_id"]

_ID_STEP = 256


def public_id(team: int) -> int:
    """The ``process_set_id`` of the team that has this id. Another team may have it later, but never the same id."""
    return team % _ID_STEP


class Team(NamedTuple):
    """The members of a process set that this process belongs to."""

    ranks: tuple[int, ...]
    """In the job, ascending."""
    rank: int
    """This process's position among them."""

    @property
    def size(self) -> int:
        """The number of its members."""
        return len(self.ranks)


class RegisteredSet(Protocol):
    """A ``ProcessSet``, as this registry needs it."""

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the members in rising order."""


class Teams:
    """The teams of a job, by their ids in the core. They are changed in one place, one change after the other.

    Args:
        job: The job.
        forget: Called with the id of each team that has been removed.
    """

    def __init__(self, job: RunningRank, forget: Callable[[int], None]) -> None:
        self._job = job
        self._forget = forget
        self._members = {0: Team(tuple(range(job.size)), job.rank)}
        self._changes = CallQueue()
        self._left: dict[RegisteredSet, ThreadCall] = {}
        self.sets: dict[int, RegisteredSet] = {}
        """The process sets that are registered; others are not, whatever they were. Without that of all ranks."""

    def find(self, team: int) -> Team:
        """The members of a team that this process belongs to.

        Raises:
            UsageError: It has been removed.
        """
        found = self._members.get(team)
        if found is None:
            raise UsageError(f"process set {public_id(team)} has been removed")
        return found

    def own(self) -> list[int]:
        """The ids of all teams that this process belongs to, that of all ranks first."""
        return list(self._members)

    def size_for(self, team: int) -> int:
        """The number of members of a team, on one of them; 1 on another rank, and after its removal."""
        found = self._members.get(team)
        return 1 if found is None else found.size

    def change(self, what: str, step: Callable[[ThreadCall], Any]) -> Any:
        """Does a step that changes teams, when all changes before it are done; blocks until then.

        Raises:
            ResourceError: No thread can be started.
            BaseException: What the step raises; or the exception of a signal handler, and then the step goes on.
        """
        return self._changes.do(what, step)

    def add(self, process_set: RegisteredSet, ranks: Sequence[int], call: ThreadCall) -> int:
        """Within a step, adds a team; all ranks come here with the same ranks, ascending. Its id is the same on all.

        Raises:
            HoroError: As ``RunningRank.add_team``.
        """
        team = self._job.add_team(ranks)
        if self._job.rank in ranks:
            self._members[team] = Team(tuple(ranks), ranks.index(self._job.rank))
        self.sets[team] = process_set
        self._left[process_set] = call
        return team

    def remove(self, team: int) -> None:
        """Within a step, removes a team; all ranks come here with the same one.

        Raises:
            HoroError: As ``Context.remove_team``.
        """
        self._job.context.remove_team(team)
        self._members.pop(team, None)
        self._left.pop(self.sets.pop(team), None)
        self._forget(team)

    def was_left(self, process_set: RegisteredSet) -> bool:
        """Whether an exception has ended the wait of the call that added this set. Asked once: False from then on."""
        call = self._left.pop(process_set, None)
        return call is not None and call.is_left

    def give_up(self, call: ThreadCall) -> None:
        """Ends a change that nobody waits for, when the job ends; blocks for a moment."""
        thread = call.thread
        if thread is not None:
            self._job.context.give_up_waits(thread)
            thread.join()
