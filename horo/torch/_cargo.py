"""What the reducer keeps of each parameter, and how a gradient is packed for its way and unpacked after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horo._errors import UnsupportedError, UsageError
from horo.torch._requests import Request
from horo.torch.compression import Compressor, split

__all__ = ["Cargo", "Flight", "Group", "Plan", "Slot", "SparseFlight", "refuse_sparse"]


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


class Cargo:
    """A gradient on its way: what is sent for it, and how the result comes back."""

    __slots__ = ("compression", "context", "grad", "sent", "slot", "version", "was_touched")

    def __init__(self, slot: Slot, plan: Plan) -> None:
        parameter = slot.parameter
        grad = parameter.grad
        slot.was_unused = grad is None
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self.slot = slot
        self.grad = grad
        self.compression = plan.compression
        refuse_sparse(slot, grad, plan)
        dense = grad.to_dense() if grad.layout is torch.sparse_coo else grad
        self.sent, self.context = self.compression.compress(dense)
        self.version = version = grad._version
        held = slot.held
        self.was_touched = held is not None and (held[0] is not grad or held[1] != version)

    def deliver(self) -> None:
        """Checks that nobody has touched the gradient, and writes what came back for it unless it came in place.

        Raises:
            UsageError: Somebody has.
        """
        grad, parameter = self.grad, self.slot.parameter
        in_place = self.sent is grad
        if self.was_touched or parameter.grad is not grad or grad._version != self.version + in_place:
            raise UsageError(
                f"the gradient of {self.slot.name!r} was changed while it was being reduced; call "
                "optimizer.synchronize() before you clip, unscale or replace gradients, then optimizer.step() inside "
                "optimizer.skip_synchronize()"
            )
        if in_place:
            return
        reduced = self.compression.decompress(self.sent, self.context)
        if grad.layout is torch.sparse_coo:
            parameter.grad = reduced.to_sparse(grad.sparse_dim()).coalesce()
        else:
            grad.copy_(reduced)


class Flight:
    """A request under way for the gradients of one or more slots, whose result comes in place."""

    __slots__ = ("cargo", "request")

    def __init__(self, request: Request, cargo: Sequence[Cargo]) -> None:
        self.request = request
        self.cargo = cargo

    def land(self) -> None:
        """Waits, and leaves the results in ``p.grad``.

        Raises:
            HoroError: What became of the request, or a gradient was changed meanwhile.
        """
        self.request.wait()
        for item in self.cargo:
            item.deliver()


class SparseFlight(Flight):
    """A request that gathers everyone's rows of a sparse gradient: their concatenation is the sum."""

    __slots__ = ("scale", "slot")

    def __init__(self, request: Request, slot: Slot, scale: float) -> None:
        super().__init__(request, ())
        self.slot = slot
        self.scale = scale

    def land(self) -> None:
        """As of any flight."""
        indices, values = (item.tensor for item in self.request.wait())
        parameter = self.slot.parameter
        total = torch.sparse_coo_tensor(indices.t(), values.mul_(self.scale), parameter.shape)
        parameter.grad = total.coalesce()


def refuse_sparse(slot: Slot, grad: torch.Tensor, plan: Plan) -> None:
    if grad.layout is torch.sparse_coo and not plan.sparse_as_dense:
        raise UnsupportedError(
            f"the gradient of {slot.name!r} is sparse: leave the parameter out of groups=, or use sparse_as_dense=True"
        )
