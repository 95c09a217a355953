"""The wire format a second time, from the table in wire.h: what the core must write and read."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

(
    IDS, REQUEST, LOST, LEAVE, BATCH, FAIL, DONE, DATA, RESULT, ROWS, TUNE, BLOCKED, ASK, QUERY, JOINED, MAIL, LATE,
) = range(1, 18)  # fmt: skip
(
    ALLREDUCE, ALLGATHER, BROADCAST, BARRIER, ADD_TEAM, REMOVE_TEAM, REDUCESCATTER, ALLTOALL, JOIN, REDUCE, GATHER,
    SCATTER,
) = range(12)  # fmt: skip
TELL_ROWS = (ALLGATHER, ALLTOALL)
REDUCTIONS = (ALLREDUCE, REDUCESCATTER, REDUCE)
ROOTED = (BROADCAST, REDUCE, GATHER, SCATTER)
MOVE_DATA = (ALLREDUCE, ALLGATHER, REDUCESCATTER, ALLTOALL, *ROOTED)
REDUCE_OPS = (0, 1, 2, 3, 4, 5)
ADASUM = 2
TRANSIENT, BY_NCCL = 2, 256
ERRORS = (*range(-5, 0), -21, -20, *range(-44, -39), -60)
"""Status codes that travel."""
REASONS = range(1, 9)
"""Why a rank is at fault."""
NAME_MAX, DIMS_MAX, TENSORS_MAX = 1023, 64, 1 << 20
ITEM_BYTES = (1, 1, 2, 4, 8, 2, 2, 4, 8, 1)
"""Bytes per element by dtype code."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a request."""

    dtype: int
    shape: tuple[int, ...]
    wire_dtype: int = 0


@dataclass(frozen=True)
class Request:
    """One request as its caller gives it."""

    name: str
    op: int = ALLREDUCE
    reduce_op: int = 0
    transient: bool = False
    on_gpu: bool = False
    root_rank: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    tensors: tuple[Tensor, ...] = ()
    values: tuple[int, ...] = ()
    """Of teams: what their one tensor holds."""


def str16(text: bytes) -> bytes:
    """u16 length and bytes."""
    return struct.pack("<H", len(text)) + text


def tensor(value: Tensor, *, op: int) -> bytes:
    """One tensor; the first extent of what tells rows is written as 0."""
    shape = (0, *value.shape[1:]) if op in TELL_ROWS and value.shape else value.shape
    wire_dtype = value.wire_dtype if op in REDUCTIONS else 0
    return struct.pack(f"<BBB{len(shape)}q", value.dtype, wire_dtype, len(shape), *shape)


def request(value: Request) -> bytes:
    """The canonical form: what means nothing for the operation has its fixed value."""
    reduces = value.op in REDUCTIONS
    head = struct.pack(
        "<BBBidd",
        value.op,
        value.reduce_op if reduces else 0,
        value.transient | (value.on_gpu and value.op in MOVE_DATA) << 1,
        value.root_rank if value.op in ROOTED else 0,
        value.prescale if reduces else 1.0,
        value.postscale if reduces else 1.0,
    )
    tensors = b"".join(tensor(t, op=value.op) for t in value.tensors)
    values = struct.pack(f"<{len(value.values)}i", *value.values)
    return head + str16(value.name.encode()) + struct.pack("<I", len(value.tensors)) + tensors + values


def team_request(op: int, values: Sequence[int]) -> Request:
    """ADD_TEAM of these ranks, or REMOVE_TEAM of the one of this number."""
    return Request("team", op=op, tensors=(Tensor(3, (len(values),)),), values=tuple(values))


def var(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the highest bit says that more follow."""
    return bytes([value & 0x7F | 0x80]) + var(value >> 7) if value >> 7 else bytes([value])


def rows(values: Sequence[int]) -> bytes:
    """The first extents of an allgather."""
    return var(len(values)) + b"".join(map(var, values))


def rows_message(number: int, values: Sequence[int]) -> bytes:
    return struct.pack("<BI", ROWS, number) + rows(values)


def ids_message(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<BI{len(ids)}I", IDS, len(ids), *ids)


def request_message(origin: int, status: int, text: bytes, body: bytes, values: Sequence[int] = ()) -> bytes:
    """REQUEST; body is the canonical form, values are the rows of an allgather."""
    return struct.pack("<Bii", REQUEST, origin, status) + str16(text) + rows(values) + body


def lost_message(rank: int, status: int, reason: int, by: int = 0, text: bytes = b"") -> bytes:
    """LOST, found by a rank; -1 if nobody knows which."""
    return struct.pack("<BiiBi", LOST, rank, status, reason, by) + str16(text)


def data_message(kind: int, number: int, data: bytes) -> bytes:
    return struct.pack("<BII", kind, number, len(data)) + data


def done_message(rank: int) -> bytes:
    return struct.pack("<Bi", DONE, rank)


def joined_message(rank: int, at: int = 0) -> bytes:
    return struct.pack("<BiQ", JOINED, rank, at)


def late_message(rank: int, name: bytes, text: bytes) -> bytes:
    return struct.pack("<Bi", LATE, rank) + str16(name) + str16(text)


def lane(team: int, members: int, executed: int, hashes: Sequence[int]) -> bytes:
    """One lane of BLOCKED."""
    return struct.pack(f"<IIQI{len(hashes)}Q", team, members, executed, len(hashes), *hashes)


def blocked_message(
    rank: int,
    text: bytes,
    others: bytes,
    lanes: Sequence[bytes],
    question: int = 0,
    *,
    moves: Sequence[tuple[int, int, bool]] = (),
    ended: tuple[int, int] = (0, 0),
) -> bytes:
    """BLOCKED; the lanes as ``lane`` makes them, moves as (other rank, tag, is a send), ended: sends and receives."""
    head = struct.pack("<BiI", BLOCKED, rank, question) + str16(text) + str16(others)
    listed = b"".join(struct.pack("<ii?", *move) for move in moves)
    return head + struct.pack("<QQI", *ended, len(listed)) + listed + struct.pack("<I", len(lanes)) + b"".join(lanes)


def ask_message(rank: int) -> bytes:
    return struct.pack("<Bi", ASK, rank)


def query_message(question: int) -> bytes:
    return struct.pack("<BI", QUERY, question)


def tune_message(values: Sequence[int], final: int = 0) -> bytes:
    return struct.pack(f"<BBI{len(values)}Q", TUNE, final, len(values), *values)


def mail_message(
    sender: int,
    receiver: int,
    kind: int,
    data: bytes = b"",
    *,
    dtype: int = 0,
    tag: int = 0,
    status: int = 0,
    send: int = 1,
    count: int = 0,
) -> bytes:
    """MAIL, whose kinds are those of engine/pairs/mail.h."""
    head = struct.pack("<BiiBBiiQQI", MAIL, sender, receiver, kind, dtype, tag, status, send, count, len(data))
    return head + data


def leave_message(rank: int, text: bytes = b"", status: int = -43) -> bytes:
    return struct.pack("<Bii", LEAVE, rank, status) + str16(text)


def fail_message(status: int, name: bytes, text: bytes) -> bytes:
    return struct.pack("<Bi", FAIL, status) + str16(name) + str16(text)


def batch_message(refs: Sequence[tuple[int, bytes]], values: Sequence[int] = ()) -> bytes:
    """BATCH of (id, name), an empty name for a cached tensor, with the rows of an allgather."""
    items = b"".join(struct.pack("<I", i) + str16(n) for i, n in refs)
    return struct.pack("<BI", BATCH, len(refs)) + items + rows(values)


def framed(message: bytes) -> bytes:
    """As it travels, with its length in front."""
    return struct.pack("<I", len(message)) + message


def samples() -> dict[str, bytes]:
    """Small valid messages that between them use every type, operation, dtype and kind of item; names for files."""
    requests = {
        "allreduce": Request("layer.weight", reduce_op=1, prescale=0.5, tensors=(Tensor(7, (64, 128)),)),
        "average": Request("a", tensors=(Tensor(8, ()),)),
        "group": Request("g", reduce_op=4, tensors=tuple(Tensor(d, (d + 1, 2)) for d in range(10))),
        "compressed": Request("c", reduce_op=1, tensors=(Tensor(7, (64,), 6), Tensor(8, (2, 3), 5), Tensor(4, (5,)))),
        "adasum": Request("delta.0", reduce_op=ADASUM, postscale=0.5, tensors=(Tensor(7, (9,), 6), Tensor(8, (2, 3)))),
        "allgather": Request("gather/é", op=ALLGATHER, tensors=(Tensor(4, (9, 3)), Tensor(5, ()))),
        "broadcast": Request("b", op=BROADCAST, root_rank=3, transient=True, tensors=(Tensor(0, (0, 5)),)),
        "by NCCL": Request("n", reduce_op=1, on_gpu=True, tensors=(Tensor(7, (3,)),)),
        "barrier": Request("barrier.0", op=BARRIER),
        "reducescatter": Request("s", op=REDUCESCATTER, reduce_op=3, postscale=2.0, tensors=(Tensor(7, (5, 2), 6),)),
        "alltoall": Request("x", op=ALLTOALL, tensors=(Tensor(1, (7, 2)),)),
        "reduce": Request("r", op=REDUCE, reduce_op=1, root_rank=1, tensors=(Tensor(7, (5,), 6),)),
        "scatter": Request("q", op=SCATTER, root_rank=2, tensors=(Tensor(20, (3,)),)),
        "join": Request("join.noname", op=JOIN, transient=True),
        "add-team": team_request(ADD_TEAM, [0, 2, 5]),
        "remove-team": team_request(REMOVE_TEAM, [3]),
        "many-dims": Request("d", reduce_op=5, tensors=(Tensor(9, (1,) * DIMS_MAX),)),
    }
    result = {f"request-{key}": request_message(1, 0, b"", request(value)) for key, value in requests.items()}
    result |= {
        "request-failed": request_message(0, -3, b"rank 2 sent float32 [1]", request(requests["average"])),
        "ids-none": ids_message([]),
        "ids": ids_message([1, 2, 0xFFFFFFFF]),
        "lost": lost_message(2, -40, 1),
        "lost-last-reason": lost_message(0x7FFFFFFF, -60, REASONS[-1]),
        "leave": leave_message(7),
        "leave-words": leave_message(0, b"SystemExit: 75", -40),
        "done": done_message(7),
        "joined": joined_message(3, 1 << 40),
        "batch-join": batch_message([(0, b"join.noname")], [300]),
        "blocked-joined": blocked_message(1, b"'join.noname'", b"", [lane(0, 2, 9, [0, 5])]),
        "fail": fail_message(-3, b"layer.weight", b"allreduce 'layer.weight': rank 0 and rank 1 disagree"),
        "fail-call": fail_message(-3, b"\0", b"call 1: rank 0 and rank 1 disagree"),
        "request-call": request_message(1, 0, b"", request(Request("\0", reduce_op=1, tensors=(Tensor(7, (4,)),)))),
        "batch-calls": batch_message([(7, b""), (9, b"\0"), (0, b"\0")]),
        "fail-empty": fail_message(-60, b"", b""),
        "batch-none": batch_message([]),
        "batch": batch_message([(1, b""), (2, b"named"), (0, b"uncached")]),
        "request-rows": request_message(1, 0, b"", request(requests["allgather"]), [9, 1 << 40]),
        "request-splits": request_message(0, 0, b"", request(requests["alltoall"]), [3, 0, 4]),
        "batch-rows": batch_message([(1, b"")], [0, 127, 128, 2**63 - 1]),
        "rows": rows_message(4097, [7]),
        "lost-unknown": lost_message(-1, -41, 4),
        "data": data_message(DATA, 4097, b"\0\0\x80?"),
        "result": data_message(RESULT, 0xFFFFFFFF, bytes(300)),
        "lost-with-words": lost_message(3, -40, 7, text=b"ValueError: bad sample"),
        "lost-without-words": lost_message(0x7FFFFFFF, -44, 8),
        "late": late_message(1, b"call 7", b"barrier 'call 7' within the timeout of 1 s"),
        "blocked": blocked_message(2, b"'a' (train.py:12)", b"", [lane(0, 3, 77, [1, 2**64 - 1]), lane(63, 2, 0, [])]),
        "blocked-others": blocked_message(0, b"'a'", b"thread 'Loader'", [lane(0, 1, 1 << 40, [5])]),
        "blocked-answer": blocked_message(1, b"'b'", b"", [lane(0, 2, 9, [7])], 2**32 - 1),
        "blocked-moves": blocked_message(1, b"'r'", b"", [], moves=[(0, 2, False), (-1, 0, False), (3, 1, True)]),
        "ask": ask_message(5),
        "query": query_message(3),
        "blocked-no-more": blocked_message(0x7FFFFFFF, b"", b"", []),
        "tune": tune_message([1 << 20, 1 << 17, 1, 128 << 20, 1 << 16, 0, 2**64 - 1, 2]),
        "tune-final": tune_message([7], 1),
        "mail-offer": mail_message(0, 1, 1, bytes(12), dtype=7, tag=5, count=3),
        "mail-pull": mail_message(1, 0, 2, send=2**64 - 1, count=1 << 40),
        "mail-data": mail_message(3, 0x7FFFFFFF, 3, bytes(range(64)), count=8192),
        "mail-mismatch": mail_message(2, 0, 4, dtype=26, tag=0x7FFFFFFF, status=-3, count=2),
    }
    return result
