"""Submits gradients of one optimizer to the core, waits for them, and again those that ranks have sent in two forms."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from horo.core.calls import note_sharing, pick
from horo.errors import HoroError, MismatchError
from horo.torch.compat.profiler import profiling
from horo.torch.engine import runtime
from horo.torch.engine.operation import Operation
from horo.torch.engine.request import Request
from horo.torch.engine.results import Gathered
from horo.torch.engine.submit import start_allgather, start_allreduce
from horo.torch.ops.allreduce import Average
from horo.torch.ops.compression import Compression
from horo.torch.optimizer.consistency import Consistency
from horo.torch.optimizer.membership import Membership, states_of_all
from horo.torch.optimizer.parameter_state import (
    Group,
    PackedGradient,
    ParameterState,
    PendingBucket,
    PendingReduction,
    PendingSparseReduction,
    UnsentReduction,
    UnusedGradient,
    separate_overlapping,
)
from horo.torch.optimizer.phase import StepProgress

__all__ = ["GradientSubmitter"]


class GradientSubmitter:
    """The reductions of an optimizer that are in progress.

    Args:
        membership: The optimizer's.
        leaves_unused: The gradient of a parameter that no rank has used stays None; else it becomes zeros.
    """

    def __init__(self, membership: Membership, *, leaves_unused: bool) -> None:
        self.membership = membership
        self.options = membership.options
        self.leaves_unused = leaves_unused
        self.progress = StepProgress()
        self.handles: dict[torch.Tensor, Request | None] = {}
        """The request of each gradient that is in progress; None: it is held for ``synchronize``."""
        self._bucket: PendingBucket | None = None
        """Of the gradients in progress that need little of Python, if there are any."""
        self.checks = Consistency()
        self._marked: ParameterState | None = None
        """The parameter whose gradient has the mark of the reduction in progress, if there is one."""

    def begin_job(self) -> None:
        """Called at the beginning of a job, and when all ranks have joined."""
        self.progress = StepProgress()
        self.checks.begin_job(self.membership.steps)

    def reset(self) -> None:
        """Begins anew: nothing is in progress."""
        for state in self.membership.states.values():
            state.pending = None
            state.held = state.held_at = None
        self.handles.clear()
        self._bucket = self._marked = None
        self.checks.forget()

    def submit_rest(self, states: Sequence[ParameterState]) -> Request | None:
        """Submits all gradients that are not in progress; returns the last request, which is to be waited for at once.

        The caller drives them: no thread is woken.
        """
        self._note_sharing(states)
        return self.submit_each(states, sync=True)

    def submit_each(self, states: Sequence[ParameterState], *, sync: bool = False) -> Request | None:
        """Submits the gradients that are not in progress, as ``submit``; those that can be, in the bucket.

        ``state.shares`` is known. Returns the last request.
        """
        if not states:
            return None
        if self.membership.is_alone:
            UnsentReduction([state for state in states if state.pending is None], self.options)
            return None
        # else a compressor or the profiler is to see each of them
        if self.options.compression is Compression.none and not profiling._is_profiler_enabled:
            begun, tensors, others = pick(states, sync, self._first() if self.progress.mark else None)
        else:
            begun, tensors, others = [], [], [state for state in states if state.pending is None]
        if self.checks.first_gradients is not None:
            for state, grad in zip(begun, tensors, strict=True):
                self.checks.first_gradients.note(state.name, grad)
        if begun:
            self._bucket = self._bucket or PendingBucket(self.options)
            self._bucket.add(begun, tensors, sync=sync)
        if others:
            with torch.no_grad():
                for state in others:
                    if state.pending is None:  # else it is with another one of its group
                        self.submit(state, sync)
        last = next(reversed(others or begun), None)
        return None if last is None or last.pending is None else last.pending.request

    def _note_sharing(self, states: Sequence[ParameterState]) -> None:
        """Finds the gradients whose memory other tensors have too; those that overlap get memory of their own."""
        if note_sharing(states) and self.membership.size > 1:
            separate_overlapping(states_of_all())

    def submit(self, state: ParameterState, sync: bool = False) -> None:
        """Submits the request of the state, or of its group. Autograd is off."""
        group = _group_of(state)
        if self.membership.is_alone:
            members = [state] if group is None else group.states
            UnsentReduction(members, self.options)
            self.handles.update((member.parameter, None) for member in members if member.pending is not None)
            return
        if group is not None:
            self._submit_dense(group.name, [member for member in group.states if _group_of(member)], sync)
            return
        grad = state.gradient()
        if grad is not None and self._travels_sparse(state, grad):
            state.was_unused = False
            self._submit_sparse(state, grad, sync, self._mark_of(state))
        else:
            self._submit_dense(state.name, [state], sync)

    def _travels_sparse(self, state: ParameterState, grad: torch.Tensor) -> bool:
        return state.group is None and grad.layout is torch.sparse_coo and not self.options.sparse_as_dense

    def _mark_of(self, state: ParameterState) -> int:
        """The mark of the reduction, if ``state`` has the first gradient by name, or is in one group with that one."""
        mark = self.progress.mark
        if not mark:
            return 0
        first, group = self._first(), _group_of(state)
        return mark if state is first or (group is not None and group is _group_of(first)) else 0

    def _first(self) -> ParameterState:
        """The parameter whose gradient has the mark."""
        if self._marked is None:  # by name, since the optimizers of ranks may have other orders
            states = self.membership.states.values()
            trained = [state for state in states if state.parameter.requires_grad] or states
            self._marked = min(trained, key=lambda item: item.name)
        return self._marked

    def _submit_dense(self, name: str, states: Sequence[ParameterState], sync: bool) -> None:
        packed = [self._pack(state) for state in states]
        self._set_pending(states, self._send(name, packed, sync, self._mark_of(states[0])))

    def _pack(self, state: ParameterState) -> PackedGradient | UnusedGradient:
        if state.gradient() is None and self.leaves_unused and not state.varies:
            return UnusedGradient(state)
        packed = PackedGradient(state, self.options)
        if self.checks.first_gradients is not None:
            self.checks.first_gradients.note(state.name, packed.dense)
        return packed

    def _send(
        self, name: str, packed: Sequence[PackedGradient | UnusedGradient], sync: bool, mark: int
    ) -> PendingReduction:
        options = self.options
        sent = [item.sent for item in packed]
        if mark:
            sent[0] = sent[0][(None,) * mark]
        # The options too: another optimizer may have had the name in an earlier job.
        team = self.membership.team
        key = team, options, name, sync, mark
        state = packed[0].state
        spec = Operation(_kind(state), name, options.op, options.prescale, options.postscale, options.wire, team=team)
        request = start_allreduce(sent, spec, in_place=True, sync=sync, key=key)
        if _group_of(state) is None and not mark:
            state.again[sync] = runtime.current().request_cache.find(key)
        return PendingReduction(request, packed, mark)

    def _submit_sparse(self, state: ParameterState, grad: torch.Tensor, sync: bool, mark: int = 0) -> PendingReduction:
        own = grad.coalesce()
        if self.checks.first_gradients is not None:
            self.checks.first_gradients.note(f"{state.name} rows", own.indices())
            self.checks.first_gradients.note(state.name, own.values())
        options, membership = self.options, self.membership
        scale = options.prescale * options.postscale / (membership.size if options.op == Average else 1)
        indices = own.indices().t().contiguous()[(slice(None),) + (None,) * mark]
        # The name is that of the dense form: another rank may send zeros for an unused parameter under that name.
        request = start_allgather([indices, own.values()], _kind(state), state.name, sync=sync, team=membership.team)
        return self._set_pending([state], PendingSparseReduction(request, state, scale, mark))

    def _set_pending(self, states: Sequence[ParameterState], pending: PendingReduction) -> PendingReduction:
        for state in states:
            state.pending = pending
            self.handles[state.parameter] = pending.request
        return pending

    def finish(self, states: Sequence[ParameterState]) -> Iterator[Request]:
        """Waits for every pending reduction; then raises the first failure.

        Yields:
            Each request before it waits for it, so that the caller can do something else until it is done.
        """
        failures: list[HoroError] = []
        mismatches: list[tuple[ParameterState, PendingReduction, MismatchError]] = []
        done: set[PendingReduction] = set()
        for state in states:
            pending = state.pending
            if pending is None or pending in done:
                continue
            done.add(pending)
            if pending.request is not None:
                yield pending.request
            for failed, reduction, error in pending.finish_each(state):
                if isinstance(error, MismatchError):
                    mismatches.append((failed, reduction, error))
                else:
                    failures.append(error)
        failures += yield from self._resolve(mismatches)
        if failures:
            raise failures[0]

    def _resolve(
        self, mismatches: Sequence[tuple[ParameterState, PendingReduction, MismatchError]]
    ) -> Generator[Request, None, list[HoroError]]:
        """Reduces again, after mismatches, which every rank gets, where ranks have sent one gradient in two forms.

        Each rank submits all its questions before it waits for an answer, since ranks may have the gradients in other
        orders.

        Yields:
            As ``finish``.

        Returns:
            What has failed.
        """
        failures: list[HoroError] = []
        repeated: list[PendingReduction] = []
        questions = [self._ask_forms(state, pending) for state, pending, _ in mismatches]
        for (state, pending, mismatch), question in zip(mismatches, questions, strict=True):
            yield question
            try:
                again = self._start_again(state, pending, question.wait()[0])
            except HoroError as error:
                failures.append(error)
                continue
            if again is None:
                failures.append(mismatch)
            else:
                repeated.append(again)
        for again in repeated:
            if again.request is not None:
                yield again.request
            try:
                again.finish()
            except HoroError as error:
                failures.append(error)
        return failures

    def _ask_forms(self, state: ParameterState, pending: PendingReduction) -> Request:
        """Begins to gather in which form each rank has sent a gradient, or each gradient of a group."""
        states = [item.state for item in pending.packed] or [state]
        forms = [[0 if item.was_unused else 1, self._sparse_dims(item), pending.mark] for item in states]
        name = f"{_request_name(state)}.form"
        own = torch.tensor(forms, device="cpu")
        return start_allgather([own], _kind(state), name, sync=True, team=self.membership.team)

    def _start_again(
        self, state: ParameterState, pending: PendingReduction, forms: Gathered
    ) -> PendingReduction | None:
        """Submits a gradient again if ranks are only at different places of a step, if only some have used its
        parameter, or if some had sparse rows and the others nothing.

        In the last case all ranks submit sparse rows: those that have not used the parameter submit no rows.

        Raises:
            UsageError: Ranks are in different steps.
        """
        ranks = forms.present(runtime.current().teams.find(self.membership.team).ranks)
        if len(set(forms.rows) - {0}) != 1:
            return None  # groups of different lengths
        everyone = forms.tensor.view(len(ranks), -1, 3)  # of each rank and gradient: used, sparse dimensions, mark
        marks = everyone[:, 0, 2].tolist()
        is_apart = any(marks) and self.progress.meet(marks, ranks, self.membership.advice)
        is_used = everyone[:, :, 0].bool()
        sparse_dims = set(everyone[:, 0, 1][is_used[:, 0]].tolist())
        if sparse_dims <= {0}:
            was_new = self._note_use(pending, is_used)
            if not is_apart and not was_new:
                return None
            packed = [self._pack(item.state) if isinstance(item, UnusedGradient) else item for item in pending.packed]
            return self._send(_request_name(state), packed, True, 0)
        if len(sparse_dims) != 1:
            return None
        grad = state.parameter.grad
        if state.was_unused:
            grad = _empty_rows(state.parameter, *sparse_dims)
        return None if grad is None else self._submit_sparse(state, grad, sync=True)

    def _note_use(self, pending: PendingReduction, is_used: torch.Tensor) -> bool:
        """Notes which parameters only some ranks have used, for which zeros are sent from now on; whether one is new.

        Args:
            pending: The reduction of their gradients.
            is_used: By rank and gradient.
        """
        if not self.leaves_unused:
            return False
        differs = (is_used.any(0) & ~is_used.all(0)).tolist()
        fresh = [item.state for item, new in zip(pending.packed, differs, strict=True) if new and not item.state.varies]
        for state in fresh:
            state.varies = True
        return bool(fresh)

    def _sparse_dims(self, state: ParameterState) -> int:
        """The number of sparse dimensions of its gradient; 0: it is sent as a dense one."""
        grad = state.parameter.grad
        return grad.sparse_dim() if grad is not None and self._travels_sparse(state, grad) else 0


def _empty_rows(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A sparse gradient without rows."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[sparse_dims:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def _group_of(state: ParameterState) -> Group | None:
    """The group in which its gradient travels. That of a parameter that was frozen meanwhile travels alone."""
    return state.group if state.parameter.requires_grad or state.is_held else None


def _request_name(state: ParameterState) -> str:
    group = _group_of(state)
    return state.name if group is None else group.name


def _kind(state: ParameterState) -> str:
    if state.kind is None:
        raise RuntimeError("a gradient is submitted before it has a name")
    return state.kind
