"""Reduces the gradients of one optimizer while backward still runs.

Life of a gradient: autograd accumulates it, our hook on the parameter counts the backward passes, the last expected
one hands the gradient to the core (in place where its memory allows), ``synchronize`` hands in what had no hook call
(unused or thawed parameters, as zeros or as they are), waits for all and leaves the results in ``p.grad``.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from horo._errors import HoroError, MismatchError, UnsupportedError, UsageError
from horo.torch import _state
from horo.torch._requests import Request, start_allgather, start_allreduce
from horo.torch.compression import Compressor, split
from horo.torch.ops import Average

__all__ = ["GradientReducer", "Plan"]

_SCALER_FRAMES = 12
"""How far up the stack a GradScaler can be: torch's and a scheduler's wrappers of ``step`` lie between."""


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


class _Slot:
    """One parameter of the optimizer."""

    __slots__ = ("flight", "group", "name", "parameter", "passes", "was_unused")

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.group: _Group | None = None
        self.passes = 0  # backward passes since the last reduction
        self.flight: _Flight | None = None
        self.was_unused = False  # what is in flight is the zeros of an unused parameter


class _Group:
    """Parameters whose gradients travel in one request."""

    def __init__(self, name: str, slots: Sequence[_Slot]) -> None:
        self.name = name
        self.slots = slots
        self.waiting: set[_Slot] = set()


class _Flight:
    """A request under way for the gradients of one or more slots."""

    def __init__(self, request: Request, deliver: Callable[[Any], None]) -> None:
        self.request = request
        self.deliver = deliver


class GradientReducer:
    """Owns the hooks on an optimizer's parameters and the reductions under way.

    Only the optimizer refers to its reducer, and the hooks refer to it weakly: when the optimizer goes, so do they.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        names: dict[torch.Tensor, str],
        groups: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self.plan = plan
        self.names = names
        self.slots: dict[torch.Tensor, _Slot] = {}
        self.hooked: set[torch.Tensor] = set()
        self.handles: dict[torch.Tensor, Request] = {}
        """What is under way."""
        self._optimizer = weakref.ref(optimizer)
        number = next(_state.current().optimizers)
        self.kind = f"gradient{number}" if number else "gradient"
        self._hooks: list[RemovableHandle] = []
        self._paused = False
        self._skip = False
        self._synchronized = False
        self._nested = sum("step" in vars(cls) for cls in type(optimizer).__mro__) > 2
        self._stamp: list[tuple[torch.Tensor, int]] | None = None
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.adopt()
        self._groups = [self._make_group(index, members) for index, members in enumerate(groups)]

    # -- what the user calls ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduces every gradient that is not yet under way and waits for all: then all ranks have equal ``p.grad``.

        A parameter without a gradient takes part with zeros, because other ranks may have used it.

        Raises:
            MismatchError: Ranks sent different things for one parameter; the others are reduced.
            UsageError: A gradient was changed while it was being reduced.
            GroupError: A rank is lost or horo was shut down.
        """
        if _state.size() > 1:
            try:
                slots = self._active()
                for slot in slots:
                    if slot.flight is None:
                        self._submit(slot)
                self._finish(slots)
            finally:
                self._reset()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` takes gradients as they are: for use after ``synchronize()``."""
        self._skip, before = True, self._skip
        try:
            yield
        finally:
            self._skip = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates locally; the next backward outside, or ``step()``, reduces the sum."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes after how many backward passes gradients are reduced, from the next pass on.

        Raises:
            UsageError: ``passes`` is not positive.
        """
        if passes <= 0:
            raise UsageError(f"backward_passes_per_step must be positive, not {passes}")
        self.plan.passes = passes
        self._reset_counts()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.backward_passes_per_step = passes  # type: ignore[attr-defined]

    def refuse_while_pending(self, what: str) -> None:
        """Guards what would pull gradients away from under the core.

        Raises:
            AssertionError: A reduction is under way.
        """
        if self.handles:
            raise AssertionError(
                f"{what} was called after backward() but before optimizer.step() or optimizer.synchronize(), "
                "while gradients are being reduced"
            )
        self._reset_counts()
        self._synchronized = False

    def drain(self) -> None:
        """Waits for what is under way and leaves it at that."""
        try:
            self._finish(list(self.slots.values()))
        finally:
            self._reset()

    # -- around step() ---------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch step pre-hook: gradients are reduced before the step, or after each evaluation of its closure."""
        if self._skip or _state.size() == 1:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if isinstance(closure, _ReducingClosure):
            return None  # a step() that calls the step() of its base class
        if closure is not None:
            wrapped = _ReducingClosure(closure, self)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": wrapped}
            return (args[0], wrapped, *args[2:]), kwargs
        if self._stamp is not None and all(grad._version == version for grad, version in self._stamp):
            return None  # the same, without a closure: nothing has touched the gradients since
        if not self._synchronized and _scaler_has_looked(optimizer):
            raise UsageError(
                "a gradient scaler looked at gradients before they were reduced; call optimizer.synchronize() after "
                "backward(), and scaler.step(optimizer) inside optimizer.skip_synchronize()"
            )
        if self._synchronized:
            warnings.warn(
                "optimizer.step() was called after optimizer.synchronize() but outside optimizer.skip_synchronize(); "
                "put it inside, so that it is clear that gradients are not to be reduced again",
                stacklevel=3,
            )
        else:
            self.synchronize()
        self._stamp = self._take_stamp() if self._nested else None
        return None

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook."""
        self._synchronized = False
        self._stamp = None

    def _take_stamp(self) -> list[tuple[torch.Tensor, int]]:
        grads = [slot.parameter.grad for slot in self._active()]
        return [(grad, grad._version) for grad in grads if grad is not None]

    # -- parameters ------------------------------------------------------------------------------------------------

    def adopt(self) -> list[_Slot]:
        """Makes a slot for every parameter that the optimizer has by now and hooks those that require grad."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        slots = []
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                slot = self.slots.get(parameter)
                if slot is None:
                    name = self.names.setdefault(parameter, f"allreduce.noname.{number}.{index}")
                    slot = self.slots[parameter] = _Slot(parameter, name)
                if parameter.requires_grad and parameter not in self.hooked:
                    self.hooked.add(parameter)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(_hook_of(weakref.ref(self))))
                slots.append(slot)
        return slots

    def _active(self) -> list[_Slot]:
        """The slots that take part in this step, in an order that all ranks share."""
        return [slot for slot in self.adopt() if slot.parameter.requires_grad or slot.flight is not None]

    def _make_group(self, index: int, members: Sequence[torch.Tensor]) -> _Group:
        slots = [self.slots[parameter] for parameter in self.slots if any(parameter is member for member in members)]
        group = _Group(f"group{index}.{slots[0].name}", slots)
        for slot in slots:
            slot.group = group
            if slot.parameter.requires_grad:
                group.waiting.add(slot)
        return group

    # -- a gradient's way ------------------------------------------------------------------------------------------

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Called by autograd when it has accumulated into ``parameter.grad``."""
        slot = self.slots[parameter]
        if _state.size() == 1:
            return
        if slot.flight is not None or (slot.passes >= self.plan.passes and not self._paused):
            raise AssertionError(
                f"the gradient of {slot.name!r} was computed more often than backward_passes_per_step="
                f"{self.plan.passes} before optimizer.step(); raise backward_passes_per_step to accumulate locally, "
                "or run the passes before the last inside optimizer.no_sync()"
            )
        self._synchronized = False
        if self._paused:
            return
        slot.passes += 1
        if slot.passes < self.plan.passes:
            return
        if slot.group is None:
            self._submit(slot)
            return
        slot.group.waiting.discard(slot)
        # A member thawed since the last step is not in `waiting`, but autograd may still write to it.
        if not slot.group.waiting and all(
            member.passes >= self.plan.passes for member in slot.group.slots if member.parameter.requires_grad
        ):
            self._submit(slot)

    def _submit(self, slot: _Slot) -> None:
        with torch.no_grad():
            if slot.group is not None:
                self._submit_dense(slot.group.name, [s for s in slot.group.slots if s.parameter.requires_grad])
                return
            grad = slot.parameter.grad
            if grad is not None and grad.layout is torch.sparse_coo and not self.plan.sparse_as_dense:
                self._submit_sparse(slot, grad)
            else:
                self._submit_dense(slot.name, [slot])

    def _submit_dense(self, name: str, slots: Sequence[_Slot]) -> None:
        cargo = [_Cargo(slot, self.plan) for slot in slots]
        sent = [item.sent for item in cargo]
        plan = self.plan
        request = start_allreduce(
            sent,
            self.kind,
            name,
            plan.op,
            prescale=plan.prescale,
            postscale=plan.postscale,
            wire=plan.wire,
            in_place=True,
        )

        def deliver(results: Sequence[torch.Tensor]) -> None:
            for item, result in zip(cargo, results, strict=True):
                item.deliver(result)

        self._under_way(slots, _Flight(request, deliver))

    def _submit_sparse(self, slot: _Slot, grad: torch.Tensor) -> _Flight:
        """Gathers everyone's rows: a sum of sparse gradients is their concatenation."""
        own = grad.coalesce()
        scale = self.plan.prescale * self.plan.postscale / (_state.size() if self.plan.op == Average else 1)

        def deliver(results: Any) -> None:
            indices, values = (item.tensor for item in results)
            total = torch.sparse_coo_tensor(indices.t(), values.mul_(scale), own.shape)
            slot.parameter.grad = total.coalesce()

        # The name is that of the dense form, so that a rank which sends zeros for an unused parameter meets this one.
        request = start_allgather([own.indices().t().contiguous(), own.values()], self.kind, slot.name)
        return self._under_way([slot], _Flight(request, deliver))

    def _under_way(self, slots: Sequence[_Slot], flight: _Flight) -> _Flight:
        for slot in slots:
            slot.flight = flight
            self.handles[slot.parameter] = flight.request
        return flight

    def _finish(self, slots: Sequence[_Slot]) -> None:
        """Waits for every flight; raises the first failure after the last has landed."""
        failure: Exception | None = None
        done: set[_Flight] = set()
        for slot in slots:
            flight = slot.flight
            if flight is None or flight in done:
                continue
            done.add(flight)
            try:
                self._land(slot, flight)
            except HoroError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _land(self, slot: _Slot, flight: _Flight) -> None:
        try:
            result = flight.request.wait()
        except MismatchError:
            sparse = self._sparse_again(slot) if slot.group is None else None
            if sparse is None:
                raise
            flight = sparse
            result = flight.request.wait()
        with torch.no_grad():
            flight.deliver(result)

    def _sparse_again(self, slot: _Slot) -> _Flight | None:
        """After a mismatch, which every rank gets: was it sparse rows here, zeros of an unused parameter there?

        Then the ranks with zeros take part again with no rows, and so do the others with theirs.
        """
        grad = slot.parameter.grad
        sparse_dims = 0 if grad is None or grad.layout is not torch.sparse_coo else grad.sparse_dim()
        state = torch.tensor([[0 if slot.was_unused else 1, sparse_dims]])
        everyone = start_allgather([state], self.kind, f"{slot.name}.form", sync=True).wait()[0].tensor.tolist()
        forms = {dims for used, dims in everyone if used}
        if len(forms) != 1 or forms == {0}:
            return None
        (dims,) = forms
        if slot.was_unused:
            shape = slot.parameter.shape
            empty = torch.empty((0, *shape[dims:]), dtype=slot.parameter.dtype)
            grad = torch.sparse_coo_tensor(torch.empty((dims, 0), dtype=torch.int64), empty, shape)
        return None if grad is None else self._submit_sparse(slot, grad)

    def _reset(self) -> None:
        self._reset_counts()
        for slot in self.slots.values():
            slot.flight = None
        self.handles.clear()
        self._synchronized = False

    def _reset_counts(self) -> None:
        for slot in self.slots.values():
            slot.passes = 0
        for group in self._groups:
            group.waiting = {slot for slot in group.slots if slot.parameter.requires_grad}


class _Cargo:
    """A gradient on its way: what is sent for it, and how the result comes back."""

    def __init__(self, slot: _Slot, plan: Plan) -> None:
        parameter = slot.parameter
        slot.was_unused = parameter.grad is None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        self.slot = slot
        self.compression = plan.compression
        self.grad = parameter.grad
        self.sparse = self.grad.layout is torch.sparse_coo
        if self.sparse and not plan.sparse_as_dense:
            raise UnsupportedError(
                f"the gradient of {slot.name!r} is sparse: leave the parameter out of groups=, "
                "or use sparse_as_dense=True"
            )
        dense = self.grad.to_dense() if self.sparse else self.grad
        self.sent, self.context = plan.compression.compress(dense)
        self.version = self.grad._version

    def deliver(self, result: torch.Tensor) -> None:
        own_writes = 1 if self.sent is self.grad else 0
        if self.slot.parameter.grad is not self.grad or self.grad._version != self.version + own_writes:
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


class _ReducingClosure:
    """Reduces gradients after each evaluation and returns the mean loss, so that all ranks decide alike.

    An optimizer such as LBFGS chooses its next step by the loss; on the ranks' own losses they would part.
    """

    def __init__(self, closure: Callable[[], Any], reducer: GradientReducer) -> None:
        self._closure = closure
        self._reducer = reducer

    def __call__(self) -> Any:
        loss = self._closure()
        self._reducer.synchronize()
        if isinstance(loss, torch.Tensor) and loss.is_floating_point():
            name = f"{self._reducer.kind}.loss"
            mean: torch.Tensor = start_allreduce([loss.detach()], "closure", name, Average, sync=True).wait()[0]
            return mean
        if isinstance(loss, float):
            value = torch.tensor([loss], dtype=torch.float64)
            return (
                start_allreduce([value], "closure", f"{self._reducer.kind}.loss", Average, sync=True).wait()[0].item()
            )
        return loss


def _scaler_has_looked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler calls the step. It has unscaled the gradients then, which leaves no trace on them.

    For an optimizer with a fused step it leaves its finding on the optimizer; else only the stack tells.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        return True
    frame = inspect.currentframe()
    for _ in range(_SCALER_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == "_maybe_opt_step":
            return True
        frame = frame.f_back
    return False


def _hook_of(reducer: weakref.ref[GradientReducer]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        target = reducer()
        if target is not None:
            target.gradient_ready(parameter)

    return hook


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
