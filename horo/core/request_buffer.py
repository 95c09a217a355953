"""Requests in the layout that the core reads: numbers of operations and dtypes, a request's buffer and results."""

from __future__ import annotations

import functools
import itertools
import struct
import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from horo.core.binding import ffi, lib
from horo.core.words import check, error_buffer

__all__ = ["DTYPES", "OPS", "OP_NAMES", "REDUCE_OPS", "RequestBuffer", "TakenResult", "Tensor", "Words", "pack"]

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
        "HORO_UINT16",
        "HORO_UINT32",
        "HORO_UINT64",
        "HORO_COMPLEX32",
        "HORO_COMPLEX64",
        "HORO_COMPLEX128",
        "HORO_FLOAT8_E4M3FN",
        "HORO_FLOAT8_E5M2",
        "HORO_FLOAT8_E4M3FNUZ",
        "HORO_FLOAT8_E5M2FNUZ",
        "HORO_FLOAT8_E8M0FNU",
        "HORO_FLOAT4_E2M1FN_X2",
        "HORO_BITS8",
        "HORO_BITS16",
        "HORO_BITS1X8",
        "HORO_BITS2X4",
        "HORO_BITS4X2",
    )
}
"""Number of each dtype by its torch name (``"float32"``); not every torch has all of them."""

OPS: dict[str, int] = {
    "allreduce": lib.HORO_ALLREDUCE,
    "allgather": lib.HORO_ALLGATHER,
    "broadcast": lib.HORO_BROADCAST,
    "barrier": lib.HORO_BARRIER,
    "reducescatter": lib.HORO_REDUCESCATTER,
    "alltoall": lib.HORO_ALLTOALL,
    "reduce": lib.HORO_REDUCE,
    "gather": lib.HORO_GATHER,
    "scatter": lib.HORO_SCATTER,
    "send": lib.HORO_SEND,
    "receive": lib.HORO_RECEIVE,
}
"""Number of each operation on tensors by its name."""

OP_NAMES: dict[int, str] = {number: name for name, number in OPS.items()}
OP_NAMES |= {lib.HORO_ADD_TEAM: "add_process_set", lib.HORO_REMOVE_TEAM: "remove_process_set", lib.HORO_JOIN: "join"}
"""Name of each operation by its number."""

REDUCE_OPS: dict[str, int] = {
    "average": lib.HORO_AVERAGE,
    "sum": lib.HORO_SUM,
    "adasum": lib.HORO_ADASUM,
    "min": lib.HORO_MIN,
    "max": lib.HORO_MAX,
    "product": lib.HORO_PRODUCT,
    "band": lib.HORO_BAND,
    "bor": lib.HORO_BOR,
    "bxor": lib.HORO_BXOR,
}


class Tensor(NamedTuple):
    """One dense, contiguous tensor as the core sees it: addresses, extents, number of the dtype."""

    input: int
    output: int
    shape: tuple[int, ...]
    dtype: int
    wire_dtype: int = 0
    """Number of the dtype in which it is sent; 0: its own."""
    output_bytes: int = 0
    """Bytes of the output, for an allgather or alltoall into its outputs only."""
    splits: tuple[int, ...] = ()
    """For an alltoall: rows of the input for each member of the team, one behind the other, all rows together."""


_REQUEST = "P4i2dP4iQ"
"""``horo_request``: name, op, reduce_op, root_rank, flags, scales, tensors, count, team, device, timeout, stream."""
_TENSOR = "PPPiiiiqP"
"""``horo_tensor``: input, output, shape, ndim, dtype, wire_dtype, split_count, output_bytes, splits.

Packing is much quicker than filling cdata.
"""

_LONE_REQUEST = struct.Struct("@" + _REQUEST)
_LONE_TENSOR = struct.Struct("@" + _TENSOR)
_POINTER = struct.Struct("@P")
_TENSOR_WORDS = _LONE_TENSOR.size // _POINTER.size
_TENSORS_AT = _LONE_REQUEST.size
_EXTENTS_AT = _TENSORS_AT + _LONE_TENSOR.size
_DIMS_USUAL, _NAME_USUAL = 8, 64
"""Room in a request buffer. A tensor with more extents or a longer name (bytes with its end) gets memory of its own."""
_NAME_AT = _EXTENTS_AT + 8 * _DIMS_USUAL
_HANDLE_AT = _NAME_AT + _NAME_USUAL
_BUFFER_WORDS = (_HANDLE_AT + 8) // 8
_SYNC, _TRANSIENT = lib.HORO_SUBMIT_SYNC, lib.HORO_SUBMIT_TRANSIENT
_INTO, _OFFER, _ORDERED = lib.HORO_SUBMIT_INTO, lib.HORO_SUBMIT_OFFER, lib.HORO_SUBMIT_ORDERED


@functools.cache
def _single(ndim: int) -> struct.Struct:
    """A request, its only tensor and the tensor's extents, one after the other."""
    return struct.Struct(f"@{_REQUEST}{_TENSOR}{ndim}q")


class RequestBuffer:
    """A request in the layout that the core reads. Many calls can use one buffer, one thread at a time."""

    __slots__ = (
        "_address",
        "_lone_row",
        "_long_name",
        "_memory",
        "_name_at",
        "_tensors",
        "_view",
        "handle_out",
        "last_handle",
        "offers",
        "request",
        "rows",
    )

    def __init__(self) -> None:
        self._memory = ffi.new("int64_t[]", _BUFFER_WORDS)
        self._address = int(ffi.cast("uintptr_t", self._memory))
        self._view = memoryview(ffi.buffer(self._memory))
        self._lone_row = self.rows = self._view[_TENSORS_AT:_EXTENTS_AT].cast("L")
        """``rows``: the words of all tensors. The first two words of each tensor are its addresses."""
        self._name_at = self._address + _NAME_AT
        self._long_name: Any = None  # memory of a long name
        self._tensors: Any = None  # memory of several tensors, or of one with many extents
        self.request = ffi.cast("horo_request *", self._memory)
        self.handle_out = ffi.cast("int64_t *", self._address + _HANDLE_AT)
        self.last_handle = self._view[_HANDLE_AT:].cast("q")
        """Its only item is the handle that the core wrote in the last call."""
        self.offers = False
        """As the argument of ``fill``."""

    def places(self) -> tuple[int, int]:
        """The addresses of the request, and of the handle that the core writes."""
        return self._address, self._address + _HANDLE_AT

    @classmethod
    def of(cls, op: int, name: str | None, tensors: Sequence[Tensor] = (), **options: Any) -> RequestBuffer:
        """A request for one call; ``options`` as ``fill`` takes them."""
        buffer = cls()
        buffer.set_name(name)
        buffer.fill(op, tensors, **options)
        return buffer

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
        into: bool = False,
        offers: bool = False,
        team: int = 0,
        device: int = 0,
        stream: int = 0,
        timeout_ms: int = 0,
    ) -> None:
        """Writes everything but the name.

        Args:
            op: one of ``OPS``.
            tensors: none for a barrier.
            reduce_op, root_rank, prescale, postscale: as in ``horo_request``.
            sync: the caller waits at once.
            transient: no later request has this name.
            into: for an allgather: its results go into the outputs of its tensors, of ``output_bytes`` each.
            offers: the same, but a result of another size goes into memory of the core.
            team: number of the team from ``Context.add_team`` whose members take part; 0: all ranks.
            device: 0: tensors in host memory; n + 1: in that of GPU n.
            stream: of that GPU: the CUDA stream behind whose work the values are taken.
            timeout_ms: where it is not done by then, the group ends with TimeoutError on all ranks; 0: never.
        """
        flags = (_SYNC if sync else 0) | (_TRANSIENT if transient else 0)
        flags |= (_INTO if into else 0) | (_OFFER if offers else 0) | (0 if self._name_at else _ORDERED)
        self.offers = offers
        address = self._address
        if len(tensors) == 1 and (ndim := len(tensors[0].shape)) <= _DIMS_USUAL and not tensors[0].splits:
            source, target, shape, dtype, wire_dtype, output_bytes, _ = tensors[0]
            self.rows = self._lone_row
            _single(ndim).pack_into(
                self._view, 0,
                self._name_at, op, reduce_op, root_rank, flags, prescale, postscale, address + _TENSORS_AT, 1, team,
                device, timeout_ms, stream,
                source, target, address + _EXTENTS_AT, ndim, dtype, wire_dtype, 0, output_bytes, 0,
                *shape,
            )  # fmt: skip
            return
        self._tensors = pack(tensors)
        self.rows = memoryview(ffi.buffer(self._tensors))[: len(tensors) * _LONE_TENSOR.size].cast("L")
        tensors_at = int(ffi.cast("uintptr_t", self._tensors))
        _LONE_REQUEST.pack_into(
            self._view, 0,
            self._name_at, op, reduce_op, root_rank, flags, prescale, postscale, tensors_at, len(tensors), team,
            device, timeout_ms, stream,
        )  # fmt: skip

    def set_name(self, name: str | None) -> None:
        """Writes the name, equal on all ranks; None, in front of ``fill``: the call is matched by its number."""
        if name is None:
            self._long_name, self._name_at = None, 0
            _POINTER.pack_into(self._view, 0, 0)
            return
        text = name.encode() + b"\0"
        if len(text) <= _NAME_USUAL:
            self._view[_NAME_AT : _NAME_AT + len(text)] = text
            if self._long_name is None and self._name_at:
                return
            self._long_name, self._name_at = None, self._address + _NAME_AT
        else:
            self._long_name = ffi.from_buffer(text)
            self._name_at = int(ffi.cast("uintptr_t", self._long_name))
        _POINTER.pack_into(self._view, 0, self._name_at)

    def name(self) -> str:
        """The name that the core reads."""
        return bytes(ffi.string(self.request.name)).decode()

    def check(self) -> None:
        """Raises UsageError or UnsupportedError where a job of any size refuses it; it is not submitted."""
        error = error_buffer()
        check(lib.horo_submit(ffi.NULL, self.request, self.handle_out, error, lib.HORO_MESSAGE_MAX), error)

    def set_addresses(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Replaces the addresses of all tensors."""
        rows = self.rows
        if len(sources) == 1:
            rows[0] = sources[0]
            rows[1] = targets[0]
        else:
            rows[0::_TENSOR_WORDS] = array("L", sources)
            rows[1::_TENSOR_WORDS] = array("L", targets)


def pack(tensors: Sequence[Tensor]) -> Any:
    """An array of ``horo_tensor``, with the extents of all of them behind it, and the splits of each behind its own."""
    extents = list(itertools.chain.from_iterable([(*tensor.shape, *tensor.splits) for tensor in tensors]))
    rows = len(tensors) * _LONE_TENSOR.size
    memory = ffi.new("int64_t[]", rows // 8 + len(extents))
    view = ffi.buffer(memory)
    struct.pack_into(f"@{len(extents)}q", view, rows, *extents)
    extents_at = int(ffi.cast("uintptr_t", memory)) + rows
    packed = []
    for source, target, shape, dtype, wire_dtype, output_bytes, splits in tensors:
        splits_at = extents_at + 8 * len(shape)
        packed.append(
            _LONE_TENSOR.pack(
                source, target, extents_at, len(shape), dtype, wire_dtype, len(splits), output_bytes, splits_at
            )
        )
        extents_at = splits_at + 8 * len(splits)
    view[:rows] = b"".join(packed)
    return memory


class TakenResult:
    """A gathered tensor as the core returns it: memory that the caller frees, and the number of rows of each member.

    An exception of a signal handler may come between any two calls in Python. So the object that frees the memory
    exists before the core hands the memory over, and a second call returns the same.
    """

    __slots__ = ("bytes", "data", "first_dims")

    def __init__(self, size: int) -> None:
        """``size``: most members that a team has."""
        self.data = ffi.gc(ffi.new("void **"), _free_target)
        self.bytes = ffi.new("int64_t *")
        self.first_dims = ffi.new("int64_t[]", [-1] * size)

    def is_there(self) -> bool:
        """Whether the core has given it."""
        return bool(self.first_dims[0] >= 0)

    def extents(self) -> list[int]:
        """The first extent of each member."""
        return [rows for rows in self.first_dims if rows >= 0]

    def buffer(self) -> Any:
        """A writable buffer over the bytes, which live as long as it does; None if they are in the tensor's output."""
        if self.data[0] == ffi.NULL:
            return None
        kept = ffi.gc(self.data[0], functools.partial(_keep, self.data), self.bytes[0])
        return ffi.buffer(kept, self.bytes[0])


class Words(threading.local):
    """The sentence of the error of a thread's last wait: the core writes it while nobody can release the request."""

    def __init__(self) -> None:
        self.chars = ffi.new("char[]", lib.HORO_MESSAGE_MAX)


def _free_target(pointer: Any, free: Any = lib.horo_free) -> None:  # at the end of Python, `lib` may be gone first
    free(pointer[0])


def _keep(_data: Any, _pointer: Any) -> None:
    """Refers to the first one as long as the second one lives."""
