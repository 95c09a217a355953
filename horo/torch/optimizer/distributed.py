# ruff: noqa: PLR0917  (the order of arguments is Horovod's)
"""``DistributedOptimizer``: any torch optimizer, with its gradients averaged over all ranks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

from horo.errors import UnsupportedError, UsageError
from horo.torch.compat.dynamo import keep_from_dynamo
from horo.torch.compat.torch_private import has_step_hooks
from horo.torch.engine import runtime
from horo.torch.ops.allreduce import Adasum, Average, Sum
from horo.torch.ops.compression import Compression, Compressor
from horo.torch.ops.process_set import ProcessSet, global_process_set, refuse_unregistered
from horo.torch.ops.reduce_op import resolve_op
from horo.torch.optimizer.adasum import DeltaReducer
from horo.torch.optimizer.at_backward import BackwardReducer
from horo.torch.optimizer.at_step import StepReducer
from horo.torch.optimizer.attach import attach, find_duplicates
from horo.torch.optimizer.consistency import refuse_ddp_model
from horo.torch.optimizer.membership import Membership, members_with
from horo.torch.optimizer.parameter_state import ReductionOptions
from horo.torch.optimizer.sharding.sharded_step import shard_step
from horo.torch.optimizer.sharding.supported import check_sharding
from horo.torch.optimizer.strategy import Strategy

__all__ = ["Distributed", "DistributedOptimizer"]

_ADASUM = "adasum"
STRATEGIES: dict[str, Callable[[Membership, Sequence[Sequence[torch.Tensor]]], Strategy]] = {
    "backward": BackwardReducer,
    "step": StepReducer,
    _ADASUM: DeltaReducer,
}
"""By ``gradients_ready``; one combines steps instead of gradients."""

if TYPE_CHECKING:

    class Distributed(torch.optim.Optimizer, Any):  # type: ignore[misc, unused-ignore]
        """The type of a distributed optimizer, for type checkers only: at run time, the optimizer keeps its class.

        A type checker cannot say "the class of the argument, with more methods". By ``Any`` it passes for every class
        of optimizer, and has the attributes of each.
        """

        op: int
        process_set: ProcessSet
        backward_passes_per_step: int

        def synchronize(self) -> None:
            """Averages the gradients that no backward has averaged; blocks until all ranks take part."""

        def skip_synchronize(self) -> AbstractContextManager[None]:
            """A context in which ``step()`` takes gradients as they are."""

        def no_sync(self) -> AbstractContextManager[None]:
            """A context in which backward only accumulates locally."""

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Changes after how many backward passes gradients are averaged."""

else:
    Distributed = torch.optim.Optimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | torch.nn.Module | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradients_ready: str | None = None,
    sharding: str | None = None,
) -> Distributed:
    """Makes ``optimizer`` average gradients over all ranks: they are averaged when ``backward()`` returns.

    Code between ``backward()`` and ``step()`` needs no change: clipping, a gradient scaler, logging of norms, several
    passes before a step. A further pass before the step accumulates into averaged gradients, and the sum is averaged
    again. That is right but costs traffic, which ``no_sync()`` saves.

    The optimizer itself is returned: its class, state, options and ``state_dict()`` stay what they are. It gains

    - ``no_sync()``, a context in which backward only accumulates locally. The next backward outside averages the sum;
    - ``set_backward_passes_per_step(n)``;
    - ``synchronize()``, which averages what no backward has averaged, as after ``no_sync()``;
    - ``skip_synchronize()``, a context in which ``step()`` takes gradients as they are. It is an error if they are not
      averaged, except inside ``no_sync()``: for steps of one rank alone.

    A deep copy is distributed too; pickling is an error, save ``state_dict()``. The optimizer goes on working after
    ``shutdown()`` and ``init()``. Of several over one parameter, the newest averages its gradient.

    ``backward()`` blocks until all ranks have ended theirs: ranks call it equally often and in the same order. Every
    parameter that requires grad takes part, with zeros if this rank did not use it. If no rank did, ``p.grad`` stays
    None (zeros with ``gradients_ready="step"``, as in Horovod). Parameters frozen or thawed later are detected; ranks
    must freeze and thaw alike.

    ``step()`` averages what no backward has averaged: gradients set by hand, made inside ``no_sync()``, or of a rank
    that called no backward. If other ranks have changed theirs by then, as by clipping, that is an error on all.
    Calling ``synchronize()`` on every rank before gradients are used prevents it. ``step(closure)`` gives the optimizer
    the mean of the ranks' losses.

    The first reduction compares parameters, state and options of all ranks, so a forgotten ``broadcast_parameters`` or
    ``broadcast_optimizer_state`` is an error. So does the first one after ``add_param_group``, for the new parameters.
    After three steps, a warning names ranks whose gradients were equal to the bit: they read the same samples.
    ``HORO_FIRST_CHECKS=0`` ends both. With ``HORO_CHECK_NAN=1``, a gradient with a NaN is an error on all ranks.
    Errors of communication come out of ``backward()``: ``MismatchError``, another ``GroupError`` if a rank is lost.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, or the model itself; names tie gradients together and appear in
            messages. Without it, names come from positions.
        compression: What is sent instead of a gradient, e.g. ``Compression.bf16``. Gradients have the dtypes that
            ``allreduce`` takes.
        backward_passes_per_step: How many backward passes accumulate locally before gradients are averaged. They are
            added up, not divided.
        op: ``Average``, ``Sum`` or ``Adasum``. With ``Adasum``, gradients stay those of this rank: ``step()`` lets the
            optimizer step by them, combines the steps of all ranks and blocks until that is done. Each rank calls it
            equally often. State such as momentum is each rank's own then; parameters are equal. A ``step()`` that
            raises restores the parameters, not that state; the next call does the step, or ends the interrupted
            exchange.
        gradient_predivide_factor: Splits the averaging: divide by it before the sum, by size over it after.
        num_groups: Deprecated name of an integer ``groups``.
        groups: Gradients that travel together: a number of groups of about equal length, or lists of parameters
            (others travel alone).
        sparse_as_dense: Average sparse gradients as dense ones; else their rows are gathered.
        process_set: The ranks that take part; others step by themselves, as in a job of one rank. Several optimizers
            may have different sets, which may overlap.
        gradients_ready: ``"backward"``: as above. ``"step"``: Horovod's order of calls, in which gradients are in
            flight from backward to ``synchronize()`` or ``step()``. To clear or change them in between is an error, and
            after ``synchronize()``, ``step()`` belongs inside ``skip_synchronize()``. None: the setting
            ``HORO_GRADIENTS_READY``, else ``"backward"``.
        sharding: ``"optimizer"``: parameters and the optimizer's state lie in memory once per host, and each rank steps
            its share. Gradients are averaged on every rank. ``step()`` blocks until all ranks have called it; in the
            first one, parameters move. Ranks must change parameters alike outside ``step()``, or undo it before; else
            the next ``step()`` is an error. ``state_dict()`` is whole on every rank. Not with ``join()``. None: each
            rank has all, and steps all.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: An argument is wrong; the sentence names it.
        UnsupportedError: ``op`` is another one, or ``Adasum`` for complex parameters; or ``sharding`` is not for this
            optimizer.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    """
    keep_from_dynamo()
    _check_process_set(process_set)
    _check_optimizer(optimizer)
    op = resolve_op(op)
    if op not in (Average, Sum, Adasum):
        raise UnsupportedError(f"DistributedOptimizer: op={op} is not supported; use hvd.Average, Sum or Adasum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor needs op=Average")
    if not gradient_predivide_factor > 0:
        raise UsageError(f"gradient_predivide_factor must be positive, not {gradient_predivide_factor}")
    if backward_passes_per_step <= 0:
        raise UsageError(f"backward_passes_per_step must be positive, not {backward_passes_per_step}")
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if gradients_ready not in (None, "backward", "step"):
        raise UsageError(f"gradients_ready must be 'backward' or 'step', not {gradients_ready!r}")
    names = _names(optimizer, named_parameters)
    grouped = _grouped(optimizer, groups)
    chosen = gradients_ready or runtime.place().gradients_ready
    if op == Adasum:
        _check_adasum(optimizer, groups, gradients_ready)
        chosen = _ADASUM
    options = ReductionOptions(
        op,
        compression,
        float(gradient_predivide_factor),
        sparse_as_dense=sparse_as_dense,
        passes=backward_passes_per_step,
        process_set=process_set,
    )
    shard = None
    if sharding is not None:
        check_sharding(optimizer, sharding, op, Adasum)
        shard = shard_step
    attach(optimizer, STRATEGIES[chosen](Membership(optimizer, options, names), grouped), shard)
    return cast("Distributed", optimizer)


def _check_adasum(optimizer: torch.optim.Optimizer, groups: Any, gradients_ready: str | None) -> None:
    for given, what in ((groups, "groups"), (gradients_ready, "gradients_ready")):
        if given:
            raise UsageError(
                f"DistributedOptimizer: {what}={given!r} is about gradients, and op=Adasum combines the steps of ranks "
                f"instead; leave {what} out"
            )
    for number, parameter in enumerate(_parameters(optimizer)):
        if parameter.requires_grad and parameter.is_complex():
            raise UnsupportedError(
                f"DistributedOptimizer: parameter {number} is of {parameter.dtype}; op=Adasum is for real floats"
            )


def _check_process_set(process_set: Any) -> None:
    if process_set is global_process_set:
        return
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"DistributedOptimizer: process_set must be a ProcessSet, not {process_set!r}")
    if process_set.team_in(runtime.current()) is None:
        refuse_unregistered(process_set, "DistributedOptimizer")


def _check_optimizer(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.nn.Module):
        raise UsageError(
            f"DistributedOptimizer: the first argument is the optimizer, not a model ({kind}): "
            "hvd.DistributedOptimizer(optimizer, model)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"DistributedOptimizer: expected a torch.optim.Optimizer, not {kind}; if it wraps an optimizer, wrap that "
            f"one: {kind}(hvd.DistributedOptimizer(...))"
        )
    if hasattr(optimizer, "_reducer"):
        raise UsageError(
            "DistributedOptimizer: this optimizer is distributed already; it goes on working after shutdown() and "
            "init(), so wrap it once"
        )
    if not has_step_hooks(optimizer):
        raise UsageError(
            f"DistributedOptimizer: {kind} does not call torch.optim.Optimizer.__init__, so torch has no hooks around "
            f"its step(); call it there or, if it wraps an optimizer, wrap that one: "
            f"{kind}(hvd.DistributedOptimizer(...))"
        )
    for member, name in members_with(_parameters(optimizer)):
        if member.owner != "DistributedOptimizer":
            raise UsageError(
                f"DistributedOptimizer: {member.owner} averages the gradient of {name!r} already; leave one of both out"
            )
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and hasattr(value, "_reducer"):
            raise UsageError(
                f"DistributedOptimizer: {kind} averages gradients already: its attribute {name!r} is a "
                "distributed optimizer already; use it as it is"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[torch.Tensor, str]:
    """Name by parameter, checked; empty if none were given."""
    if named_parameters is None:
        return {}
    if isinstance(named_parameters, torch.nn.Module):
        refuse_ddp_model(named_parameters)
        named_parameters = named_parameters.named_parameters()
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise UsageError("named_parameters must yield (name, parameter) tuples, as model.named_parameters() does")
    duplicates = find_duplicates(name for name, _ in pairs)
    if duplicates:
        raise UsageError(f"named_parameters has names more than once: {', '.join(sorted(duplicates))}")
    names = {parameter: name for name, parameter in reversed(pairs)}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise UsageError(
                    f"named_parameters lacks parameter {index} of group {number} of the optimizer, of shape "
                    f"{list(parameter.shape)}; give all parameters or leave named_parameters out"
                )
    return names


def _grouped(optimizer: torch.optim.Optimizer, groups: Any) -> list[list[torch.Tensor]]:
    """Lists of parameters that travel together."""
    if groups is None:
        return []
    own = _parameters(optimizer)
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        trained = [parameter for parameter in own if parameter.requires_grad]
        count = min(groups, len(trained))
        bounds = [len(trained) * index // count for index in range(count + 1)] if count else [0]
        return [trained[start:end] for start, end in itertools.pairwise(bounds)]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise UsageError(
            f"groups must be a number that is not negative, or a list of lists of parameters, not {groups!r}"
        )
    members = [member for group in groups for member in group]
    if not all(isinstance(member, torch.Tensor) for member in members):
        raise UsageError("groups must hold parameters (torch.Tensor) only")
    if find_duplicates(members):
        raise UsageError("groups has a parameter more than once")
    known = set(own)
    for number, group in enumerate(groups):
        for member in group:
            if member not in known:
                raise UsageError(
                    f"groups[{number}] has a tensor of shape {list(member.shape)} that the optimizer lacks"
                )
    return [list(group) for group in groups if group]
