"""Messages between the store's clients and its server: payloads of frames."""

from __future__ import annotations

import struct
from enum import IntEnum

from horo.errors import UsageError

__all__ = [
    "INT64",
    "KEY_BYTES_MAX",
    "RECEIVE_BYTES",
    "VALUE_BYTES_MAX",
    "WAIT_S_MAX",
    "Reply",
    "Request",
    "encode_key",
]

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 8 << 20
WAIT_S_MAX = 1e6
RECEIVE_BYTES = 1 << 16
"""Taken from a connection at once."""
INT64 = struct.Struct("!q")


class Request(IntEnum):
    """First byte of a client's message."""

    SET = 1
    GET = 2
    ADD = 3
    DELETE = 4
    ON_DISCONNECT = 5


class Reply(IntEnum):
    """First byte of the answer."""

    OK = 0
    TIMEOUT = 1
    ABANDONED = 2
    REFUSED = 3


def encode_key(key: str) -> bytes:
    """A key as the server holds it; raises UsageError for one that is empty or too long."""
    encoded = key.encode()
    if not 0 < len(encoded) <= KEY_BYTES_MAX:
        raise UsageError(f"a key of the store has 1 to {KEY_BYTES_MAX} bytes, {key[:64]!r} has {len(encoded)}")
    return encoded
