"""What the reducers of this process know of the job and of each other: names that ranks share, common parameters."""

from __future__ import annotations

import abc
import gc
import itertools
import weakref

import torch

from horo.errors import AbortedError, UsageError
from horo.torch import _state
from horo.torch._gradients import Slot
from horo.torch._progress import StepProgress

__all__ = ["Member"]


class Member(abc.ABC):
    """A reducer's place among the others, and in the job, which may be another one later.

    Names are given when gradients are reduced for the first time in a job, and all ranks do that, so what only one rank
    has made or copied or kept from an earlier job does not shift them.
    """

    def __init__(self) -> None:
        self.slots: dict[torch.Tensor, Slot] = {}
        """By parameter."""
        self.order = next(_orders)
        """Its place among all reducers of this process."""
        self.newer = Newer()
        self.is_reduced = False
        """Whether the gradients of all parameters are averaged, and no step or local backward has followed."""
        self.progress = StepProgress()
        self._session: _state.Session | None = None
        """The session that it has taken part in last."""
        self._are_named = False
        """Whether all slots have their names in this session."""
        self._checked = 0
        """How many parameters, the first ones, have been compared over all ranks in this session."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Begins anew: nothing is in progress."""

    def follow_session(self, *, forget: bool = False) -> None:
        """Begins anew if the job is another one than before: nobody waits for what was in progress there.

        Args:
            forget: Gradients are about to be cleared.

        Raises:
            AbortedError: Gradients were in progress, and are not to be forgotten.
        """
        session = _state.session()
        if session is self._session:
            return
        was_pending = any(slot.pending is not None for slot in self.slots.values())
        if self._session is not None:
            self.reset()
            self.is_reduced = False
        self._session = session
        self.progress = StepProgress()
        self._checked = 0
        self._are_named = False
        for slot in self.slots.values():
            slot.kind = None
        if was_pending and not forget:
            raise AbortedError(
                "horo was shut down while gradients were being reduced, so they may be half of this rank and half of "
                "all; call optimizer.zero_grad() and compute them again"
            )

    def name_gradients(self) -> None:
        """Gives all gradients their names in this session."""
        if self._are_named:
            return
        session = _state.current()
        for slot in self.slots.values():
            if slot.kind is None:
                slot.kind = session.gradient_kind(slot.name)
        self._are_named = True

    def may_submit(self) -> bool:
        """Whether hooks may submit gradients: names are given, or can be whatever the order of the hooks is."""
        if self._are_named:
            return True
        if self._is_ambiguous(_state.current()):
            return False
        self.name_gradients()
        return True

    def claim_parameters(self) -> None:
        """Tells the older of each two reducers with a common parameter about the newer."""
        own = self.slots.keys()
        for other in list(_members):
            if other is not self and not own.isdisjoint(other.slots):
                older, newer = sorted((self, other), key=lambda item: item.order)
                older.newer.add(newer)
        _members.add(self)

    def names_to_come(self, session: _state.Session) -> set[str]:
        """The names that its gradients have still to get in a session."""
        return {slot.name for slot in self.slots.values() if slot.kind is None or self._session is not session}

    @property
    def label(self) -> str:
        """What the names of its other operations begin with."""
        self.name_gradients()
        first = min(self.slots.values(), key=lambda slot: slot.name)  # ranks may have other orders
        return f"{first.kind}.{first.name}"

    def _is_ambiguous(self, session: _state.Session) -> bool:
        """Whether another reducer has no names yet in this session, but will have some that this one has.

        Then the order of the first hook calls must not decide which gets which: ranks may differ in it.
        """
        names = {slot.name for slot in self.slots.values()}
        return any(other is not self and not names.isdisjoint(other.names_to_come(session)) for other in list(_members))


class Newer:
    """The reducers that have come after another one and have a parameter in common with it.

    Only one can average a gradient, and it is the newest, so that a script may make its optimizer again while the
    variable still holds the last one. The older ones come back when the newer are gone.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Member]] = []
        self._is_swept = True

    def add(self, reducer: Member) -> None:
        """Adds one, unless it is there."""
        if all(reference() is not reducer for reference in self._found):
            self._found.append(weakref.ref(reducer))
            self._is_swept = False

    def any(self) -> bool:
        """Whether one is alive. What only garbage refers to is collected first."""
        if not self._found:
            return False
        if not self._is_swept:
            self._is_swept = True
            gc.collect()
        self._found = [reference for reference in self._found if reference() is not None]
        return bool(self._found)

    def refuse(self, own: Member, what: str) -> None:
        """Refuses a call of the optimizer that has a newer one beside it.

        Raises:
            UsageError: A newer one is alive.
        """
        self._is_swept = False
        if not self.any():
            return
        others = [other for reference in self._found if (other := reference()) is not None]
        common = next(
            slot.name for other in others for parameter, slot in own.slots.items() if parameter in other.slots
        )
        raise UsageError(
            f"{what}: parameter {common!r} is also in a DistributedOptimizer that was made later, and only that one "
            "averages its gradient; give each parameter to one DistributedOptimizer, or delete the later one first. "
            "A plain torch optimizer over the same parameters finds gradients averaged when backward() returns"
        )


_members: weakref.WeakSet[Member] = weakref.WeakSet()
_orders = itertools.count()
