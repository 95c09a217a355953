"""Wire format: what is written is read back, nothing else is accepted, no bytes make the decoder read outside them."""

import math
import struct
from types import ModuleType
from typing import Any

import pytest
import wire_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from native_build import FLAVOUR
from wire_oracle import Request, Tensor

from horo.core import context

OK, INTERNAL = 0, -60
ROOM_BYTES = 1 << 17
INT64_MAX = 2**63 - 1
SAMPLES = oracle.samples()


class Wire:
    """The shim with Python values."""

    def __init__(self, native: ModuleType) -> None:
        self.lib, self.ffi = native.lib, native.ffi

    def encode_request(self, request: Request) -> bytes:
        shapes = [self.ffi.new("int64_t[]", list(t.shape) or [0]) for t in request.tensors]
        tensors = self.ffi.new("horo_tensor[]", len(request.tensors) + 1)
        for place, tensor, shape in zip(tensors, request.tensors, shapes, strict=False):
            place.shape, place.ndim, place.dtype = shape, len(tensor.shape), tensor.dtype
            place.wire_dtype = tensor.wire_dtype
        values = self.ffi.new("int32_t[]", list(request.values) or [0])
        tensors[0].input = values if request.values else self.ffi.NULL
        name = self.ffi.new("char[]", request.name.encode())
        value = {
            "name": name,
            "flags": oracle.TRANSIENT * request.transient | oracle.BY_NCCL * request.on_gpu,
            "tensors": tensors,
            "tensor_count": len(request.tensors),
            **{field: getattr(request, field) for field in ("op", "reduce_op", "root_rank", "prescale", "postscale")},
        }
        out = self.ffi.new("char[]", ROOM_BYTES)
        size = self.lib.shim_wire_encode_request(self.ffi.new("horo_request *", value), out, ROOM_BYTES)
        assert size >= 0
        return bytes(self.ffi.buffer(out, size))

    def status(self, data: bytes) -> int:
        """Of decoding, everything that was accepted having been walked and encoded again, to the same bytes."""
        status: int = self.lib.shim_wire_probe(self.ffi.from_buffer(data), len(data))
        return status


@pytest.fixture(scope="module")
def wire(native: ModuleType) -> Wire:
    return Wire(native)


def fits(tensor: Tensor, op: int = oracle.ALLREDUCE) -> bool:
    """Empty however large the other extents are; but each row of an allgather fits, whoever has some."""
    row = Tensor(tensor.dtype, tensor.shape[1:])
    return (0 in tensor.shape or math.prod(tensor.shape, start=oracle.ITEM_BYTES[tensor.dtype]) <= INT64_MAX) and (
        op not in oracle.TELL_ROWS or fits(row)
    )


texts = st.binary(max_size=200)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200)
extents = st.one_of(st.integers(0, 5), st.integers(0, INT64_MAX))
shapes = st.lists(extents, max_size=4).map(tuple) | st.integers(0, oracle.DIMS_MAX).map(lambda n: (1,) * n)
plain_tensors = st.builds(Tensor, dtype=st.integers(0, 9), shape=shapes)
narrowed_tensors = st.builds(Tensor, dtype=st.sampled_from([7, 8]), shape=shapes, wire_dtype=st.sampled_from([5, 6]))
tensors = (plain_tensors | narrowed_tensors).filter(fits)
requests = st.builds(
    Request,
    name=names,
    op=st.sampled_from([*range(4), oracle.REDUCESCATTER, oracle.ALLTOALL]),
    reduce_op=st.sampled_from(oracle.REDUCE_OPS),
    transient=st.booleans(),
    on_gpu=st.booleans(),
    root_rank=st.integers(0, 2**31 - 1),
    prescale=st.floats(),
    postscale=st.floats(),
    tensors=st.lists(tensors, max_size=5).map(tuple),
).filter(
    lambda request: (
        all(fits(tensor, request.op) for tensor in request.tensors)
        and (request.op, request.reduce_op) != (oracle.REDUCESCATTER, oracle.ADASUM)
    )
)
ranks = st.integers(0, 2**31 - 1)
errors = st.sampled_from(oracle.ERRORS)
ids = st.integers(1, 2**32 - 1)
rows = st.lists(st.one_of(st.integers(0, 300), st.integers(0, INT64_MAX)), max_size=20)
changes = st.sampled_from([oracle.ADD_TEAM, oracle.REMOVE_TEAM])
requests |= st.builds(oracle.team_request, changes, st.lists(ranks, min_size=1, max_size=40))


@given(request=requests, head=st.tuples(ranks, errors | st.just(OK), texts), values=rows)
def test_a_request_is_written_in_its_canonical_form_and_read_back(
    wire: Wire, request: Request, head: tuple[int, int, bytes], values: list[int]
) -> None:
    body = wire.encode_request(request)
    assert body == oracle.request(request)
    assert wire.status(oracle.request_message(*head, body, values if request.op in oracle.TELL_ROWS else [])) == OK


named_refs = st.tuples(ids, st.just(b"")) | st.tuples(ids | st.just(0), names.map(str.encode))
lanes = st.lists(st.tuples(ranks.filter(bool), st.lists(st.integers(0, 2**64 - 1), max_size=9)), max_size=32).map(
    lambda each: [oracle.lane(2 * i, members, i << 40, hashes) for i, (members, hashes) in enumerate(each)]
)
moves = st.lists(st.tuples(ranks, ranks, st.booleans()) | st.tuples(st.just(-1), ranks, st.just(False)), max_size=9)
ended = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
messages = st.one_of(
    st.builds(oracle.rows_message, ids, rows.filter(bool)),
    st.builds(oracle.ids_message, st.lists(ids, max_size=50)),
    st.builds(oracle.batch_message, st.lists(named_refs, max_size=20), rows),
    st.builds(oracle.lost_message, ranks | st.just(-1), errors, st.sampled_from(oracle.REASONS), ranks | st.just(-1)),
    st.builds(oracle.lost_message, ranks, errors, st.sampled_from(oracle.REASONS), ranks, texts),
    st.builds(oracle.done_message, ranks),
    st.builds(oracle.ask_message, ranks),
    st.builds(oracle.leave_message, ranks, texts, errors),
    st.builds(oracle.query_message, ids),
    st.builds(oracle.late_message, ranks, names.map(str.encode), texts),
    st.builds(
        oracle.tune_message, st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=64), final=st.integers(0, 1)
    ),
    st.builds(oracle.blocked_message, ranks, texts, texts, lanes, ids | st.just(0), moves=moves, ended=ended),
    st.builds(oracle.fail_message, errors, (names | st.just("")).map(str.encode), texts),
    st.builds(oracle.joined_message, ranks, st.integers(0, 2**64 - 1)),
    st.builds(
        oracle.mail_message,
        ranks,
        ranks,
        st.integers(0, 255),
        texts,
        dtype=st.integers(0, 26),
        tag=ranks,
        status=errors | st.just(OK),
        send=st.integers(0, 2**64 - 1),
        count=st.integers(0, 2**64 - 1),
    ),
    st.builds(oracle.data_message, st.sampled_from([oracle.DATA, oracle.RESULT]), ids, texts.filter(bool)),
)


@settings(max_examples=150 if FLAVOUR else 600)
@given(data=messages)
def test_every_message_is_read_and_written_as_the_same_bytes(wire: Wire, data: bytes) -> None:
    assert wire.status(data) == OK


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_cut_message_is_refused_a_changed_one_perhaps_and_none_is_read_past_its_end(wire: Wire, sample: str) -> None:
    """Every prefix and every value of every byte, in blocks that end where the message ends (for a sanitizer)."""
    data = SAMPLES[sample]
    assert (wire.status(data), wire.status(data + b"\0")) == (OK, INTERNAL)
    assert wire.lib.shim_wire_probe_mutants(wire.ffi.from_buffer(data), len(data)) == OK


def request_bytes(request: Request, **changes: tuple[int, str, Any]) -> bytes:
    """A valid request with single fields overwritten: (offset, struct format, value)."""
    data = bytearray(oracle.request(request))
    for offset, layout, value in changes.values():
        struct.pack_into(layout, data, offset, value)
    return oracle.request_message(0, 0, b"", bytes(data))


REDUCE = Request("ab", reduce_op=1, tensors=(Tensor(7, (2, 3)),))
BROADCAST = Request("ab", op=oracle.BROADCAST, root_rank=1, tensors=(Tensor(7, (2, 3)),))
GATHER = Request("ab", op=oracle.ALLGATHER, tensors=(Tensor(7, (2, 3)),))
BARRIER = Request("ab", op=oracle.BARRIER)
ADD = oracle.team_request(oracle.ADD_TEAM, [1, 2, 3])
NAME_AT, COUNT_AT, DTYPE_AT, WIRE_AT, NDIM_AT, EXTENT_AT = 25, 27, 31, 32, 33, 34


NO_MESSAGES = {
    "type 0": b"\0",
    "unknown type": b"\x0e\0\0\0\0",
    "unknown op": request_bytes(REDUCE, op=(0, "<B", 4)),
    "Adasum of a reduce-scatter": request_bytes(REDUCE, op=(0, "<B", 6), reduce_op=(1, "<B", 2)),
    "unknown reduce op": request_bytes(REDUCE, reduce_op=(1, "<B", 9)),
    "flags 4": request_bytes(REDUCE, flags=(2, "<B", 4)),
    "a barrier by NCCL": request_bytes(BARRIER, flags=(2, "<B", 2)),
    "negative root": request_bytes(BROADCAST, root=(3, "<i", -1)),
    "root of an allreduce": request_bytes(REDUCE, root=(3, "<i", 1)),
    "reduce op of a broadcast": request_bytes(BROADCAST, reduce_op=(1, "<B", 1)),
    "factor of a broadcast": request_bytes(BROADCAST, prescale=(7, "<d", 2.0)),
    "rows of an allgather": request_bytes(GATHER, extent=(EXTENT_AT, "<q", 2)),
    "NUL in a name": request_bytes(REDUCE, name=(NAME_AT, "<B", 0)),
    "unknown dtype": request_bytes(REDUCE, dtype=(DTYPE_AT, "<B", 1 + max(context.DTYPES.values()))),
    "float32 as float32": request_bytes(REDUCE, wire=(WIRE_AT, "<B", 7)),
    "float32 as int8": request_bytes(REDUCE, wire=(WIRE_AT, "<B", 1)),
    "int64 as float16": request_bytes(REDUCE, dtype=(DTYPE_AT, "<B", 4), wire=(WIRE_AT, "<B", 5)),
    "float16 as bfloat16": request_bytes(REDUCE, dtype=(DTYPE_AT, "<B", 5), wire=(WIRE_AT, "<B", 6)),
    "a broadcast as float16": request_bytes(BROADCAST, wire=(WIRE_AT, "<B", 5)),
    "one dimension too many": request_bytes(REDUCE, ndim=(NDIM_AT, "<B", 3)),
    "negative extent": request_bytes(REDUCE, extent=(EXTENT_AT, "<q", -1)),
    "2^63 bytes": request_bytes(REDUCE, a=(EXTENT_AT, "<q", 2**60), b=(EXTENT_AT + 8, "<q", 2)),
    "rows of an allgather that are too large": request_bytes(
        GATHER, a=(EXTENT_AT, "<q", 0), b=(EXTENT_AT + 8, "<q", 2**61)
    ),
    "tensors that do not follow": request_bytes(REDUCE, count=(COUNT_AT, "<I", oracle.TENSORS_MAX)),
    "tensor count past the limit": request_bytes(REDUCE, count=(COUNT_AT, "<I", oracle.TENSORS_MAX + 1)),
    "empty name": oracle.request_message(0, 0, b"", oracle.request(Request(""))),
    "long name": oracle.request_message(0, 0, b"", oracle.request(Request("x" * (oracle.NAME_MAX + 1)))),
    "65 dimensions": oracle.request_message(0, 0, b"", oracle.request(Request("x", tensors=(Tensor(0, (1,) * 65),)))),
    "negative origin": oracle.request_message(-1, 0, b"", oracle.request(REDUCE)),
    "request in progress": oracle.request_message(0, 1, b"", oracle.request(REDUCE)),
    "request with an unknown error": oracle.request_message(0, -7, b"", oracle.request(REDUCE)),
    "id 0": oracle.ids_message([1, 0]),
    "too many ids": oracle.ids_message([1] * (oracle.TENSORS_MAX + 1)),
    "reference to nothing": oracle.batch_message([(0, b"")]),
    "long name in a batch": oracle.batch_message([(1, b"x" * (oracle.NAME_MAX + 1))]),
    "NUL in a batch": oracle.batch_message([(1, b"a\0")]),
    "long name in a failure": oracle.fail_message(-1, b"x" * (oracle.NAME_MAX + 1), b""),
    "failure that is none": oracle.fail_message(0, b"x", b""),
    "failure with an unknown error": oracle.fail_message(-(2**31), b"x", b""),
    "loss with an unknown error": oracle.lost_message(1, -59, 1),
    "loss that is none": oracle.lost_message(1, 0, 1),
    "loss of rank -2": oracle.lost_message(-2, -40, 1),
    "loss found by rank -2": oracle.lost_message(1, -40, 1, -2),
    "loss without a reason": oracle.lost_message(1, -40, 0),
    "loss with an unknown reason": oracle.lost_message(1, -40, 9),
    "loss with the digit of a reason": oracle.lost_message(1, -40, ord("1")),
    "negative rank late": oracle.late_message(-1, b"x", b"y"),
    "words of no rank": oracle.lost_message(-1, -40, 7, text=b"x"),
    "negative rank blocked": oracle.blocked_message(-1, b"", b"", []),
    "a send to any rank": oracle.blocked_message(1, b"", b"", [], moves=[(-1, 2, True)]),
    "a receive from rank -2": oracle.blocked_message(1, b"", b"", [], moves=[(-2, 2, False)]),
    "a move with a negative tag": oracle.blocked_message(1, b"", b"", [], moves=[(1, -2, True)]),
    "too many moves": oracle.blocked_message(1, b"", b"", [], moves=[(1, 2, True)] * 7282),
    "lanes out of order": oracle.blocked_message(1, b"", b"", [oracle.lane(t, 1, 0, []) for t in (2, 1)]),
    "a lane twice": oracle.blocked_message(1, b"", b"", [oracle.lane(1, 1, 0, [])] * 2),
    "lane of no team": oracle.blocked_message(1, b"", b"", [oracle.lane(64, 1, 0, [])]),
    "lane without members": oracle.blocked_message(1, b"", b"", [oracle.lane(0, 0, 0, [])]),
    "negative rank asks": oracle.ask_message(-1),
    "a question without a number": oracle.query_message(0),
    "a tuning without values": oracle.tune_message([]),
    "a tuning of too many values": oracle.tune_message([1] * 65),
    "a tuning that is more than final": oracle.tune_message([1], 2),
    "negative rank leaves": oracle.leave_message(-1),
    "leaves with no error": oracle.leave_message(1, b"x", 0),
    "negative rank is done": oracle.done_message(-1),
    "mail of a negative rank": oracle.mail_message(-1, 1, 1),
    "mail to a negative rank": oracle.mail_message(1, -1, 1),
    "mail of an unknown dtype": oracle.mail_message(0, 1, 1, dtype=1 + max(context.DTYPES.values())),
    "mail with a negative tag": oracle.mail_message(0, 1, 1, tag=-1),
    "mail with an unknown error": oracle.mail_message(0, 1, 4, status=-7),
    "too much mail": oracle.mail_message(0, 1, 3, bytes((1 << 13) + 1)),
    "data of no tensor": oracle.data_message(oracle.DATA, 0, b"x"),
    "no data": oracle.data_message(oracle.DATA, 1, b""),
    "too much data": oracle.data_message(oracle.DATA, 1, bytes((1 << 16) + 1)),
    "rows of no tensor": oracle.rows_message(0, [1]),
    "no rows": oracle.rows_message(1, []),
    "more rows than there could be": oracle.rows_message(1, [])[:-1] + oracle.var(2**62),
    "rows of 2^63": oracle.rows_message(1, [2**63]),
    "rows without an end": oracle.rows_message(1, [])[:-1] + b"\1" + b"\xff" * 9,
    "rows in a byte too many": oracle.rows_message(1, [])[:-1] + b"\1\x81\0",
    "a number of rows in a byte too many": oracle.rows_message(1, [])[:-1] + b"\x81\0\1",
    "rows of an allreduce": oracle.request_message(0, 0, b"", oracle.request(REDUCE), [1]),
    "a team without ranks": oracle.request_message(0, 0, b"", oracle.request(oracle.team_request(4, []))),
    "a negative rank of a team": request_bytes(ADD, value=(EXTENT_AT + 12, "<i", -1)),
    "fewer ranks than said": request_bytes(ADD, extent=(EXTENT_AT + 2, "<q", 5)),
    "more ranks than said": request_bytes(ADD, extent=(EXTENT_AT + 2, "<q", 2)),
    "ranks of another dtype": request_bytes(ADD, dtype=(DTYPE_AT + 2, "<B", 2)),
    "ranks in no dimension": request_bytes(ADD, ndim=(NDIM_AT + 2, "<B", 0)),
    "two lists of ranks": request_bytes(ADD, count=(COUNT_AT + 2, "<I", 2)),
    "ranks without a list": request_bytes(ADD, count=(COUNT_AT + 2, "<I", 0)),
    "root of a team": request_bytes(ADD, root=(3, "<i", 1)),
}


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_refused(wire: Wire, data: bytes) -> None:
    assert wire.status(data) == INTERNAL


WITHIN_LIMITS = {
    "2^62 bytes": request_bytes(REDUCE, a=(EXTENT_AT, "<q", 2**60), b=(EXTENT_AT + 8, "<q", 1)),
    "0 elements": request_bytes(REDUCE, a=(EXTENT_AT, "<q", 0), b=(EXTENT_AT + 8, "<q", 2**63 - 1)),
    "0 elements behind many": request_bytes(BROADCAST, a=(EXTENT_AT, "<q", 2**62), b=(EXTENT_AT + 8, "<q", 0)),
    "rows without elements": request_bytes(GATHER, b=(EXTENT_AT + 8, "<q", 0)),
    "longest name and text": oracle.request_message(
        2**31 - 1, -60, b"t" * 65535, oracle.request(Request("x" * oracle.NAME_MAX))
    ),
    "rows in a group": oracle.request_message(0, 0, b"", oracle.request(GATHER), [2**63 - 1] * 70_000),
    "rows of thousands of ranks": oracle.rows_message(1, [*range(20_000)]),
    "most moves": oracle.blocked_message(1, b"", b"", [], moves=[(1, 2, True)] * 7281, ended=(1, 2**64 - 1)),
    "most mail": oracle.mail_message(0, 1, 3, bytes(1 << 13)),
    "most ids": oracle.ids_message([2**32 - 1] * oracle.TENSORS_MAX),
    "longest name in a batch": oracle.batch_message([(2**32 - 1, b"x" * oracle.NAME_MAX)]),
}


@pytest.mark.parametrize("data", WITHIN_LIMITS.values(), ids=WITHIN_LIMITS)
def test_what_is_just_within_the_limits_is_accepted(wire: Wire, data: bytes) -> None:
    assert wire.status(data) == OK


@pytest.mark.parametrize(
    ("tensor", "room", "expected"),
    [
        (Tensor(7, (64, 128), 6), 100, b"float32 [64, 128] as bfloat16"), (Tensor(8, (), 5), 17, b"float64 [] as fl"),
        (Tensor(0, (INT64_MAX,)), 100, b"uint8 [9223372036854775807]"), (Tensor(99, (1,)), 100, b"unknown [1]"),
        (Tensor(7, (64, 128)), 18, b"float32 [64, 128]"), (Tensor(7, (64, 128)), 12, b"float32 [64"),
        (Tensor(7, (64, 128)), 1, b""),
    ],
)  # fmt: skip
def test_a_tensor_is_described_in_words_that_fit(wire: Wire, tensor: Tensor, room: int, expected: bytes) -> None:
    out = wire.ffi.new("char[]", b"#" * 100)
    wire.lib.shim_wire_describe(tensor.dtype, tensor.wire_dtype, len(tensor.shape), list(tensor.shape), out, room)
    assert wire.ffi.string(out) == expected
    assert out[room] == b"#"[0:1] or room > 99
