"""Submits gradients of one optimizer to the core, waits for them, tries again what ranks have sent in two forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horo.errors import HoroError, MismatchError
from horo.torch import _state
from horo.torch._gradients import (
    PackedGradient,
    PendingReduction,
    PendingSparseReduction,
    ReductionOptions,
    Slot,
    UnsentReduction,
)
from horo.torch._member import Member
from horo.torch._requests import Request, start_again, start_allgather, start_allreduce
from horo.torch._staging import Spec
from horo.torch.ops import Average

__all__ = ["Exchange"]


class Exchange(Member):
    """The reductions of a reducer that are in progress."""

    def __init__(self, options: ReductionOptions) -> None:
        super().__init__()
        self.options = options
        self.handles: dict[torch.Tensor, Request | None] = {}
        """What is in progress, or held for ``synchronize`` (None)."""
        self._marked: Slot | None = None
        """Whose gradient has the mark of the reduction in progress, if there is one."""

    def _submit_rest(self, slots: Sequence[Slot]) -> Request | None:
        """Submits all gradients that are not in progress; returns the last request, which is to be waited for at once.

        The caller drives them: no thread is woken.
        """
        last: Slot | None = None
        for slot in slots:
            if slot.pending is None:
                self._submit(slot, sync=True)
                last = slot
        return None if last is None or last.pending is None else last.pending.request

    def _submit(self, slot: Slot, sync: bool = False) -> None:
        """Submits the request of the slot, or of its group. Autograd is off."""
        if _state.size() == 1:
            for member in [slot] if slot.group is None else slot.group.slots:
                grad = member.parameter.grad if member.held is None else member.held[0]
                if grad is not None:
                    self._set_pending([member], UnsentReduction(member, grad, _kind(member), self.options))
            return
        if slot.group is not None:
            members = [s for s in slot.group.slots if s.parameter.requires_grad or s.held]
            self._submit_dense(slot.group.name, members, sync)
            return
        grad = slot.parameter.grad
        if grad is not None and self._travels_sparse(slot, grad):
            slot.was_unused = False
            self._submit_sparse(slot, grad, sync, self._mark_of(slot))
        else:
            self._submit_dense(slot.name, [slot], sync)

    def _travels_sparse(self, slot: Slot, grad: torch.Tensor) -> bool:
        return slot.group is None and grad.layout is torch.sparse_coo and not self.options.sparse_as_dense

    def _mark_of(self, slot: Slot) -> int:
        """The mark of the reduction, if ``slot`` has the first gradient by name, or is in one group with that one."""
        mark = self.progress.mark
        if not mark:
            return 0
        if self._marked is None:  # by name, since the optimizers of ranks may have other orders
            trained = [other for other in self.slots.values() if other.parameter.requires_grad]
            self._marked = min(trained or [slot], key=lambda item: item.name)
        first = self._marked
        return mark if slot is first or (slot.group is not None and slot.group is first.group) else 0

    def _submit_dense(self, name: str, slots: Sequence[Slot], sync: bool) -> None:
        packed = [PackedGradient(slot, self.options) for slot in slots]
        self._set_pending(slots, self._send(name, packed, sync, self._mark_of(slots[0])))

    def _send(self, name: str, packed: Sequence[PackedGradient], sync: bool, mark: int) -> PendingReduction:
        options = self.options
        sent = [item.sent for item in packed]
        if mark:
            sent[0] = sent[0][(None,) * mark]
        key = options, name, sync, mark  # the options too: in a later session another optimizer may have the same name
        request = start_again(key, sent[0], in_place=True) if len(packed) == 1 else None
        if request is None:
            kind = _kind(packed[0].slot)
            spec = Spec(kind, name, options.op, options.prescale, options.postscale, options.wire)
            request = start_allreduce(sent, spec, in_place=True, sync=sync, key=key)
        return PendingReduction(request, packed, mark)

    def _submit_sparse(self, slot: Slot, grad: torch.Tensor, sync: bool, mark: int = 0) -> PendingReduction:
        own = grad.coalesce()
        scale = self.options.prescale * self.options.postscale / (_state.size() if self.options.op == Average else 1)
        indices = own.indices().t().contiguous()[(slice(None),) + (None,) * mark]
        # The name is that of the dense form: another rank may send zeros for an unused parameter under that name.
        request = start_allgather([indices, own.values()], _kind(slot), slot.name, sync=sync)
        return self._set_pending([slot], PendingSparseReduction(request, slot, scale, mark))

    def _set_pending(self, slots: Sequence[Slot], pending: PendingReduction) -> PendingReduction:
        for slot in slots:
            slot.pending = pending
            self.handles[slot.parameter] = pending.request
        return pending

    def _finish(self, slots: Sequence[Slot]) -> None:
        """Waits for every pending reduction; then raises the first failure."""
        failure: Exception | None = None
        done: set[PendingReduction] = set()
        for slot in slots:
            pending = slot.pending
            if pending is None or pending in done:
                continue
            done.add(pending)
            try:
                self._finish_one(slot, pending)
            except HoroError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish_one(self, slot: Slot, pending: PendingReduction) -> None:
        try:
            pending.finish()
        except MismatchError:
            again = self._start_again(slot, pending)
            if again is None:
                raise
            again.finish()

    def _start_again(self, slot: Slot, pending: PendingReduction) -> PendingReduction | None:
        """After a mismatch, which every rank gets: tries again if ranks are only at different places of a step, or if
        some had sparse rows and the others zeros.

        A rank sends dense zeros for an unused parameter, since it does not know that the gradient is sparse elsewhere.
        Then all ranks submit sparse rows: those with zeros submit no rows.

        Raises:
            UsageError: Ranks are in different steps.
        """
        name = slot.name if slot.group is None else slot.group.name
        grad = slot.parameter.grad
        sparse_dims = grad.sparse_dim() if grad is not None and self._travels_sparse(slot, grad) else 0
        state = torch.tensor([[0 if slot.was_unused else 1, sparse_dims, pending.mark]])
        everyone = start_allgather([state], _kind(slot), f"{name}.form", sync=True).wait()[0].tensor.tolist()
        is_apart = self.progress.meet([mark for _, _, mark in everyone])
        forms = {dims for used, dims, _ in everyone if used}
        if is_apart and forms <= {0}:
            return self._send(name, pending.packed, True, 0)
        if len(forms) != 1 or forms == {0}:
            return None
        (dims,) = forms
        if slot.was_unused:
            shape = slot.parameter.shape
            empty = torch.empty((0, *shape[dims:]), dtype=slot.parameter.dtype)
            grad = torch.sparse_coo_tensor(
                torch.empty((dims, 0), dtype=torch.int64), empty, shape, check_invariants=True
            )
        return None if grad is None else self._submit_sparse(slot, grad, sync=True)


def _kind(slot: Slot) -> str:
    if slot.kind is None:
        raise RuntimeError("a gradient is submitted before it has a name")
    return slot.kind
