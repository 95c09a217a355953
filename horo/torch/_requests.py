"""Requests to the core: tensors as addresses on the way in, results on the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from horo import _core
from horo._errors import AbortedError, HoroError, UnsupportedError, UsageError
from horo.torch import _state

__all__ = [
    "Gathered",
    "Request",
    "check_root",
    "check_tensor",
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

_NARROWED = (torch.float32, torch.float64)
"""What can travel as a 16-bit float."""

_ALLREDUCE, _ALLGATHER = _core.OPS["allreduce"], _core.OPS["allgather"]
_BROADCAST, _BARRIER = _core.OPS["broadcast"], _core.OPS["barrier"]
_DTYPES: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in _core.DTYPES.items()}


class Gathered(NamedTuple):
    """One result of an allgather: the rows of all ranks in rank order, and how many each rank gave."""

    tensor: torch.Tensor
    rows: list[int]


class Request:
    """One operation under way. ``wait`` must be called once; it gives the result."""

    __slots__ = ("_finish", "_handle", "_keep", "_session", "label")

    def __init__(
        self, session: _state.Session, handle: int, label: str, keep: Any, finish: Callable[[int], Any]
    ) -> None:
        self._session = session
        self._handle = handle
        self._keep = keep  # memory that the core reads and writes until the request is done
        self._finish = finish
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
            self._session.core.wait(self._handle)
            result = self._finish(self._handle)
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
    tensors: Sequence[torch.Tensor],
    kind: str,
    name: str | None,
    op: int,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire: torch.dtype | None = None,
    in_place: bool = False,
    sync: bool = False,
) -> Request:
    """Begins to reduce ``tensors`` with those of the other ranks, element by element.

    Args:
        tensors: Dense CPU tensors of any shape and strides.
        kind: First part of the name on the wire, "allreduce" or what the user called.
        name: The rest of it; None for an automatic one.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale: Multiplied in before the reduction.
        postscale: Multiplied in after it.
        wire: float16 or bfloat16: what float32 and float64 tensors are rounded to while they travel.
        in_place: Write the results into ``tensors``, else into new contiguous tensors.
        sync: The caller waits at once.

    Returns:
        A request whose result is the tuple of reduced tensors.
    """
    staged = [_stage(tensor, (kind, name), in_place, wire=wire) for tensor in tensors]
    return _start(
        _ALLREDUCE,
        (kind, name),
        staged,
        lambda _: tuple(item.deliver() for item in staged),
        sync=sync,
        reduce_op=op,
        prescale=prescale,
        postscale=postscale,
    )


def run_allreduce(
    tensors: Sequence[torch.Tensor],
    kind: str,
    name: str | None,
    op: int,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire: torch.dtype | None = None,
    in_place: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What ``start_allreduce`` begins, done at once; returns the reduced tensors."""
    staged = [_stage(tensor, (kind, name), in_place, wire=wire) for tensor in tensors]
    _run(_ALLREDUCE, (kind, name), staged, reduce_op=op, prescale=prescale, postscale=postscale)
    return tuple([item.deliver() for item in staged])


def start_broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, kind: str, name: str | None, *, in_place: bool = False
) -> Request:
    """Begins to copy the root's ``tensors`` to all ranks; the result is the tuple of copies.

    Raises:
        UsageError: ``root_rank`` is no rank of the job.
    """
    staged = _stage_broadcast(tensors, root_rank, kind, name, in_place)
    return _start(
        _BROADCAST,
        (kind, name),
        staged,
        lambda _: tuple(item.deliver() for item in staged),
        sync=False,
        root_rank=root_rank,
    )


def run_broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, kind: str, name: str | None, *, in_place: bool = False
) -> tuple[torch.Tensor, ...]:
    """What ``start_broadcast`` begins, done at once; returns the copies."""
    staged = _stage_broadcast(tensors, root_rank, kind, name, in_place)
    _run(_BROADCAST, (kind, name), staged, root_rank=root_rank)
    return tuple([item.deliver() for item in staged])


def _stage_broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, kind: str, name: str | None, in_place: bool
) -> list[_Staged]:
    check_root(root_rank, _describe(kind, name))
    return [_stage(tensor, (kind, name), in_place) for tensor in tensors]


def start_allgather(tensors: Sequence[torch.Tensor], kind: str, name: str | None, *, sync: bool = False) -> Request:
    """Begins to concatenate ``tensors`` of all ranks along their first dimension.

    Returns:
        A request whose result is a tuple of ``Gathered``.

    Raises:
        UsageError: A tensor has no dimension.
    """
    what = _describe(kind, name)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
            raise UsageError(f"{what}: a scalar has no first dimension to gather along; use tensor.reshape(1)")
    staged = [_stage(tensor, (kind, name), False, gather=True) for tensor in tensors]
    core = _state.current().core

    def finish(handle: int) -> tuple[Gathered, ...]:
        return tuple(_take(core, handle, index, item.input) for index, item in enumerate(staged))

    return _start(_ALLGATHER, (kind, name), staged, finish, sync=sync)


def run_barrier() -> None:
    """Waits until all ranks have come here."""
    _run(_BARRIER, ("barrier", None), [])


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


class _Staged:
    """A tensor of the user with the contiguous memory that the core works on."""

    __slots__ = ("input", "output", "wire", "write_back")

    def __init__(self, tensor: torch.Tensor, source: torch.Tensor, output: torch.Tensor, wire: _core.Tensor) -> None:
        self.input = source
        self.output = output
        self.write_back = tensor if output is source and source is not tensor else None
        self.wire = wire

    def deliver(self) -> torch.Tensor:
        """The result; in place, the user's tensor itself, with autograd told that it has changed."""
        if self.write_back is not None:
            with torch.no_grad():
                return self.write_back.copy_(self.output)
        if self.output is self.input and not self.output.is_inference():
            torch.autograd.graph.increment_version(self.output)
        return self.output


def _stage(
    tensor: torch.Tensor,
    named: tuple[str, str | None],
    in_place: bool,
    *,
    gather: bool = False,
    wire: torch.dtype | None = None,
) -> _Staged:
    dtype = check_tensor(tensor, named)
    if in_place and tensor.requires_grad:
        _check_graph(tensor, named)
    if tensor.is_contiguous() and not tensor.is_neg():
        source = tensor
    else:
        if in_place:
            _check_strides(tensor, named)
        source = tensor.detach().resolve_neg().contiguous()
    address = target = source.data_ptr()
    if address == 0 and source.numel() > 0:
        raise UnsupportedError(f"{_describe(*named)}: the tensor ({type(tensor).__name__}) has no memory of its own")
    wire_dtype = 0 if wire is None or tensor.dtype not in _NARROWED else _DTYPES[wire]
    output = source
    if not (in_place or gather):
        output = torch.empty(source.shape, dtype=source.dtype)
        target = output.data_ptr()
    return _Staged(tensor, source, output, _core.Tensor(address, target, source.shape, dtype, wire_dtype))


def check_root(root_rank: int, what: str) -> None:
    """Refuses what is no rank of the job.

    Raises:
        UsageError: ``root_rank`` is not from 0 to size - 1.
    """
    size = _state.size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise UsageError(f"{what}: root_rank {root_rank!r} is not a rank of this job (0 to {size - 1})")


def check_tensor(tensor: torch.Tensor, named: tuple[str, str | None]) -> int:
    """The number of the tensor's dtype in the core.

    Args:
        tensor: What the user gave.
        named: The operation and the name it was given, for a sentence if something is wrong.

    Raises:
        UsageError: Not a tensor.
        UnsupportedError: The core cannot work on such a layout, device or dtype.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{_describe(*named)}: expected a torch.Tensor, not {type(tensor).__name__}")
    number = _DTYPES.get(tensor.dtype)
    if number is not None and tensor.is_cpu and tensor.layout is torch.strided:
        return number
    if tensor.layout is not torch.strided:
        reason = f"{tensor.layout} tensors are not supported here; use tensor.to_dense()"
    elif not tensor.is_cpu:
        reason = f"the tensor is on {tensor.device}; only CPU tensors are supported yet"
    else:
        reason = f"dtype {tensor.dtype} is not supported; use one of {', '.join(_core.DTYPES)}"
    raise UnsupportedError(f"{_describe(*named)}: {reason}")


def _check_graph(tensor: torch.Tensor, named: tuple[str, str | None]) -> None:
    if not tensor.is_leaf and torch.is_grad_enabled():
        raise UsageError(
            f"{_describe(*named)}: autograd cannot follow an in-place operation on a computed tensor that requires "
            "grad; use the form without underscore, or tensor.detach()"
        )


def _check_strides(tensor: torch.Tensor, named: tuple[str, str | None]) -> None:
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and extent > 1 for stride, extent in zip(strides, tensor.shape, strict=True)):
        raise UsageError(f"{_describe(*named)}: an expanded tensor cannot be written in place; use tensor.contiguous()")


def _start(
    op: int,
    named: tuple[str, str | None],
    staged: Sequence[_Staged],
    finish: Callable[[int], Any],
    *,
    sync: bool,
    **values: Any,
) -> Request:
    session = _state.current()
    # Only now, with the arguments checked: a call that is refused here must not count, else ranks drift apart.
    label, transient = session.name(*named)
    wires = [item.wire for item in staged]
    token = session.enter(label)
    try:
        handle = session.core.submit(op, label, wires, sync=sync, transient=transient, **values)
        return Request(session, handle, label, staged, finish)
    finally:
        session.leave(token)


def _run(
    op: int,
    named: tuple[str, str | None],
    staged: Sequence[_Staged],
    *,
    reduce_op: int = 0,
    root_rank: int = 0,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    session = _state.current()
    label, transient = session.name(*named)
    token = session.enter(label)
    # Should a signal handler raise out of the wait, the session goes on holding the memory that the core works on.
    session.held[token] = staged
    try:
        session.core.run(
            op, label, [item.wire for item in staged], reduce_op=reduce_op, root_rank=root_rank, prescale=prescale,
            postscale=postscale, transient=transient,
        )  # fmt: skip
    except HoroError:
        del session.held[token]
        raise
    finally:
        session.leave(token)
    del session.held[token]


def _describe(kind: str, name: str | None) -> str:
    return kind if name is None else f"{kind} {name!r}"


def _take(core: _core.Context, handle: int, index: int, tensor: torch.Tensor) -> Gathered:
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
