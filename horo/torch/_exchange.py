"""Submits gradients of one optimizer to the core, waits for them, tries again what ranks have sent in two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from horo.torch._requests import Gathered, Request, start_again, start_allgather, start_allreduce
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
        failures: list[HoroError] = []
        mismatches: dict[PendingReduction, tuple[Slot, MismatchError]] = {}
        done: set[PendingReduction] = set()
        for slot in slots:
            pending = slot.pending
            if pending is None or pending in done:
                continue
            done.add(pending)
            try:
                pending.finish()
            except MismatchError as error:
                mismatches[pending] = slot, error
            except HoroError as error:
                failures.append(error)
        if mismatches:
            failures += self._resolve(mismatches)
        if failures:
            raise failures[0]

    def _resolve(self, mismatches: Mapping[PendingReduction, tuple[Slot, MismatchError]]) -> list[HoroError]:
        """After mismatches, which every rank gets: reduces again where ranks have sent one gradient in two forms.

        Each rank submits all its questions before it waits for an answer, since ranks may have the gradients in other
        orders.

        Returns:
            What has failed.
        """
        failures: list[HoroError] = []
        repeated: list[PendingReduction] = []
        questions = [(pending, self._ask_forms(slot, pending)) for pending, (slot, _) in mismatches.items()]
        for pending, question in questions:
            slot, mismatch = mismatches[pending]
            try:
                again = self._start_again(slot, pending, question.wait()[0])
            except HoroError as error:
                failures.append(error)
                continue
            if again is None:
                failures.append(mismatch)
            else:
                repeated.append(again)
        for again in repeated:
            try:
                again.finish()
            except HoroError as error:
                failures.append(error)
        return failures

    def _ask_forms(self, slot: Slot, pending: PendingReduction) -> Request:
        """Begins to gather in which form each rank has sent a gradient, or the gradients of a group."""
        state = torch.tensor([[0 if slot.was_unused else 1, self._sparse_dims(slot), pending.mark]])
        return start_allgather([state], _kind(slot), f"{_request_name(slot)}.form", sync=True)

    def _start_again(self, slot: Slot, pending: PendingReduction, forms: Gathered) -> PendingReduction | None:
        """Submits a gradient again if ranks are only at different places of a step, or if some had sparse rows and the
        others zeros.

        A rank sends dense zeros for an unused parameter, since it does not know that the gradient is sparse elsewhere.
        Then all ranks submit sparse rows: those with zeros submit no rows.

        Raises:
            UsageError: Ranks are in different steps.
        """
        everyone = forms.tensor.tolist()
        is_apart = self.progress.meet([mark for _, _, mark in everyone])
        sparse_dims = {dims for used, dims, _ in everyone if used}
        if is_apart and sparse_dims <= {0}:
            return self._send(_request_name(slot), pending.packed, True, 0)
        if len(sparse_dims) != 1 or sparse_dims == {0}:
            return None
        grad = slot.parameter.grad
        if slot.was_unused:
            grad = _empty_rows(slot.parameter, *sparse_dims)
        return None if grad is None else self._submit_sparse(slot, grad, sync=True)

    def _sparse_dims(self, slot: Slot) -> int:
        """How many dimensions of its gradient are sparse; 0: it travels as a dense one."""
        grad = slot.parameter.grad
        return grad.sparse_dim() if grad is not None and self._travels_sparse(slot, grad) else 0


def _empty_rows(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse gradient without rows."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64)
    values = torch.empty((0, *parameter.shape[sparse_dims:]), dtype=parameter.dtype)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def _request_name(slot: Slot) -> str:
    return slot.name if slot.group is None else slot.group.name


def _kind(slot: Slot) -> str:
    if slot.kind is None:
        raise RuntimeError("a gradient is submitted before it has a name")
    return slot.kind
