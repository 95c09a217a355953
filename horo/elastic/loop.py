"""The loop around a training function: when a rank is lost or ranks come, the others go on from the last commit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from horo.elastic.commits import Commit
from horo.elastic.membership import DriverLink
from horo.elastic.state import HostsUpdatedInterrupt, LeaveInterrupt, State
from horo.errors import GroupError, MismatchError, NotInitializedError

__all__ = ["LoopJob", "run_elastic", "share_latest"]

_Result = TypeVar("_Result")


class LoopJob(Protocol):
    """The job, as the loop needs it."""

    def place(self) -> tuple[int, int]:
        """The rank of this process and their number, or the planned ones before it has joined."""

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        """The numbers of all ranks, in rank order; blocks until all have come."""

    def adopt(self, state: State) -> bool:
        """Gives a state the memory of its slot; whether that had a commit of an earlier worker, which it has now."""

    def share_out(self, state: State, generation: int) -> None:
        """Settles, in each generation, which ranks of this host write a share of a commit each."""

    def forget(self, state: State) -> None:
        """Removes the gradients and reductions in progress of a step that was broken off."""

    def keep(self) -> None:
        """Writes the last commit to a file, if the user has named a folder for it."""


def run_elastic(function: Callable[[], _Result], state: State, job: LoopJob, membership: DriverLink) -> _Result:
    """Calls the function, again after each change of the ranks, until it returns on all of them.

    Raises:
        BaseException: What the function raises, if it is no loss of a rank: MismatchError and NotInitializedError, too.
        SystemExit: The job was to end; the last commit is kept.
    """
    state._standing.membership = membership
    membership.begun()
    is_moved = job.adopt(state)
    forecast = None if membership.has_joined else job.place()
    while True:
        error: GroupError | None = None
        try:
            if not membership.has_joined:
                membership.join()
                is_moved = is_moved or job.place() != forecast
            job.forget(state)
            if is_moved:
                state.on_reset()
                is_moved = False
            job.share_out(state, membership.generation)
            share_latest(state, job, membership.generation)
            membership.committed(state._standing.commit.number, is_kept=state._standing.is_kept)
            result = function()
            job.gather([0])  # a rank that is lost before has the others train on, so all must be here still
            membership.done()
            return result
        except LeaveInterrupt:
            job.keep()
            membership.done(is_kept=True)
            sys.exit(0)
        except HostsUpdatedInterrupt:
            pass
        except (MismatchError, NotInitializedError):
            raise
        except GroupError as caught:
            error = caught
        is_moved = True
        # while the rank and the size are still those of the job that has ended
        steps_lost = state._steps_since_commit() if error is None else state._undo()
        membership.committed(state._standing.commit.number, is_kept=state._standing.is_kept)
        membership.leave(error, steps_lost)


def share_latest(state: State, job: LoopJob, generation: int) -> None:
    """Gives all ranks the state with the most training in it. Nothing is sent where all have it already.

    All ranks decide that by the same numbers. A newcomer never has it: it has called none of the functions that are
    registered for resets.
    """
    standing = state._standing
    standing.generation = generation
    own = standing.commit if standing.commit.generation else Commit(0, 0)
    rows = job.gather([*own, int(standing.is_synced)])
    root = max(range(len(rows)), key=lambda rank: (rows[rank], -rank))
    *latest, is_synced = rows[root]
    if not is_synced or any(row != rows[root] for row in rows):
        commit = Commit(*latest) if latest[0] else Commit(generation, 0)
        standing.root, standing.incoming = root, commit
        try:
            state.sync()
        finally:
            standing.root, standing.incoming = 0, None
        standing.commit = commit
    standing.is_synced = True
