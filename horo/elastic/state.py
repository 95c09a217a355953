"""The state of a training function: what of it is kept from commit to commit, and is the same on all ranks."""

from __future__ import annotations

import copy
import enum
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horo.elastic.commits import Commit
from horo.elastic.membership import DriverLink

__all__ = ["HostUpdateResult", "HostsUpdatedInterrupt", "LeaveInterrupt", "ObjectState", "State", "StateStanding"]


class HostUpdateResult(enum.IntFlag):
    """The change of an elastic job, under Horovod's names."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
    leave = 4
    """Not Horovod's: the job ends."""


class HostsUpdatedInterrupt(Exception):
    """Ranks are to come or to leave: ends a training function, which begins again from the commit with other ranks.

    Args:
        skip_sync: Ranks only leave. horo sends the state wherever a rank lacks it, whatever this is.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class LeaveInterrupt(HostsUpdatedInterrupt):
    """The job is to end now, and to go on another time: the state is saved."""


@dataclass
class StateStanding:
    """The place of a state in the course of its job."""

    commit: Commit = field(default_factory=lambda: Commit(0, 0))
    """The one that is restored after an error."""
    generation: int = 0
    """The number of the generation in progress; 0: the job is not elastic, or the training function has not begun."""
    is_synced: bool = False
    """Whether this rank has had the state of the others."""
    root: int = 0
    """The rank whose state ``sync()`` gives to all."""
    incoming: Commit | None = None
    """The root's commit; None: ``sync()`` was not called by ``run``, and makes one of its own."""
    membership: DriverLink | None = None
    is_kept: bool = False
    """Whether commits are in the memory of this worker's slot."""
    is_together: bool = False
    """Whether all ranks save the state now."""

    def next_commit(self) -> Commit:
        """The commit that follows."""
        return Commit(self.generation, self.commit.number + 1)


class _HostMessages(queue.Queue[tuple[float, int]]):
    """Changes of the hosts. Programs for Horovod wait until there is one.

    A change for which the driver has asked is not among the items: the next commit finds it.
    """

    def __init__(self, standing: StateStanding) -> None:
        super().__init__()
        self._standing = standing

    def empty(self) -> bool:
        """Whether there has been no change since the last look, neither by ``on_hosts_updated`` nor by the driver."""
        membership = self._standing.membership
        return super().empty() and (membership is None or membership.change() is None)


class State:
    """The base of all states: a subclass has ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: Gives every rank the object of rank 0, or of ``root_rank``.
        get_rank: The rank of this process.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._standing = StateStanding()
        self._host_messages = _HostMessages(self._standing)
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Adds functions without arguments that are called, in order, whenever the ranks of the job have changed.

        They are called before the state is synced: to fit a learning rate to the new ``hvd.size()``, for one.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the ranks of the job have changed: calls ``reset()``, then the registered functions."""
        self._host_messages = _HostMessages(self._standing)
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notes a change of the hosts, which the next ``check_host_updates()`` finds."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keeps a copy of the state, to which ranks return after an error; then as ``check_host_updates()``.

        All ranks call it at the same place of their training. A rank that is lost takes the job back to the last
        commit: seldom ones cost less, and more of the training is done again.

        Raises:
            HostsUpdatedInterrupt: Ranks are to come or to leave.
            LeaveInterrupt: All are to leave.
            GroupError: A rank is lost.
        """
        standing = self._standing
        before = standing.commit
        self._save_together()
        if standing.commit == before:  # the save() of a subclass that does not count
            standing.commit = standing.next_commit()
        self._check(is_saved=True)

    def check_host_updates(self) -> None:
        """Ends the training function on all ranks alike, if ranks are to come or to leave. The state is saved then.

        All ranks call it at the same place. It costs a small allreduce in an elastic job, and nothing in others.

        Raises:
            HostsUpdatedInterrupt: Ranks are to come or to leave.
            LeaveInterrupt: All are to leave.
            GroupError: A rank is lost.
        """
        self._check(is_saved=False)

    def save(self) -> None:
        """Keeps a copy of the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of one of them; all ranks call it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the ranks of the job have changed, before the registered functions."""

    def _steps_since_commit(self) -> int | None:
        """The steps of training since the last commit; None: nobody counts them."""
        return None

    def _undo(self) -> int | None:
        """Returns to the last commit; the steps that are undone, None: nobody counts them."""
        steps = self._steps_since_commit()
        self.restore()
        return steps

    def _save_together(self) -> None:
        self._standing.is_together = self._standing.membership is not None
        try:
            self.save()
        finally:
            self._standing.is_together = False

    def _check(self, *, is_saved: bool) -> None:
        standing = self._standing
        found = self._changes()
        if found or standing.membership is not None:
            found = self._agree_on_change(found)
        if is_saved and standing.membership is not None:
            standing.membership.committed(standing.commit.number, is_kept=standing.is_kept)
        if found:
            if not is_saved:
                self._save_together()
                self._agree_on_change(found)  # until all have saved it
            if found & HostUpdateResult.leave:
                raise LeaveInterrupt
            raise HostsUpdatedInterrupt(found == HostUpdateResult.removed)

    def _changes(self) -> HostUpdateResult:
        """The changes that this rank has learnt of."""
        found = HostUpdateResult.no_update
        while self._host_messages.qsize():
            timestamp, update = self._host_messages.get()
            self._last_updated_timestamp = max(timestamp, self._last_updated_timestamp)
            found |= update
        change = None if self._standing.membership is None else self._standing.membership.change()
        if change is not None:
            found |= HostUpdateResult.added * change.added | HostUpdateResult.removed * change.removed
            found |= HostUpdateResult.leave * change.leave
        return found

    def _agree_on_change(self, own: HostUpdateResult) -> HostUpdateResult:
        """The changes that rank 0 has learnt of."""
        return HostUpdateResult(self._bcast_object(int(own)))


class ObjectState(State):
    """A state of picklable objects.

    Args:
        bcast_object: As for ``State``.
        get_rank: As for ``State``.
        kwargs: The objects by name; each becomes an attribute. What is assigned to these attributes is kept and synced;
            copies are deep, so that objects may be changed in place.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set(kwargs)
        self._write(Commit(0, 0))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The attributes that the arguments have become."""

    def save(self) -> None:
        """Keeps a deep copy of the objects."""
        self._write(self._standing.next_commit())

    def restore(self) -> None:
        """Gives the attributes the values of the copy."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Gives all ranks the state of one of them; all ranks call it. Blocks until they have.

        Raises:
            GroupError: A rank is lost. ``restore()`` undoes what has come by then.
        """
        standing = self._standing
        self._share(standing.root)
        self._write(standing.incoming or standing.next_commit())

    def _share(self, root_rank: int) -> None:
        values = self._plain()
        if root_rank:
            self._set(self._bcast_object(values, root_rank=root_rank))
        else:
            self._set(self._bcast_object(values))

    def _write(self, commit: Commit) -> None:
        """Keeps a copy, as that commit. One that cannot be made leaves the copy before."""
        self._saved_state = copy.deepcopy(self._plain())
        self._standing.commit = commit

    def _plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
