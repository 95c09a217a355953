"""Requests to the core: tensors as addresses on the way in, results on the way out."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from horo.bootstrap.gpu_libraries import CUDA_PLACES
from horo.core import context
from horo.core.calls import repeat
from horo.core.libraries import use_cuda
from horo.errors import NotInitializedError, ResourceError, UsageError
from horo.torch.compat.profiler import begin_span, end_span, profiling
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.handles import Handle
from horo.torch.engine.operation import Operation, StagedTensors, describe, list_tensors
from horo.torch.engine.request import Request, left_request
from horo.torch.engine.request_cache import CachedRequest
from horo.torch.engine.results import (
    Gathered,
    Gathering,
    finish_in_place,
    finish_output,
    finish_staged,
)

__all__ = [
    "check_root",
    "expect_again",
    "find_left",
    "list_group",
    "repeat",
    "repeat_async",
    "run_allreduce",
    "run_barrier",
    "run_broadcast",
    "run_reducescatter",
    "start_again",
    "start_allgather",
    "start_allreduce",
    "start_alltoall",
    "start_broadcast",
    "start_reducescatter",
    "tell_refused",
    "telling",
]

_BARRIER = Operation("barrier", None, collective="barrier")


def expect_again(
    key: Hashable, spec: Operation, tensor: torch.Tensor, result: torch.Tensor, *, is_out: bool = False
) -> None:
    """Makes ready for a later ``repeat`` with ``key``, after an allgather or alltoall of one tensor.

    ``is_out``: the caller has given the memory of the result, and will again.
    """
    cached = _runtime.current().request_cache.take_or_create(key, spec, True, 1)
    try:
        cached.expect(tensor, spec, result, is_out=is_out)
    finally:
        cached.is_taken = False


def start_again(key: Hashable, tensor: torch.Tensor, *, in_place: bool) -> Request | None:
    """As ``repeat``, but begins it: the result of the request is the tensor."""
    runtime = _runtime.current()
    cached = runtime.request_cache.take(key)
    if cached is None:
        return None
    try:
        output = cached.set_tensor(tensor, in_place)
        if output is None:
            return None
        if in_place:
            return _submit(runtime, cached, tensor, finish_in_place)
        return _submit(runtime, cached, (tensor, output), finish_output)
    finally:
        cached.is_taken = False


def repeat_async(key: Hashable, tensor: torch.Tensor, *, in_place: bool) -> Handle[torch.Tensor] | None:
    """As ``repeat``, but begins it and returns a public handle."""
    request = start_again(key, tensor, in_place=in_place)
    return None if request is None else request.publish()


def start_allreduce(
    tensors: Sequence[torch.Tensor],
    spec: Operation,
    *,
    in_place: bool = False,
    sync: bool = False,
    key: Hashable = None,
) -> Request:
    """Begins to reduce ``tensors`` with those of the other ranks, element by element.

    Args:
        tensors: Dense tensors of any shape and strides.
        spec: The reduction.
        in_place: Write the results into ``tensors``, else into new contiguous tensors.
        sync: The caller waits at once.
        key: For a later ``start_again`` with the same key.

    Returns:
        A request whose result is the tuple of reduced tensors.
    """
    return _start(tensors, spec, in_place, sync, key=key)


def find_left(tensor: torch.Tensor) -> Request | None:
    """The request that ``start_allreduce`` has submitted for ``tensor``, though an exception has ended that call."""
    return left_request(tensor, finish_staged)


def run_allreduce(
    tensors: Sequence[torch.Tensor], spec: Operation, *, in_place: bool = False, key: Hashable = None
) -> tuple[torch.Tensor, ...]:
    """As ``start_allreduce``, but waits; returns the reduced tensors."""
    return _run(tensors, spec, in_place, key)


def start_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    kind: str,
    name: str | None,
    *,
    in_place: bool = False,
    key: Hashable = None,
    team: int = 0,
) -> Request:
    """Begins to copy the root's ``tensors`` to all ranks; the result is the tuple of copies.

    Raises:
        UsageError: ``root_rank`` is no rank of the team.
    """
    return _start(tensors, _broadcast_spec(root_rank, kind, name, team), in_place, False, key=key)


def run_broadcast(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    kind: str,
    name: str | None,
    *,
    in_place: bool = False,
    key: Hashable = None,
    team: int = 0,
) -> tuple[torch.Tensor, ...]:
    """As ``start_broadcast``, but waits; returns the copies."""
    return _run(tensors, _broadcast_spec(root_rank, kind, name, team), in_place, key)


def _broadcast_spec(root_rank: int, kind: str, name: str | None, team: int) -> Operation:
    spec = Operation(kind, name, collective="broadcast", team=team)
    with telling(spec):
        return spec._replace(root_rank=check_root(root_rank, describe(kind, name), team))


def start_allgather(
    tensors: Sequence[torch.Tensor], kind: str, name: str | None, *, sync: bool = False, team: int = 0
) -> Request:
    """Begins to concatenate ``tensors`` of all ranks along their first dimension.

    Returns:
        A request whose result is a tuple of ``Gathered``.

    Raises:
        UsageError: A tensor has no dimension.
    """
    spec = Operation(kind, name, collective="allgather", team=team)
    _check_rows(tensors, spec, "gather along; use tensor.reshape(1)")
    return _start(tensors, spec, False, sync, finish=Gathering())


def start_alltoall(tensor: torch.Tensor, spec: Operation, *, sync: bool = False) -> Request:
    """Begins to give each rank some rows of ``tensor``; the result is ``Gathered``, of the rows from each rank.

    Args:
        tensor: Dense tensor with at least one dimension, of any dtype.
        spec: The operation, with the splits of all rows of ``tensor``.
        sync: The caller waits at once.
    """
    gathering = Gathering()

    def finish(core: context.Context, handle: int, staged: StagedTensors) -> Gathered:
        return gathering(core, handle, staged)[0]

    runtime = _runtime.current()
    key = (spec, sync) if len(set(spec.splits)) == 1 else None  # others change, and would fill the cache
    cached = runtime.request_cache.take_or_create(key, spec, sync, 1)
    try:
        return _submit(runtime, cached, _stage(cached, spec, [tensor], False), finish)
    finally:
        cached.is_taken = False


def start_reducescatter(tensors: Sequence[torch.Tensor], spec: Operation) -> Request:
    """Begins to reduce ``tensors`` with those of the other ranks, of which each rank gets some rows.

    Args:
        tensors: Dense tensors with at least one dimension.
        spec: The reduction, with the ``place`` of this rank.

    Returns:
        A request whose result is the tuple of this rank's rows.

    Raises:
        UsageError: A tensor has no dimension.
    """
    _check_rows(tensors, spec, "split along; use allreduce")
    return _start(tensors, spec, False, False)


def run_reducescatter(
    tensors: Sequence[torch.Tensor], spec: Operation, key: Hashable = None
) -> tuple[torch.Tensor, ...]:
    """As ``start_reducescatter``, but waits; returns this rank's rows."""
    _check_rows(tensors, spec, "split along; use allreduce")
    return _run(tensors, spec, False, key)


def _check_rows(tensors: Sequence[torch.Tensor], spec: Operation, needs: str) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.dim() == 0:
            error = UsageError(f"{describe(spec.kind, spec.name)}: a scalar has no first dimension to {needs}")
            tell_refused(spec, error)
            raise error


def tell_refused(spec: Operation, error: UsageError) -> None:
    """Lets the call that is refused with ``error`` fail on the other ranks of the process set, too.

    They would wait for this rank. Uses up an automatic name, as theirs are. Never blocks; leaves other calls alone.
    """
    runtime, call = _runtime.current(), object()
    try:
        runtime.active_calls[call] = None
        if not runtime.ended and not isinstance(error, NotInitializedError):
            with contextlib.suppress(UsageError):  # of the name
                runtime.core.refuse(spec.team, runtime.name(spec.kind, spec.name, spec.team), error)
                error._is_told = True
    finally:
        runtime.active_calls.pop(call, None)


@contextlib.contextmanager
def telling(spec: Operation) -> Iterator[None]:
    """Calls ``tell_refused`` with the UsageError that ends it; of ``spec``, kind, name and team have to be right."""
    try:
        yield
    except UsageError as error:
        tell_refused(spec, error)
        raise


def list_group(tensors: Sequence[torch.Tensor], spec: Operation) -> list[torch.Tensor]:
    """``list_tensors`` for an operation, which fails on the other ranks, too, where it is refused."""
    with telling(spec):
        return list_tensors(tensors, spec.kind)


def _stage(cached: CachedRequest, spec: Operation, tensors: Sequence[torch.Tensor], in_place: bool) -> StagedTensors:
    try:  # not `telling`, which takes a microsecond
        return cached.set_tensors(tensors, in_place)
    except UsageError as error:
        tell_refused(spec, error)
        raise


def run_barrier(team: int = 0) -> None:
    """Waits until all ranks of the team have come here."""
    runtime = _runtime.current()
    spec = _BARRIER if team == 0 else _BARRIER._replace(team=team)
    cached = runtime.request_cache.take(spec)
    if cached is None:
        _run([], spec, False, spec)
        return
    try:
        runtime.execute(cached, None)
    finally:
        cached.is_taken = False


def check_root(root_rank: int, what: str, team: int = 0) -> int:
    """The number of a root; an integer of numpy's is one, too. Refuses a root that is no rank of the team.

    Raises:
        UsageError: ``root_rank``, a number in the job, is none of its members'.
    """
    ranks = _runtime.current().teams.find(team).ranks
    with contextlib.suppress(TypeError):
        if not isinstance(root_rank, bool) and (root := operator.index(root_rank)) in ranks:
            return root
    if team == 0:
        raise UsageError(f"{what}: root_rank {root_rank!r} is not a rank of this job (0 to {len(ranks) - 1})")
    raise UsageError(f"{what} received invalid root rank {root_rank!r} for provided process set; its ranks are {ranks}")


def _start(
    tensors: Sequence[torch.Tensor],
    spec: Operation,
    in_place: bool,
    sync: bool,
    *,
    finish: Callable[[context.Context, int, Any], Any] | None = None,
    key: Hashable = None,
) -> Request:
    runtime = _runtime.current()
    cached = runtime.request_cache.take_or_create(key or (spec, sync), spec, sync, len(tensors))
    try:
        return _submit(runtime, cached, _stage(cached, spec, tensors, in_place), finish or finish_staged)
    finally:
        cached.is_taken = False


def _run(
    tensors: Sequence[torch.Tensor], spec: Operation, in_place: bool, key: Hashable = None
) -> tuple[torch.Tensor, ...]:
    runtime = _runtime.current()
    cached = runtime.request_cache.take_or_create(key or (spec, True), spec, True, len(tensors))
    try:
        staged = _stage(cached, spec, tensors, in_place)
        if staged.device is None:
            runtime.execute(cached, staged)
            return staged.results()
        request = _submit(runtime, cached, staged, finish_staged)
    finally:
        cached.is_taken = False
    results: tuple[torch.Tensor, ...] = request.wait()
    return results


def _submit(
    runtime: _runtime.Runtime,
    cached: CachedRequest,
    memory: Any,
    finish: Callable[[context.Context, int, Any], Any],
) -> Request:
    label, last_handle = cached.label(), cached.buffer.last_handle
    shown = begin_span(cached.collective, label) if profiling._is_profiler_enabled else None
    last_handle[0] = 0
    try:
        runtime.active_calls[cached] = memory
        runtime.admit(cached)
        if cached.device is not None and not runtime.uses_gpus:
            _use_gpus(runtime, cached.buffer.request.team, label)
        return Request(runtime, runtime.core.submit(cached.buffer), label, memory, finish, cached.taken_name)
    except BaseException:
        if handle := last_handle[0]:
            runtime.abandoned[handle] = memory  # up to here nothing is called, so no signal handler runs
            runtime.requests.pop(runtime.handle_base + handle, None)
            runtime.release_abandoned()
        raise
    finally:
        runtime.active_calls.pop(cached, None)
        if shown is not None:
            end_span(shown)


def _use_gpus(runtime: _runtime.Runtime, team: int, label: str) -> None:
    try:
        use_cuda(runtime.core, CUDA_PLACES)
    except (ResourceError, UsageError) as error:
        runtime.core.refuse(team, label, error)
        error._is_told = True
        raise
    runtime.uses_gpus = True
