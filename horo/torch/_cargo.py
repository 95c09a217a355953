"""What the reducer keeps of each parameter, and how a gradient is packed for its way and unpacked after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horo._errors import UnsupportedError, UsageError
from horo.torch._requests import Request
from horo.torch.compression import Compressor, split

__all__ = ["Cargo", "Flight", "Group", "Plan", "Slot", "refuse_sparse"]


class Plan:
    """How gradients are reduced: what the caller of ``DistributedOptimizer`` chose."""

    def __init__(
        self,
        op: int,
        compression: type[Compressor],
        predivide_factor: float,
        sparse_as_dense: bool,
        passes: int,
    ) -> None:
        self.op = op
        self.wire, self.compression = split(compression)
        self.prescale = 1.0 / predivide_factor
        self.postscale = predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.passes = passes


class Slot:
    """One parameter of the optimizer."""

    __slots__ = ("flight", "group", "held", "name", "parameter", "passes", "was_unused")

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.group: Group | None = None
        self.passes = 0  # backward passes since the last reduction
        self.flight: Flight | None = None
        # the gradient that waits for synchronize(), its version
        self.held: tuple[torch.Tensor | None, int] | None = None
        self.was_unused = False  # what is in flight is the zeros of an unused parameter


class Group:
    """Parameters whose gradients travel in one request."""

    def __init__(self, name: str, slots: Sequence[Slot]) -> None:
        self.name = name
        self.slots = slots
        self.waiting: set[Slot] = set()


class Flight:
    """A request under way for the gradients of one or more slots."""

    def __init__(self, request: Request, deliver: Callable[[Any], None]) -> None:
        self.request = request
        self.deliver = deliver


class Cargo:
    """A gradient on its way: what is sent for it, and how the result comes back."""

    def __init__(self, slot: Slot, plan: Plan) -> None:
        parameter = slot.parameter
        slot.was_unused = parameter.grad is None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self.slot = slot
        self.compression = plan.compression
        self.grad = parameter.grad
        refuse_sparse(slot, self.grad, plan)
        self.sparse = self.grad.layout is torch.sparse_coo
        dense = self.grad.to_dense() if self.sparse else self.grad
        self.sent, self.context = plan.compression.compress(dense)
        self.version = self.grad._version
        self.was_touched = slot.held is not None and (slot.held[0] is not self.grad or slot.held[1] != self.version)

    def deliver(self, result: torch.Tensor) -> None:
        own_writes = 1 if self.sent is self.grad else 0
        if (
            self.was_touched
            or self.slot.parameter.grad is not self.grad
            or self.grad._version != self.version + own_writes
        ):
            raise UsageError(
                f"the gradient of {self.slot.name!r} was changed while it was being reduced; call "
                "optimizer.synchronize() before you clip, unscale or replace gradients, then optimizer.step() inside "
                "optimizer.skip_synchronize()"
            )
        if self.sent is self.grad:
            return
        reduced = self.compression.decompress(result, self.context)
        if self.sparse:
            self.slot.parameter.grad = reduced.to_sparse(self.grad.sparse_dim()).coalesce()
        else:
            self.grad.copy_(reduced)


def refuse_sparse(slot: Slot, grad: torch.Tensor, plan: Plan) -> None:
    if grad.layout is torch.sparse_coo and not plan.sparse_as_dense:
        raise UnsupportedError(
            f"the gradient of {slot.name!r} is sparse: leave the parameter out of groups=, or use sparse_as_dense=True"
        )
