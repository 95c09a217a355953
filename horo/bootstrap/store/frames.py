"""Messages between the store's clients and its server: payloads of frames."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from horo.bootstrap.auth.frames import unpack_fields
from horo.errors import UsageError

__all__ = [
    "INT64",
    "KEY_BYTES_MAX",
    "RECEIVE_BYTES",
    "VALUE_BYTES_MAX",
    "WAIT_S_MAX",
    "StoreReply",
    "StoreRequest",
    "encode_key",
    "read_request",
]

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 8 << 20
WAIT_S_MAX = 1e6
RECEIVE_BYTES = 1 << 16
"""Most bytes that are read from a connection at once."""
INT64 = struct.Struct("!q")


class StoreRequest(IntEnum):
    """First byte of a client's message."""

    SET = 1
    GET = 2
    ADD = 3
    DELETE = 4
    ON_DISCONNECT = 5


class StoreReply(IntEnum):
    """First byte of the answer."""

    OK = 0
    TIMEOUT = 1
    ABANDONED = 2
    REFUSED = 3


def encode_key(key: str) -> bytes:
    """A key in the form of the server; raises UsageError for one that is empty or too long."""
    encoded = key.encode()
    if not 0 < len(encoded) <= KEY_BYTES_MAX:
        raise UsageError(f"a key of the store has 1 to {KEY_BYTES_MAX} bytes, {key[:64]!r} has {len(encoded)}")
    return encoded


def read_request(payload: bytes) -> tuple[StoreRequest, list[bytes]]:
    """Decodes a client's request and its fields, and checks their number and lengths.

    Raises:
        ValueError: it is no request of this protocol.
    """
    request = StoreRequest(payload[0] if payload else 0)
    fields = unpack_fields(payload[1:])
    if request is StoreRequest.SET or (request is StoreRequest.ON_DISCONNECT and fields):
        _check(len(fields) == 2 and len(fields[1]) <= VALUE_BYTES_MAX)
        _check_keys(fields[:1])
    elif request is StoreRequest.ADD:
        _check(len(fields) == 2 and len(fields[1]) == INT64.size)
        _check_keys(fields[:1])
    elif request is StoreRequest.GET:
        _check(len(fields) >= 2 and len(fields[0]) == INT64.size and len(fields[1]) <= KEY_BYTES_MAX)
        _check_keys(fields[2:])
    else:
        _check_keys(fields)
    return request, fields


def _check_keys(keys: Sequence[bytes]) -> None:
    _check(all(0 < len(key) <= KEY_BYTES_MAX for key in keys))


def _check(valid: bool) -> None:
    if not valid:
        raise ValueError("the fields are not those of the request")
