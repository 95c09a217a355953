"""The only module that touches cffi: one Python object around one ``horo_context``."""

from __future__ import annotations

import functools
import itertools
import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from horo._errors import HoroError, error_from_status
from horo._native import ffi, lib
from horo._setup import MpiUse, Setup

__all__ = [
    "DTYPES",
    "EVENTS",
    "OPS",
    "REDUCE_OPS",
    "Context",
    "Event",
    "Slip",
    "Tensor",
    "arena_bytes",
    "native_mpi",
    "simd_name",
    "version",
]

DTYPES: dict[str, int] = {
    name.removeprefix("HORO_").lower(): getattr(lib, name)
    for name in (
        "HORO_UINT8",
        "HORO_INT8",
        "HORO_INT16",
        "HORO_INT32",
        "HORO_INT64",
        "HORO_FLOAT16",
        "HORO_BFLOAT16",
        "HORO_FLOAT32",
        "HORO_FLOAT64",
        "HORO_BOOL",
    )
}
"""Number of each dtype by its torch name (``"float32"``)."""

OPS: dict[str, int] = {
    "allreduce": lib.HORO_ALLREDUCE,
    "allgather": lib.HORO_ALLGATHER,
    "broadcast": lib.HORO_BROADCAST,
    "barrier": lib.HORO_BARRIER,
}

REDUCE_OPS: dict[str, int] = {
    "average": lib.HORO_AVERAGE,
    "sum": lib.HORO_SUM,
    "min": lib.HORO_MIN,
    "max": lib.HORO_MAX,
    "product": lib.HORO_PRODUCT,
}

EVENTS: dict[int, str] = {
    getattr(lib, f"HORO_EVENT_{name.upper()}"): name
    for name in ("submitted", "agreed", "begun", "ended", "failed", "left", "lost")
}
"""Name of each kind of event by its number."""

_OP_NAMES = {number: name for name, number in OPS.items()}
_STATUS_NAMES: dict[int, str] = {getattr(lib, name): name for name in dir(lib) if name.startswith("HORO_ERR_")}


def version() -> str:
    """Version of the native core with its protocol number; ranks must agree on it."""
    return _text(lib.horo_version())


def simd_name() -> str:
    """``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``: what the reductions use on this machine."""
    return _text(lib.horo_simd_name())


def arena_bytes(local_size: int, segment_bytes: int) -> int:
    """Bytes of shared memory that ``local_size`` ranks on one host need."""
    return int(lib.horo_arena_bytes(local_size, segment_bytes))


class Tensor(NamedTuple):
    """One dense, contiguous tensor as the core sees it: addresses, extents, number of the dtype."""

    input: int
    output: int
    shape: tuple[int, ...]
    dtype: int
    wire_dtype: int = 0
    """Number of the dtype that it travels as; 0: its own."""


class Event(NamedTuple):
    """Something that a rank has noted of its work; ``horo_event`` in ``horo.h`` says more."""

    time_ns: int
    """On the clock of ``time.monotonic_ns``."""
    event: str
    """One of ``EVENTS``."""
    op: str
    """One of ``OPS``; empty for the end of the group."""
    name: str
    """Of the request, the end of it where it is long; of a batch, of its first request."""
    bytes: int
    team: int
    number: int
    """Of a batch: its requests; at the end of the group: the rank at fault, or -1."""
    status: str
    """Why a request or the group failed: ``"HORO_ERR_MISMATCH"``; else empty."""


_REQUEST = "P4i2dPi0P"
"""``horo_request``: name, op, reduce_op, root_rank, flags, prescale, postscale, tensors, tensor_count."""
_TENSOR = "PPPiii0P"
"""``horo_tensor``: input, output, shape, ndim, dtype, wire_dtype. Packing is much quicker than filling cdata."""

_LONE_REQUEST = struct.Struct("@" + _REQUEST)
_LONE_TENSOR = struct.Struct("@" + _TENSOR)
_POINTER = struct.Struct("@P")
_TENSOR_WORDS = _LONE_TENSOR.size // _POINTER.size
_TENSORS_AT = _LONE_REQUEST.size
_EXTENTS_AT = _TENSORS_AT + _LONE_TENSOR.size
_DIMS_USUAL, _NAME_USUAL = 8, 64
"""Room in a slip; a tensor with more extents, or a longer name (bytes, with its end), gets memory of its own."""
_NAME_AT = _EXTENTS_AT + 8 * _DIMS_USUAL
_ANSWER_AT = _NAME_AT + _NAME_USUAL
_SLIP_WORDS = (_ANSWER_AT + 8) // 8
_MESSAGE_MAX = lib.HORO_MESSAGE_MAX
_SYNC, _TRANSIENT, _OK = lib.HORO_SUBMIT_SYNC, lib.HORO_SUBMIT_TRANSIENT, lib.HORO_OK
_NULL, _submit, _run, _finish = ffi.NULL, lib.horo_submit, lib.horo_run, lib.horo_finish  # looked up once, not per call


@functools.cache
def _single(ndim: int) -> struct.Struct:
    """A request, its only tensor and the extents of that, one behind the other."""
    return struct.Struct(f"@{_REQUEST}{_TENSOR}{ndim}q")


class Slip:
    """A request as the core reads it, in memory that serves many calls; of one thread at a time."""

    __slots__ = (
        "_address",
        "_kept",
        "_lone_row",
        "_memory",
        "_name_at",
        "_tensors",
        "_view",
        "answer",
        "number",
        "request",
        "rows",
    )

    def __init__(self) -> None:
        self._memory = ffi.new("int64_t[]", _SLIP_WORDS)
        self._address = int(ffi.cast("uintptr_t", self._memory))
        self._view = memoryview(ffi.buffer(self._memory))
        self._lone_row = self.rows = self._view[_TENSORS_AT:_EXTENTS_AT].cast("L")
        """``rows``: words of the tensors, of which the first two of each are its addresses."""
        self._name_at = self._address + _NAME_AT
        self._kept: Any = None  # a long name
        self._tensors: Any = None  # more than one, or one with many extents
        self.request = ffi.cast("horo_request *", self._memory)
        self.answer = ffi.cast("int64_t *", self._address + _ANSWER_AT)
        self.number = self._view[_ANSWER_AT:].cast("q")
        """Its only item is the handle that the last call has answered."""

    @classmethod
    def of(cls, op: int, name: str, tensors: Sequence[Tensor] = (), **options: Any) -> Slip:
        """A request for one call; ``options`` as ``fill`` takes them."""
        slip = cls()
        slip.rename(name)
        slip.fill(op, tensors, **options)
        return slip

    def fill(
        self,
        op: int,
        tensors: Sequence[Tensor],
        *,
        reduce_op: int = 0,
        root_rank: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        sync: bool = False,
        transient: bool = False,
    ) -> None:
        """Writes everything but the name.

        Args:
            op: one of ``OPS``.
            tensors: none for a barrier.
            reduce_op, root_rank, prescale, postscale: as in ``horo_request``.
            sync: the caller waits at once.
            transient: the name will not come again.
        """
        flags = (_SYNC if sync else 0) | (_TRANSIENT if transient else 0)
        address = self._address
        if len(tensors) == 1 and (ndim := len(tensors[0].shape)) <= _DIMS_USUAL:
            source, target, shape, dtype, wire_dtype = tensors[0]
            self.rows = self._lone_row
            _single(ndim).pack_into(
                self._view, 0,
                self._name_at, op, reduce_op, root_rank, flags, prescale, postscale, address + _TENSORS_AT, 1,
                source, target, address + _EXTENTS_AT, ndim, dtype, wire_dtype,
                *shape,
            )  # fmt: skip
            return
        self._tensors = _pack(tensors)
        self.rows = memoryview(ffi.buffer(self._tensors))[: len(tensors) * _LONE_TENSOR.size].cast("L")
        tensors_at = int(ffi.cast("uintptr_t", self._tensors))
        _LONE_REQUEST.pack_into(
            self._view, 0,
            self._name_at, op, reduce_op, root_rank, flags, prescale, postscale, tensors_at, len(tensors),
        )  # fmt: skip

    def rename(self, name: str) -> None:
        """Writes the name, which is equal on all ranks."""
        text = name.encode() + b"\0"
        if len(text) <= _NAME_USUAL:
            self._view[_NAME_AT : _NAME_AT + len(text)] = text
            if self._kept is None:
                return
            self._kept, self._name_at = None, self._address + _NAME_AT
        else:
            self._kept = ffi.from_buffer(text)
            self._name_at = int(ffi.cast("uintptr_t", self._kept))
        _POINTER.pack_into(self._view, 0, self._name_at)

    def point(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Writes other addresses for the tensors that it was filled with, as many as there are."""
        rows = self.rows
        if len(sources) == 1:
            rows[0] = sources[0]
            rows[1] = targets[0]
        else:
            rows[0::_TENSOR_WORDS] = array("L", sources)
            rows[1::_TENSOR_WORDS] = array("L", targets)


def _pack(tensors: Sequence[Tensor]) -> Any:
    """An array of ``horo_tensor``, with the extents of all of them behind it."""
    extents = list(itertools.chain.from_iterable([tensor.shape for tensor in tensors]))
    rows = len(tensors) * _LONE_TENSOR.size
    memory = ffi.new("int64_t[]", rows // 8 + len(extents))
    view = ffi.buffer(memory)
    struct.pack_into(f"@{len(extents)}q", view, rows, *extents)
    extents_at = int(ffi.cast("uintptr_t", memory)) + rows
    packed = []
    for source, target, shape, dtype, wire_dtype in tensors:
        packed.append(_LONE_TENSOR.pack(source, target, extents_at, len(shape), dtype, wire_dtype))
        extents_at += 8 * len(shape)
    view[:rows] = b"".join(packed)
    return memory


class Context:
    """One rank. Thread-safe, except that nothing may run during or after ``destroy``."""

    def __init__(self, setup: Setup) -> None:
        names = [ffi.new("char[]", name.encode()) for name in setup.host_name_of_rank]
        keep: list[Any] = []  # what the pointers in native point to lives until horo_create has copied it
        native = ffi.new("horo_setup *")
        for item in fields(setup):
            value = getattr(setup, item.name)
            if item.name == "host_name_of_rank":
                value = ffi.new("char *[]", names)
            elif item.name in {"host_of_rank", "wake_fds", "life_fds", "control_fds", "data_fds"}:
                value = ffi.new("int32_t[]", list(value)) if value else ffi.NULL
            elif item.name == "arena_memory":
                value = ffi.cast("void *", value)
            elif item.name == "mpi":
                value = ffi.NULL if value is None else native_mpi(value, keep)
            keep.append(value)
            setattr(native, item.name, value)
        out = ffi.new("horo_context **")
        error = _error_buffer()
        _check(lib.horo_create(native, out, error, lib.HORO_MESSAGE_MAX), error)
        self.rank = setup.rank
        self.size = setup.size
        self._context: Any = out[0]
        self._final_counters: dict[str, int] = {}

    def submit(self, slip: Slip) -> int:
        """Hands one request to the core and returns its handle (positive); never blocks.

        The memory of the tensors must stay valid until the handle is done; the slip is free again.

        Raises:
            UsageError, ResourceError, GroupError: as the native core says.
        """
        if _submit(self._context, slip.request, slip.answer, _NULL, 0) != _OK:
            self._submit_again(slip)
        return slip.number[0]

    def run(self, slip: Slip) -> None:
        """``submit`` and ``finish`` in one, and quicker than the two; not for allgather.

        Should a signal handler raise, the request stays under way, and its memory must stay valid.

        Raises:
            HoroError, BaseException: as ``submit`` and ``wait`` do.
        """
        if _run(self._context, slip.request, _SIGNAL_CHECK_MS, slip.answer, _NULL, 0) == _OK:
            return
        if slip.number[0] == 0:
            self._submit_again(slip)
        self.finish(slip.number[0])

    def _submit_again(self, slip: Slip) -> None:
        """Asks for the reason why a request was refused, which has changed nothing. Usual calls have no room for it."""
        error = _error_buffer()
        _check(_submit(self._context, slip.request, slip.answer, error, _MESSAGE_MAX), error)

    def poll(self, handle: int) -> bool:
        """Whether the request is finished, well or badly; never blocks."""
        status = lib.horo_poll(self._context, handle)
        if status == lib.HORO_ERR_USAGE:
            raise error_from_status("HORO_ERR_USAGE", self._message(handle))
        return bool(status != lib.HORO_IN_PROGRESS)

    def wait(self, handle: int) -> None:
        """Blocks, with the GIL released, until the request is finished; a signal handler may run meanwhile.

        The handle stays valid (``release`` it), also when this raises.

        Raises:
            HoroError: what became of the request.
            BaseException: what a signal handler raised (KeyboardInterrupt after Ctrl-C). The request goes on in the
                background, and its memory must stay valid until it is done.
        """
        while True:
            status = lib.horo_wait(self._context, handle, _SIGNAL_CHECK_MS)
            if status == lib.HORO_OK:
                return
            if status != lib.HORO_IN_PROGRESS:
                raise error_from_status(_STATUS_NAMES[status], self._message(handle))

    def finish(self, handle: int) -> None:
        """``wait`` and ``release`` in one, and quicker than the two; not for allgather.

        Raises:
            HoroError: what became of the request, which is released all the same.
            BaseException: what a signal handler raised, as from ``wait``; then the handle stays valid.
        """
        if _finish(self._context, handle, _SIGNAL_CHECK_MS) == _OK:
            return
        try:
            self.wait(handle)
        except HoroError:  # the core's; a signal handler's leaves the request under way
            self.let_go(handle)
            raise
        self.release(handle)

    def release(self, handle: int) -> None:
        """Forgets a finished handle."""
        status = lib.horo_release(self._context, handle)
        if status != lib.HORO_OK:
            raise error_from_status(_STATUS_NAMES[status], self._message(handle))

    def let_go(self, handle: int) -> bool:
        """Releases the handle if its request is finished; never blocks.

        Returns:
            Whether the core is through with the memory: the request is finished, or the handle was released before.
        """
        if self.is_at_work(handle):
            return False
        lib.horo_release(self._context, handle)
        return True

    def is_at_work(self, handle: int) -> bool:
        """Whether the request is not finished yet, so that its memory is the core's; never blocks or raises."""
        return bool(lib.horo_poll(self._context, handle) == lib.HORO_IN_PROGRESS)

    def take_result(self, handle: int, index: int) -> tuple[Any, list[int]]:
        """The gathered tensor ``index`` of a finished allgather.

        Returns:
            A writable buffer over the bytes (they live as long as the buffer) and each rank's first extent.
        """
        data = ffi.new("void **")
        size = ffi.new("int64_t *")
        first_dims = ffi.new("int64_t[]", self.size)
        status = lib.horo_take_result(self._context, handle, index, data, size, first_dims)
        if status != lib.HORO_OK:
            raise error_from_status(_STATUS_NAMES[status], self._message(handle))
        owned = ffi.gc(data[0], lib.horo_free, int(size[0]))
        return ffi.buffer(owned, int(size[0])), list(first_dims)

    def health(self) -> HoroError | None:
        """None while the group is whole, else the error that every request now gets."""
        error = _error_buffer()
        status = lib.horo_health(self._context, error, lib.HORO_MESSAGE_MAX)
        return None if status == lib.HORO_OK else error_from_status(_STATUS_NAMES[status], _text(error))

    def counters(self) -> dict[str, int]:
        """Counts since creation by the names of ``horo_counters``: requests, batches, bytes, link_bytes, sleeps, ...

        After ``destroy`` those of the end.
        """
        if self._context == _NULL:
            return dict(self._final_counters)
        native = ffi.new("horo_counters *")
        lib.horo_read_counters(self._context, native)
        return {name: int(getattr(native, name)) for name, _ in ffi.typeof("horo_counters").fields or ()}

    def events(self) -> list[Event]:
        """What this rank has noted last, the oldest first: some hundred events. Any thread; waits for nobody.

        Raises:
            UsageError: after ``destroy``, or in a forked child.
        """
        native = ffi.new("horo_event[]", lib.HORO_EVENTS_MAX)
        count = lib.horo_read_events(self._context, native, lib.HORO_EVENTS_MAX)
        if count < 0:
            raise error_from_status(_STATUS_NAMES[count], self._message(0))
        return [_event(native[i]) for i in range(count)]

    def after_fork(self) -> None:
        """In a forked child: lets go of the parent's descriptors; every later call raises UsageError."""
        if self._context != ffi.NULL:
            lib.horo_after_fork(self._context)

    def destroy(self) -> None:
        """Leaves the group and frees everything; idempotent."""
        self._final_counters = self.counters()
        context, self._context = self._context, ffi.NULL
        lib.horo_destroy(context)

    def _message(self, handle: int) -> str:
        error = _error_buffer()
        lib.horo_error(self._context, handle, error, lib.HORO_MESSAGE_MAX)
        return _text(error)


def _event(native: Any) -> Event:
    return Event(
        native.time_ns,
        EVENTS[native.event],
        _OP_NAMES.get(native.op, ""),
        _text(native.name),
        native.bytes,
        native.team,
        native.number,
        _STATUS_NAMES.get(native.status, ""),
    )


def native_mpi(use: MpiUse, keep: list[Any], ffi: Any = ffi) -> Any:
    """A ``horo_mpi`` made by ``ffi``; what it points to is put into ``keep``."""
    native = ffi.new("horo_mpi *")
    calls = use.calls
    native.handle_bytes, native.status_bytes = calls.handle_bytes, calls.status_bytes
    native.rank, native.size = calls.rank, calls.size
    native.message_bytes = use.message_bytes
    native.is_transport, native.is_backend = use.transport, use.collectives
    native.communicator, native.in_place = calls.communicator, calls.in_place
    native.functions, native.handles = list(calls.functions), list(calls.handles)
    for name in ("rank_of_host", "send_tags", "recv_tags"):
        values = getattr(use, name)
        if values:
            keep.append(ffi.new("int32_t[]", list(values)))
            setattr(native, name, keep[-1])
    return native


_SIGNAL_CHECK_MS = 100


def _error_buffer() -> Any:
    return ffi.new("char[]", lib.HORO_MESSAGE_MAX)


def _text(chars: Any) -> str:
    return bytes(ffi.string(chars)).decode("utf-8", "replace")


def _check(status: int, error: Any) -> None:
    if status != lib.HORO_OK:
        raise error_from_status(_STATUS_NAMES[status], _text(error))
