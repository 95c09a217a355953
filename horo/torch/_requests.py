"""Requests to the core: tensors as addresses on the way in, results on the way out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from horo import _core
from horo.errors import HoroError, UsageError
from horo.torch import _runtime
from horo.torch._request_cache import CachedRequest
from horo.torch._spans import begin_span, end_span, profiling
from horo.torch._staging import Spec, StagedTensors, as_bytes, count_change, describe

__all__ = [
    "Gathered",
    "Request",
    "check_root",
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
    "wait_any",
]

_BARRIER = Spec("barrier", None, collective="barrier")


class Gathered(NamedTuple):
    """One result of an allgather or alltoall: the rows from all ranks in rank order, and how many came from each."""

    tensor: torch.Tensor
    rows: list[int]


class Request:
    """One operation in progress. ``wait`` must be called once; it returns the result."""

    __slots__ = ("_finish", "_handle", "_memory", "_runtime", "label", "number", "public")

    def __init__(
        self,
        runtime: _runtime.Runtime,
        handle: int,
        label: str,
        memory: Any,
        finish: Callable[[_core.Context, int, Any], Any],
    ) -> None:
        self._runtime = runtime
        self._handle = handle
        self._memory = memory  # the core's until the request is done
        self._finish = finish
        self.label = label
        self.number = number = runtime.handle_base + handle
        """The public number of the request; unique over all jobs of the process."""
        self.public = False
        """Whether ``synchronize`` may find it."""
        runtime.requests[number] = self

    def publish(self, shape: Callable[[Any], Any]) -> None:
        """Lets ``synchronize`` find it; ``shape`` makes of its result what ``wait`` returns then."""
        finish = self._finish
        self._finish = lambda core, handle, memory: shape(finish(core, handle, memory))
        self.public = True

    def done(self) -> bool:
        """Whether ``wait`` would return at once; never blocks."""
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            return runtime.core.poll(self._handle)
        finally:
            runtime.active_calls.pop(call, None)

    def is_done(self) -> bool:
        """Whether the operation is done or has failed; never blocks or raises."""
        return not self._runtime.core.in_progress(self._handle)

    def wait(self) -> Any:
        """Blocks until the operation is done and returns its result.

        A KeyboardInterrupt (or another exception from a signal handler) leaves the request in progress: its memory is
        kept, and ``wait`` may be called again.

        Raises:
            HoroError: The error of the operation.
        """
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            try:
                result = self._finish(runtime.core, self._handle, self._memory)
            except HoroError:
                if not runtime.core.in_progress(self._handle):  # else it is a signal handler's
                    runtime.requests.pop(self.number, None)
                raise
        finally:
            runtime.active_calls.pop(call, None)
        runtime.requests.pop(self.number, None)
        return result

    def wait_done(self) -> None:
        """Blocks until the operation is done or has failed; ``wait`` then returns at once."""
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            try:
                runtime.core.wait(self._handle)
            except HoroError:
                if runtime.core.in_progress(self._handle):  # a signal handler's
                    raise
                return  # wait() raises it
        finally:
            runtime.active_calls.pop(call, None)


def wait_any(requests: Sequence[Request]) -> None:
    """Blocks until one of several requests is done or has failed; all are of one job.

    Raises:
        AbortedError: The job has ended.
    """
    first, call = requests[0], object()
    runtime = first._runtime
    try:
        runtime.active_calls[call] = None
        if runtime.ended:
            runtime.raise_ended(first.label)
        runtime.core.wait_any([request._handle for request in requests])
    finally:
        runtime.active_calls.pop(call, None)


def repeat(key: Hashable, tensor: torch.Tensor, *, in_place: bool) -> torch.Tensor | None:
    """Repeats the last call with the same key, if the tensor has the same shape and dtype; takes little Python.

    Args:
        key: As for ``RequestCache.take``.
        tensor: Anything.
        in_place: Write the result into ``tensor``, else into a new one.

    Returns:
        The tensor with the result. None, and nothing is done, where there is no such call.
    """
    runtime = _runtime.current()
    cached = runtime.request_cache.take(key)
    if cached is None:
        return None
    try:
        output = cached.set_tensor(tensor, in_place)
        if output is None:
            return None
        _execute(runtime, cached, (tensor, output))
    finally:
        cached.idle.append(None)
    if in_place:
        count_change((tensor,))
    return output


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
            return _submit(runtime, cached, tensor, _finish_in_place)
        return _submit(runtime, cached, (tensor, output), _finish_output)
    finally:
        cached.idle.append(None)


def repeat_async(key: Hashable, tensor: torch.Tensor, *, in_place: bool) -> int | None:
    """As ``repeat``, but begins it and returns a public handle."""
    request = start_again(key, tensor, in_place=in_place)
    if request is None:
        return None
    request.public = True
    return request.number


def start_allreduce(
    tensors: Sequence[torch.Tensor],
    spec: Spec,
    *,
    in_place: bool = False,
    sync: bool = False,
    key: Hashable = None,
) -> Request:
    """Begins to reduce ``tensors`` with those of the other ranks, element by element.

    Args:
        tensors: Dense CPU tensors of any shape and strides.
        spec: The reduction.
        in_place: Write the results into ``tensors``, else into new contiguous tensors.
        sync: The caller waits at once.
        key: For a later ``start_again`` with the same key.

    Returns:
        A request whose result is the tuple of reduced tensors.
    """
    return _start(tensors, spec, in_place, sync, key=key)


def run_allreduce(
    tensors: Sequence[torch.Tensor], spec: Spec, *, in_place: bool = False, key: Hashable = None
) -> tuple[torch.Tensor, ...]:
    """What ``start_allreduce`` begins, done at once; returns the reduced tensors."""
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
    """What ``start_broadcast`` begins, done at once; returns the copies."""
    return _run(tensors, _broadcast_spec(root_rank, kind, name, team), in_place, key)


def _broadcast_spec(root_rank: int, kind: str, name: str | None, team: int) -> Spec:
    check_root(root_rank, describe(kind, name), team)
    return Spec(kind, name, root_rank=root_rank, collective="broadcast", team=team)


def start_allgather(
    tensors: Sequence[torch.Tensor], kind: str, name: str | None, *, sync: bool = False, team: int = 0
) -> Request:
    """Begins to concatenate ``tensors`` of all ranks along their first dimension.

    Returns:
        A request whose result is a tuple of ``Gathered``.

    Raises:
        UsageError: A tensor has no dimension.
    """
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
            what = describe(kind, name)
            raise UsageError(f"{what}: a scalar has no first dimension to gather along; use tensor.reshape(1)")
    return _start(tensors, Spec(kind, name, collective="allgather", team=team), False, sync, finish=_finish_gathered)


def start_alltoall(tensor: torch.Tensor, spec: Spec, *, sync: bool = False) -> Request:
    """Begins to give each rank some rows of ``tensor``; the result is ``Gathered``, of the rows from each rank.

    Args:
        tensor: Dense CPU tensor with at least one dimension, of any dtype.
        spec: The operation, with the splits of all rows of ``tensor``.
        sync: The caller waits at once.
    """
    carried = as_bytes(tensor, spec.kind, spec.name)
    dtype, shape = tensor.dtype, tensor.shape[1:]

    def finish(core: _core.Context, handle: int, staged: StagedTensors) -> Gathered:
        (gathered,) = _finish_gathered(core, handle, staged)
        return Gathered(gathered.tensor.view(dtype).view(sum(gathered.rows), *shape), gathered.rows)

    runtime = _runtime.current()
    cached = runtime.request_cache.take_or_create(None, spec, sync, 1)  # splits change, and would fill the cache
    return _submit(runtime, cached, cached.set_tensors([carried], False), finish)


def start_reducescatter(tensors: Sequence[torch.Tensor], spec: Spec) -> Request:
    """Begins to reduce ``tensors`` with those of the other ranks, of which each rank gets some rows.

    Args:
        tensors: Dense CPU tensors with at least one dimension.
        spec: The reduction, with the ``place`` of this rank.

    Returns:
        A request whose result is the tuple of this rank's rows.

    Raises:
        UsageError: A tensor has no dimension.
    """
    _check_rows(tensors, spec)
    return _start(tensors, spec, False, False)


def run_reducescatter(tensors: Sequence[torch.Tensor], spec: Spec) -> tuple[torch.Tensor, ...]:
    """What ``start_reducescatter`` begins, done at once; returns this rank's rows."""
    _check_rows(tensors, spec)
    return _run(tensors, spec, False)


def _check_rows(tensors: Sequence[torch.Tensor], spec: Spec) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
            what = describe(spec.kind, spec.name)
            raise UsageError(f"{what}: a scalar has no first dimension to split along; use allreduce")


def run_barrier(team: int = 0) -> None:
    """Waits until all ranks of the team have come here."""
    runtime = _runtime.current()
    spec = _BARRIER if team == 0 else _BARRIER._replace(team=team)
    cached = runtime.request_cache.take(spec)
    if cached is None:
        _run([], spec, False, spec)
        return
    try:
        _execute(runtime, cached, None)
    finally:
        cached.idle.append(None)


def check_root(root_rank: int, what: str, team: int = 0) -> None:
    """Refuses what is no rank of the team.

    Raises:
        UsageError: ``root_rank``, a number in the job, is none of its members'.
    """
    ranks = _runtime.current().teams.find(team).ranks
    if isinstance(root_rank, int) and root_rank in ranks:
        return
    if team == 0:
        raise UsageError(f"{what}: root_rank {root_rank!r} is not a rank of this job (0 to {len(ranks) - 1})")
    raise UsageError(f"{what}: root_rank {root_rank!r} is not a member of the process set, whose ranks are {ranks}")


def _start(
    tensors: Sequence[torch.Tensor],
    spec: Spec,
    in_place: bool,
    sync: bool,
    *,
    finish: Callable[[_core.Context, int, Any], Any] | None = None,
    key: Hashable = None,
) -> Request:
    runtime = _runtime.current()
    cached = runtime.request_cache.take_or_create(key or (spec, sync), spec, sync, len(tensors))
    try:
        return _submit(runtime, cached, cached.set_tensors(tensors, in_place), finish or _finish_staged)
    finally:
        cached.idle.append(None)


def _run(tensors: Sequence[torch.Tensor], spec: Spec, in_place: bool, key: Hashable = None) -> tuple[torch.Tensor, ...]:
    runtime = _runtime.current()
    cached = runtime.request_cache.take_or_create(key or (spec, True), spec, True, len(tensors))
    try:
        staged = cached.set_tensors(tensors, in_place)
        _execute(runtime, cached, staged)
    finally:
        cached.idle.append(None)
    return staged.results()


def _submit(
    runtime: _runtime.Runtime,
    cached: CachedRequest,
    memory: Any,
    finish: Callable[[_core.Context, int, Any], Any],
) -> Request:
    label, last_handle = cached.label(), cached.buffer.last_handle
    shown = begin_span(cached.collective, label) if profiling._is_profiler_enabled else None
    last_handle[0] = 0
    try:
        runtime.active_calls[cached] = memory
        if runtime.ended:
            runtime.raise_ended(label)
        if runtime.abandoned:
            runtime.release_abandoned()
        return Request(runtime, runtime.core.submit(cached.buffer), label, memory, finish)
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


def _execute(runtime: _runtime.Runtime, cached: CachedRequest, memory: object) -> None:
    label, last_handle = cached.label(), cached.buffer.last_handle
    shown = begin_span(cached.collective, label) if profiling._is_profiler_enabled else None
    last_handle[0] = 0
    try:
        runtime.active_calls[cached] = memory
        if runtime.ended:
            runtime.raise_ended(label)
        if runtime.abandoned:
            runtime.release_abandoned()
        runtime.core.run(cached.buffer)
    except BaseException:
        if handle := last_handle[0]:
            runtime.abandoned[handle] = memory  # up to here nothing is called, so no signal handler runs
            runtime.release_abandoned()
        raise
    finally:
        runtime.active_calls.pop(cached, None)
        if shown is not None:
            end_span(shown)


def _finish_staged(core: _core.Context, handle: int, staged: StagedTensors) -> tuple[torch.Tensor, ...]:
    core.finish(handle)
    return staged.results()


def _finish_in_place(core: _core.Context, handle: int, tensor: torch.Tensor) -> torch.Tensor:
    core.finish(handle)
    count_change((tensor,))
    return tensor


def _finish_output(core: _core.Context, handle: int, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    core.finish(handle)
    return pair[1]


def _finish_gathered(core: _core.Context, handle: int, staged: StagedTensors) -> tuple[Gathered, ...]:
    try:
        core.wait(handle)
        gathered = tuple(_take_one(core, handle, index, tensor) for index, tensor in enumerate(staged.inputs))
    except HoroError:  # raised by the core; after one from a signal handler, the request stays in progress
        core.release_if_done(handle)
        raise
    core.release(handle)
    return gathered


def _take_one(core: _core.Context, handle: int, index: int, tensor: torch.Tensor) -> Gathered:
    buffer, rows = core.take_result(handle, index)
    shape = (sum(rows), *tensor.shape[1:])
    if len(buffer) == 0:
        return Gathered(torch.empty(shape, dtype=tensor.dtype), rows)
    return Gathered(torch.frombuffer(buffer, dtype=tensor.dtype).view(shape), rows)
