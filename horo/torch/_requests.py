"""Requests to the core: tensors as addresses on the way in, results on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from horo import _core
from horo._errors import AbortedError, HoroError, UsageError
from horo.torch import _state
from horo.torch._staging import Load, Spec, describe

__all__ = [
    "Gathered",
    "Request",
    "check_root",
    "poll",
    "publish",
    "run_allreduce",
    "run_barrier",
    "run_broadcast",
    "start_allgather",
    "start_allreduce",
    "start_broadcast",
    "synchronize",
]

_BARRIER = Spec("barrier", None, collective="barrier")


class Gathered(NamedTuple):
    """One result of an allgather: the rows of all ranks in rank order, and how many each rank gave."""

    tensor: torch.Tensor
    rows: list[int]


class Request:
    """One operation under way. ``wait`` must be called once; it gives the result."""

    __slots__ = ("_finish", "_handle", "_load", "_session", "label")

    def __init__(
        self,
        session: _state.Session,
        handle: int,
        label: str,
        load: Load,
        finish: Callable[[_core.Context, int, Load], Any] | None,
    ) -> None:
        self._session = session
        self._handle = handle
        self._load = load  # its memory is the core's until the request is done
        self._finish = finish  # None: what the load delivers
        self.label = label
        session.requests.add(self)

    def done(self) -> bool:
        """Whether ``wait`` would return at once; never blocks."""
        token = self._session.enter(self.label)
        try:
            return self._session.core.poll(self._handle)
        finally:
            self._session.leave(token)

    def wait(self) -> Any:
        """Blocks until the operation is done and returns its result.

        A KeyboardInterrupt (or what else a signal handler raises) leaves the request under way: its memory is
        kept, and ``wait`` may be called again.

        Raises:
            HoroError: What became of the operation.
        """
        token = self._session.enter(self.label)
        try:
            core = self._session.core
            core.wait(self._handle)
            result = self._finish(core, self._handle, self._load) if self._finish else self._load.deliver()
        except HoroError:
            self._forget()
            raise
        finally:
            self._session.leave(token)
        self._forget()
        return result

    def settle(self) -> None:
        """Blocks until the operation is done, well or badly; ``wait`` then returns at once."""
        token = self._session.enter(self.label)
        try:
            self._session.core.wait(self._handle)
        except HoroError:
            return  # wait() will say it
        finally:
            self._session.leave(token)

    def _forget(self) -> None:
        self._session.core.release(self._handle)
        self._session.requests.discard(self)


def start_allreduce(
    tensors: Sequence[torch.Tensor], spec: Spec, *, in_place: bool = False, sync: bool = False
) -> Request:
    """Begins to reduce ``tensors`` with those of the other ranks, element by element.

    Args:
        tensors: Dense CPU tensors of any shape and strides.
        spec: The reduction.
        in_place: Write the results into ``tensors``, else into new contiguous tensors.
        sync: The caller waits at once.

    Returns:
        A request whose result is the tuple of reduced tensors.
    """
    return _start(tensors, spec, in_place, sync)


def run_allreduce(tensors: Sequence[torch.Tensor], spec: Spec, *, in_place: bool = False) -> tuple[torch.Tensor, ...]:
    """What ``start_allreduce`` begins, done at once; returns the reduced tensors."""
    return _run(tensors, spec, in_place)


def start_broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, kind: str, name: str | None, *, in_place: bool = False
) -> Request:
    """Begins to copy the root's ``tensors`` to all ranks; the result is the tuple of copies.

    Raises:
        UsageError: ``root_rank`` is no rank of the job.
    """
    return _start(tensors, _broadcast_spec(root_rank, kind, name), in_place, False)


def run_broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, kind: str, name: str | None, *, in_place: bool = False
) -> tuple[torch.Tensor, ...]:
    """What ``start_broadcast`` begins, done at once; returns the copies."""
    return _run(tensors, _broadcast_spec(root_rank, kind, name), in_place)


def _broadcast_spec(root_rank: int, kind: str, name: str | None) -> Spec:
    check_root(root_rank, describe(kind, name))
    return Spec(kind, name, root_rank=root_rank, collective="broadcast")


def start_allgather(tensors: Sequence[torch.Tensor], kind: str, name: str | None, *, sync: bool = False) -> Request:
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
    return _start(tensors, Spec(kind, name, collective="allgather"), False, sync, _take)


def run_barrier() -> None:
    """Waits until all ranks have come here."""
    _run([], _BARRIER, False)


def publish(request: Request, shape: Callable[[Any], Any]) -> int:
    """An integer handle for a request; ``shape`` turns its result into what ``synchronize`` returns."""
    number = _state.next_handle()
    _state.current().handles[number] = (request, shape)
    return number


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once; never blocks.

    Raises:
        ValueError: The handle is unknown or was synchronized already.
        AbortedError: ``shutdown()`` came before it was synchronized.
    """
    return _lookup(handle)[0].done()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result; the handle is gone afterwards, also if this raises.

    Returns:
        The tensor, or for the grouped forms the tuple of tensors.

    Raises:
        ValueError: The handle is unknown or was synchronized already.
        MismatchError: Ranks submitted different things under one name.
        GroupError: A rank is lost or horo was shut down.
    """
    request, shape = _lookup(handle)
    try:
        result = request.wait()
    except HoroError:
        _state.current().handles.pop(handle, None)
        raise
    _state.current().handles.pop(handle, None)
    return shape(result)


def check_root(root_rank: int, what: str) -> None:
    """Refuses what is no rank of the job.

    Raises:
        UsageError: ``root_rank`` is not from 0 to size - 1.
    """
    size = _state.size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise UsageError(f"{what}: root_rank {root_rank!r} is not a rank of this job (0 to {size - 1})")


def _start(
    tensors: Sequence[torch.Tensor],
    spec: Spec,
    in_place: bool,
    sync: bool,
    finish: Callable[[_core.Context, int, Load], Any] | None = None,
) -> Request:
    session = _state.current()
    prepared = session.shelf.borrow(spec, sync, len(tensors))
    try:
        load = prepared.load(tensors, in_place)
        label = prepared.label()
        token = session.enter(label)
        try:
            return Request(session, session.core.submit(prepared.slip), label, load, finish)
        finally:
            session.leave(token)
    finally:
        prepared.in_use.release()


def _run(tensors: Sequence[torch.Tensor], spec: Spec, in_place: bool) -> tuple[torch.Tensor, ...]:
    session = _state.current()
    prepared = session.shelf.borrow(spec, True, len(tensors))
    try:
        load = prepared.load(tensors, in_place)
        token = session.enter(prepared.label())
        try:
            session.core.run(prepared.slip)
        except HoroError:
            raise
        except BaseException:  # a signal handler's: the core goes on with the memory
            session.held.append(load)
            raise
        finally:
            session.leave(token)
    finally:
        prepared.in_use.release()
    return load.deliver()


def _take(core: _core.Context, handle: int, load: Load) -> tuple[Gathered, ...]:
    return tuple(_take_one(core, handle, index, tensor) for index, tensor in enumerate(load.inputs))


def _take_one(core: _core.Context, handle: int, index: int, tensor: torch.Tensor) -> Gathered:
    buffer, rows = core.take_result(handle, index)
    shape = (sum(rows), *tensor.shape[1:])
    if len(buffer) == 0:
        return Gathered(torch.empty(shape, dtype=tensor.dtype), rows)
    return Gathered(torch.frombuffer(buffer, dtype=tensor.dtype).view(shape), rows)


def _lookup(handle: int) -> tuple[Request, Callable[[Any], Any]]:
    session = _state.current()
    entry = session.handles.get(handle)
    if entry is not None:
        return entry
    if isinstance(handle, int) and 0 < handle < session.first_handle:
        raise AbortedError(f"Handle {handle} was created before horo was shut down.")
    raise UsageError(f"Handle {handle} was not created or has been cleared.")
