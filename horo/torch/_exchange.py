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
        if grad is not None and grad.layout is torch.sparse_coo and not self.options.sparse_as_dense:
            self._submit_sparse(slot, grad, sync)
        else:
            self._submit_dense(slot.name, [slot], sync)

    def _submit_dense(self, name: str, slots: Sequence[Slot], sync: bool) -> None:
        options = self.options
        packed = [PackedGradient(slot, options) for slot in slots]
        key = options, name, sync  # the options too: in a later session another optimizer may have the same name
        kind = _kind(slots[0])
        request = start_again(key, packed[0].sent, in_place=True) if len(packed) == 1 else None
        if request is None:
            spec = Spec(kind, name, options.op, options.prescale, options.postscale, options.wire)
            sent = [item.sent for item in packed]
            request = start_allreduce(sent, spec, in_place=True, sync=sync, key=key)
        self._set_pending(slots, PendingReduction(request, packed))

    def _submit_sparse(self, slot: Slot, grad: torch.Tensor, sync: bool) -> PendingReduction:
        own = grad.coalesce()
        scale = self.options.prescale * self.options.postscale / (_state.size() if self.options.op == Average else 1)
        # The name is that of the dense form: another rank may send zeros for an unused parameter under that name.
        request = start_allgather([own.indices().t().contiguous(), own.values()], _kind(slot), slot.name, sync=sync)
        return self._set_pending([slot], PendingSparseReduction(request, slot, scale))

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
            sparse = self._sparse_again(slot) if slot.group is None else None
            if sparse is None:
                raise
            sparse.finish()

    def _sparse_again(self, slot: Slot) -> PendingReduction | None:
        """After a mismatch, which every rank gets: tries again if some ranks had rows and the others zeros.

        A rank sends dense zeros for an unused parameter, since it does not know that the gradient is sparse elsewhere.
        Then all ranks submit sparse rows: those with zeros submit no rows.
        """
        grad = slot.parameter.grad
        sparse_dims = 0 if grad is None or grad.layout is not torch.sparse_coo else grad.sparse_dim()
        state = torch.tensor([[0 if slot.was_unused else 1, sparse_dims]])
        everyone = start_allgather([state], _kind(slot), f"{slot.name}.form", sync=True).wait()[0].tensor.tolist()
        forms = {dims for used, dims in everyone if used}
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
