"""``distribute``: a model whose gradients are averaged, whatever optimizers step its parameters later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from horo.errors import UnsupportedError, UsageError
from horo.torch.compat.dynamo import keep_from_dynamo
from horo.torch.engine.request import Request
from horo.torch.engine.runtime import begin_first_job
from horo.torch.functions.broadcast_state import broadcast_parameters
from horo.torch.ops.allreduce import Average, Sum
from horo.torch.ops.compression import Compression, Compressor
from horo.torch.ops.process_set import ProcessSet, global_process_set
from horo.torch.ops.reduce_op import resolve_op
from horo.torch.optimizer.at_backward import BackwardReducer
from horo.torch.optimizer.consistency import check_state, refuse_ddp_model
from horo.torch.optimizer.membership import Membership, members_with
from horo.torch.optimizer.parameter_state import ReductionOptions
from horo.torch.optimizer.step_hooks import closure_of

__all__ = ["distribute", "no_sync"]

_M = TypeVar("_M", bound=torch.nn.Module)


class _Parameters(torch.optim.Optimizer):
    """The parameters of a model, in the place of the optimizer that a reducer is of. It has no ``step``."""


class ModelReducer(BackwardReducer):
    """Averages the gradients of a model. Several optimizers may step after one backward, each once.

    A further step of one of them without a backward before it is that of a rank that has skipped its backward: it takes
    part in the reduction of the others.
    """

    advice = "register hooks that change gradients before hvd.distribute, or set HORO_OVERLAP=never"

    def __init__(self, parameters: _Parameters, options: ReductionOptions, names: dict[torch.Tensor, str]) -> None:
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers that have stepped since the last reduction."""
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers whose state has been compared in this job."""
        self.parameters = parameters
        super().__init__(Membership(parameters, options, names, owner="hvd.distribute"), ())

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in the base class."""
        if optimizer in self._stepped:
            self.is_reduced = False
        result = super().before_step(optimizer, args, kwargs)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            check_state(self.membership, optimizer)
        return result

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As in the base class."""
        was_reduced = self.is_reduced
        super().after_step(optimizer, args, kwargs)
        self.is_reduced = was_reduced
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            self.submitter.progress.steps += 1

    def finish_all(self) -> Iterator[Request]:
        """As in the base class."""
        yield from super().finish_all()
        self._forget_steps()

    def begin_job(self) -> None:
        """As in the base class."""
        super().begin_job()
        self._forget_steps()
        self._seen.clear()

    def _forget_steps(self) -> None:
        self._stepped.clear()
        self.submitter.progress.steps = 0


_reducers: weakref.WeakKeyDictionary[torch.nn.Module, ModelReducer] = weakref.WeakKeyDictionary()
"""By module: a reducer lives as long as any module of its model, and goes without a garbage collection."""
_by_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, int], list[ModelReducer]]]
_by_optimizer = weakref.WeakKeyDictionary()
"""The reducers whose parameters an optimizer steps, and for how many parameters and models they were looked up."""
_made = 0
"""The number of models that were distributed."""


def distribute(
    model: _M,
    *,
    op: int = Average,
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _M:
    """Makes ``model`` train on all ranks: gives all its parameters and buffers of the first, and averages gradients.

    Gradients are averaged when ``backward()`` returns, as with ``DistributedOptimizer``, but no optimizer is wrapped:
    any one that is made before or later, also inside a trainer, finds them averaged. Clipping, a gradient scaler,
    accumulation, closures, several optimizers and ``torch.compile`` need no change. Blocks until all ranks have called
    it.

    Before each ``step()`` of a torch optimizer over these parameters, gradients that no backward has averaged are:
    those made inside ``no_sync(model)``, or of a rank that called no backward. Its first step compares its state and
    options on all ranks. All parameters that it trains have to be distributed. Models with backward passes of their
    own, as in a GAN, are distributed one by one.

    The model itself is returned. A copy of it, as for an average of the weights, is not distributed. Use
    ``DistributedOptimizer`` instead for Adasum, ``groups``, ``synchronize()``, or Horovod's order of calls.

    Args:
        model: Any module with parameters, compiled or not. A loss with parameters needs a call of its own.
        op: ``Average`` or ``Sum``.
        compression: As of ``DistributedOptimizer``.
        sparse_as_dense: As of ``DistributedOptimizer``.
        process_set: The ranks that take part; on others the model stays as it is.

    Returns:
        ``model``.

    Raises:
        NotInitializedError: After ``shutdown()``. Without any ``init()``, this calls it.
        UsageError: It is no module, has no parameters or is in ``DistributedDataParallel``; or ``distribute`` or a
            ``DistributedOptimizer`` averages a gradient of it already.
        UnsupportedError: ``op`` is another one.
        MismatchError: Ranks have different models.

    Example:
        model = hvd.distribute(torch.nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model.parameters())
    """
    global _made  # noqa: PLW0603 - the hooks around steps are torch's, of all optimizers
    keep_from_dynamo()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"distribute: expected a torch.nn.Module, not {type(model).__name__}")
    op = resolve_op(op)
    if op not in (Average, Sum):
        raise UnsupportedError(f"distribute: op={op} is not supported; use hvd.Average or Sum, or DistributedOptimizer")
    refuse_ddp_model(model)
    begin_first_job()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    if not names:
        raise UsageError(f"distribute: the model ({type(model).__name__}) has no parameters")
    if any(members_with(names)):
        gc.collect()
    for member, name in members_with(names):
        raise UsageError(f"distribute: {member.owner} averages the gradient of {name!r} already; leave one of both out")
    options = ReductionOptions(op, compression, 1.0, sparse_as_dense=sparse_as_dense, passes=1, process_set=process_set)
    reducer = ModelReducer(_Parameters(list(names), {}), options, names)
    if process_set is global_process_set or process_set.included():
        broadcast_parameters(model, (process_set.ranks or [0])[0], process_set)
    if not _made:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
    _made += 1
    _reducers.update(dict.fromkeys(model.modules(), reducer))
    return model


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Inside, backward accumulates the gradients of a distributed model locally: it saves their traffic.

    The next backward outside averages the sum, or the next ``step()`` does. Nothing in here blocks.

    Args:
        model: A module that ``distribute`` has returned, or one around it.

    Raises:
        UsageError: No part of it is distributed.

    Example:
        model = hvd.distribute(torch.nn.Linear(2, 1))
        with hvd.no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    """
    found = {reducer for module in model.modules() if (reducer := _reducers.get(module)) is not None}
    if not found:
        raise UsageError("no_sync: the model is not distributed; call hvd.distribute(model) first")
    with ExitStack() as stack:
        for reducer in found:
            stack.enter_context(reducer.no_sync())
        yield


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook of torch's, before the step of any optimizer."""
    found = _reducers_of(optimizer)
    if len(found) > 1 and closure_of(args, kwargs) is not None:
        raise UnsupportedError(
            "optimizer.step(closure): the optimizer has parameters of several distributed models; distribute one "
            "module that holds them, as torch.nn.ModuleList([...])"
        )
    result = None
    for reducer in found:
        result = reducer.before_step(optimizer, args, kwargs)
    return result


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook of torch's, after the step of any optimizer."""
    for reducer in _reducers_of(optimizer):
        reducer.after_step(optimizer, args, kwargs)


def _reducers_of(optimizer: torch.optim.Optimizer) -> list[ModelReducer]:
    """The reducers of an optimizer's parameters.

    Raises:
        UsageError: Some of its parameters are distributed, and it trains others.
    """
    key = sum(len(group["params"]) for group in optimizer.param_groups), _made
    known = _by_optimizer.get(optimizer)
    if known is not None and known[0] == key:
        return known[1]
    own = {
        p: f"{i} of group {n}" for n, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    }
    found = [reducer for reducer in set(_reducers.values()) if not own.keys().isdisjoint(reducer.states)]
    found.sort(key=lambda reducer: reducer.membership.order)
    for parameter, place in own.items() if found else ():
        if parameter.requires_grad and all(parameter not in reducer.states for reducer in found):
            raise UsageError(
                f"optimizer.step(): parameter {place} of the optimizer, of shape {list(parameter.shape)}, is of no "
                "distributed model, and others are: ranks would part in it; call hvd.distribute for its module, too, "
                "once the module has all parameters"
            )
    _by_optimizer[optimizer] = key, found
    return found
