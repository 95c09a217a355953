"""The reducer's state of each parameter; how a gradient is packed before its reduction and unpacked after it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horo.core.calls import Gradient, changed, is_shared
from horo.errors import HoroError, UnsupportedError, UsageError
from horo.torch.compat.torch_private import sparse_values
from horo.torch.engine.bucket import Bucket
from horo.torch.engine.operation import check_tensor, count_change
from horo.torch.engine.request import Request
from horo.torch.engine.request_cache import CachedRequest
from horo.torch.ops.compression import Compressor, split
from horo.torch.ops.process_set import ProcessSet
from horo.torch.optimizer.shared_gradients import NotedVersion

__all__ = [
    "BUCKET_BYTES",
    "Group",
    "PackedGradient",
    "ParameterState",
    "PendingBucket",
    "PendingReduction",
    "PendingSparseReduction",
    "ReductionOptions",
    "UnsentReduction",
    "UnusedGradient",
    "refuse_sparse",
    "separate_overlapping",
]

_UNUSED_DIMENSIONS = 16

BUCKET_BYTES = 2 << 20
"""Hooks submit gradients when there are so many bytes of them, or ``_BUCKET_GRADIENTS``."""
_BUCKET_GRADIENTS = 32


class ReductionOptions:
    """The options of ``DistributedOptimizer`` that say how gradients are reduced."""

    def __init__(
        self,
        op: int,
        compression: type[Compressor],
        predivide_factor: float,
        *,
        sparse_as_dense: bool,
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        self.op = op
        self.wire, self.compression = split(compression)
        self.prescale = 1.0 / predivide_factor
        self.postscale = predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.passes = passes
        self.advice = ""
        """The strategy's advice in the error about a gradient that was changed while it was being reduced."""
        self.process_set = process_set
        """The ranks that take part. A rank that is no member uses its gradients as they are."""


class ParameterState(Gradient):
    """A parameter of the optimizer, and the progress of its gradient in the current step."""

    __slots__ = ("form", "kind", "name", "passes", "varies")

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        super().__init__()
        self.parameter = parameter
        self.name = name
        self.weight = max(parameter.numel() * parameter.element_size(), BUCKET_BYTES // _BUCKET_GRADIENTS)
        """Bytes for which its gradient counts in a bucket, which is full at ``BUCKET_BYTES``."""
        self.again: list[CachedRequest | None] = [None, None]
        """The requests of this job for its gradient alone, of backward and of one that waits for it at once."""
        self.form: tuple[object, ...] | None = None  # of the last gradient that a job of one rank has looked at
        self.kind: str | None = None  # of its operation in this job; None before its first reduction
        self.group: Group | None = None
        self.passes = 0  # backward passes since the last reduction
        self.pending: PendingReduction | None = None
        self.held: torch.Tensor | None = None  # the gradient that waits for synchronize() or for a bucket to be full
        self.held_at: int | NotedVersion | None = None  # its version; None: nothing is held
        self.shares = False  # other tensors may have the memory of its gradient
        # the gradient, if it is a sum over ranks since backward, and over how many
        self.summed: tuple[weakref.ref[torch.Tensor], int] | None = None
        self.was_unused = False  # no gradient of this rank is in the pending reduction
        self.varies = False  # in some step of this job, some ranks have used it and others have not

    def gradient(self) -> torch.Tensor | None:
        """The gradient that is held, else that of the parameter."""
        return self.parameter.grad if self.held is None else self.held

    @property
    def is_held(self) -> bool:
        """Whether its gradient waits to be sent, or is being sent: none counts as one, too."""
        return self.held_at is not None

    def hold(self, grad: torch.Tensor | None, version: int | NotedVersion) -> None:
        """Keeps the gradient as the one to be sent: it may not be changed from that version on."""
        self.held, self.held_at = grad, version

    def forget(self) -> None:
        """Forgets what all ranks of the job know of it."""
        self.kind, self.varies, self.again = None, False, [None, None]


class Group:
    """Parameters whose gradients are reduced by one request."""

    def __init__(self, name: str, states: Sequence[ParameterState]) -> None:
        self.name = name
        self.states = states
        self.waiting: set[ParameterState] = set()


class PackedGradient:
    """A gradient during its reduction, when it may not be changed, and the tensor that is sent for it."""

    __slots__ = ("changes", "context", "dense", "grad", "options", "sent", "state", "version", "was_touched")

    def __init__(self, state: ParameterState, options: ReductionOptions) -> None:
        parameter = state.parameter
        grad = state.gradient()
        state.was_unused = grad is None
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        refuse_sparse(state, grad, options)
        dense = grad
        if grad.layout is torch.sparse_coo:
            dense = grad.to_dense()
        elif state.shares:
            dense = grad.data  # has a count of changes of its own
        self.was_touched = state.is_held and (state.held is not grad or state.held_at != grad._version)
        self.state, self.grad, self.dense, self.options = state, grad, dense, options
        self.sent, self.context = options.compression.compress(dense)
        self.changes = 1 if self.sent is grad else _shared_changes(self.sent, dense, grad)
        """The number of changes of the gradient that are counted when the result is written to the tensor sent."""
        self.version = grad._version

    def forget_changes(self) -> None:
        """Lets the changes up to now count for nothing."""
        self.version, self.was_touched = self.grad._version, False

    def unpack(self) -> None:
        """Checks that the gradient was not changed meanwhile, and writes the result into it unless it is there.

        Raises:
            UsageError: The gradient was changed more often, or replaced.
        """
        grad = self.grad
        if self.was_touched or self.state.parameter.grad is not grad or grad._version != self.version + self.changes:
            raise _changed(self.state, self.options)
        reduced = self.options.compression.decompress(self.sent, self.context)
        if grad.layout is torch.sparse_coo:
            self.state.parameter.grad = reduced.to_sparse(grad.sparse_dim()).coalesce()
        elif reduced is not self.dense:
            self.dense.copy_(reduced)


def _changed(state: ParameterState, options: ReductionOptions) -> UsageError:
    return UsageError(f"the gradient of {state.name!r} was changed while it was being reduced; {options.advice}")


class UnusedGradient:
    """A parameter without a gradient during a reduction. The tensor that is sent shows this to the other ranks.

    If all have sent the same, nobody has used the parameter. Else ranks get a mismatch.
    """

    __slots__ = ("sent", "state")

    def __init__(self, state: ParameterState) -> None:
        state.was_unused = True
        self.state = state
        # One element in more dimensions than any gradient has, also with a mark: a used one never looks like this.
        self.sent = state.parameter.detach().new_zeros((1,) * _UNUSED_DIMENSIONS)

    def forget_changes(self) -> None:
        """As of ``PackedGradient``: there is nothing that could change."""

    def unpack(self) -> None:
        """Nobody has used the parameter: ``p.grad`` stays None."""


class PendingReduction:
    """A reduction in progress for the gradients of one or more parameters. Its result is written in place."""

    __slots__ = ("mark", "packed", "request")

    def __init__(
        self, request: Request | None, packed: Sequence[PackedGradient | UnusedGradient], mark: int = 0
    ) -> None:
        self.request = request
        self.packed = packed
        self.mark = mark

    def finish(self) -> None:
        """Waits, and leaves the results in ``p.grad``.

        Raises:
            HoroError: The error of the request, or a gradient was changed meanwhile.
        """
        if self.request is not None:
            self.request.wait()
        for item in self.packed:
            item.unpack()

    def finish_each(self, state: ParameterState) -> list[tuple[ParameterState, PendingReduction, HoroError]]:
        """As ``finish``, but returns what has failed: the parameter, its reduction and the error.

        Args:
            state: A parameter of it.
        """
        try:
            self.finish()
        except HoroError as error:
            return [(state, self, error)]
        return []

    def sent_for(self, state: ParameterState) -> torch.Tensor | None:
        """The gradient of ``state``, in its memory; None: there is none, or its rows are being reduced."""
        return next(
            (item.grad for item in self.packed if item.state is state and isinstance(item, PackedGradient)), None
        )

    def forget_changes(self) -> None:
        """Lets changes of gradients up to now count for nothing."""
        for item in self.packed:
            item.forget_changes()


class _PendingGradients(PendingReduction):
    """Gradients in progress that are their own results. Each is ``held`` in its state: it may not be changed."""

    __slots__ = ("_options", "_states")

    def __init__(self, request: Request | None, states: list[ParameterState], options: ReductionOptions) -> None:
        super().__init__(request, ())
        self._states, self._options = states, options

    def sent_for(self, state: ParameterState) -> torch.Tensor | None:
        """As of the base class."""
        return state.gradient()

    def forget_changes(self) -> None:
        """As of the base class."""
        for state in self._states:
            grad = state.gradient()
            state.hold(grad, 0 if grad is None else grad._version)


class PendingBucket(_PendingGradients):
    """Dense gradients in progress that are sent as they are, each by a request of its own."""

    __slots__ = ("_bucket",)

    def __init__(self, options: ReductionOptions) -> None:
        self._bucket = Bucket()
        super().__init__(self._bucket, self._bucket.gradients, options)

    def add(self, states: list[ParameterState], tensors: Sequence[torch.Tensor], *, sync: bool) -> None:
        """Submits more of them. After an exception, those that were not submitted are not pending.

        Raises:
            HoroError: As ``Bucket.add``.
        """
        self._bucket.add(states, tensors, self, sync=sync)

    def finish_each(self, state: ParameterState) -> list[tuple[ParameterState, PendingReduction, HoroError]]:
        """As of the base class."""
        options = self._options
        failed: list[tuple[ParameterState, PendingReduction, HoroError]] = []
        errors = self._bucket.wait()
        for at in sorted({*errors, *changed(self._states, self, 1)}):
            each = self._states[at]
            if at not in errors:
                failed.append((each, self, _changed(each, options)))
            elif each.pending is self:
                failed.append((each, PendingReduction(None, [PackedGradient(each, options)]), errors[at]))
        return failed


class UnsentReduction(_PendingGradients):
    """Gradients that a job of one rank sends to nobody. Errors are the same as with more ranks."""

    __slots__ = ()

    def __init__(self, states: Iterable[ParameterState], options: ReductionOptions) -> None:
        super().__init__(None, [state for state in states if _hold(state, options)], options)
        for state in self._states:
            state.pending = self

    def finish_each(self, state: ParameterState) -> list[tuple[ParameterState, PendingReduction, HoroError]]:
        """As of the base class."""
        states = [self._states[at] for at in changed(self._states, self, 0)]
        return [(each, self, _changed(each, self._options)) for each in states]


def _hold(state: ParameterState, options: ReductionOptions) -> bool:
    """Holds the gradient, after a look at it if it is of another kind than the last one; whether there is one."""
    grad = state.gradient()
    if grad is None:
        return False
    form = type(grad), grad.dtype, grad.layout, grad.device
    if form != state.form:
        if state.group is not None:
            refuse_sparse(state, grad, options)
        sent = sparse_values(grad) if grad.layout is torch.sparse_coo else grad
        check_tensor(sent, str(state.kind), state.name, reduced=True)
        state.form = form
    if not state.is_held:
        state.hold(grad, grad._version)
    return True


class PendingSparseReduction(PendingReduction):
    """A request that gathers the rows of a sparse gradient from all ranks: their concatenation is the sum."""

    __slots__ = ("_gathered", "scale", "state")

    def __init__(self, request: Request, state: ParameterState, scale: float, mark: int) -> None:
        super().__init__(request, (), mark)
        self._gathered = request
        self.state = state
        self.scale = scale

    def finish(self) -> None:
        """As ``PendingReduction.finish``."""
        indices, values = (item.tensor for item in self._gathered.wait())
        parameter = self.state.parameter
        indices = indices.view(indices.shape[0], indices.shape[-1])  # without its mark
        # Other ranks have checked nothing either, and torch warns unless the choice is passed.
        total = torch.sparse_coo_tensor(indices.t(), values.mul_(self.scale), parameter.shape, check_invariants=True)
        parameter.grad = total.coalesce()


def _shared_changes(sent: torch.Tensor, dense: torch.Tensor, grad: torch.Tensor) -> int:
    """The number by which a change of ``sent`` raises the count of changes of ``grad``.

    A view and the result of ``detach()`` share the count of their tensor, a copy does not. A tensor may also have the
    same memory and a count of its own, as from ``.data``.
    """
    if dense is not grad or not isinstance(sent, torch.Tensor) or sent.layout is not torch.strided:
        return 0  # a tensor that cannot be sent is refused later
    if sent.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr():
        return 0
    before = grad._version
    count_change((sent,))
    return grad._version - before


def refuse_sparse(state: ParameterState, grad: torch.Tensor, options: ReductionOptions) -> None:
    if grad.layout is torch.sparse_coo and not options.sparse_as_dense:
        raise UnsupportedError(
            f"the gradient of {state.name!r} is sparse: leave the parameter out of groups=, or use sparse_as_dense=True"
        )


def separate_overlapping(states: Iterable[ParameterState]) -> None:
    """Gives gradients that overlap memory of their own. Autograd is off.

    A gradient with gaps between its elements stays where it is: torch makes none.
    """
    by_parameter: dict[Any, list[ParameterState]] = {}
    for state in states:
        grad = state.parameter.grad
        if grad is not None and is_shared(grad) and _is_dense(grad):
            by_parameter.setdefault(state.parameter, []).append(state)
    end = 0
    for parameter in sorted(by_parameter, key=lambda item: int(item.grad.data_ptr())):
        grad = parameter.grad
        if grad.data_ptr() < end:
            parameter.grad = grad.clone()
            _hold_again(by_parameter[parameter], grad, parameter.grad)
        else:
            end = grad.data_ptr() + grad.numel() * grad.element_size()


def _hold_again(states: Iterable[ParameterState], before: torch.Tensor, grad: torch.Tensor) -> None:
    """Lets the copy be held instead of a gradient, unless that was changed."""
    for state in states:
        if state.held is before and state.held_at == before._version:
            state.hold(grad, grad._version)


def _is_dense(grad: torch.Tensor) -> bool:
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(grad.shape, grad.stride(), strict=True))
    return reach == grad.numel()
