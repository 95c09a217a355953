"""Length-prefixed frames, each with a MAC over its sequence number: none can be injected, replayed or reordered.

frame   = length (u32) | payload | HMAC-SHA256(key of this direction, sequence (u64) | payload)
fields  = count (u32) | count x (length (u32) | bytes)
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

from horo.bootstrap.auth.handshake import HandshakeError

__all__ = ["PAYLOAD_BYTES_MAX", "Opener", "Sealer", "pack_fields", "unpack_fields"]

PAYLOAD_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct("!I")
_SEQUENCE = struct.Struct("!Q")
_MAC_BYTES = 32


class Sealer:
    """Turns payloads into frames, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, payload: bytes) -> bytes:
        """One frame. ``payload`` has at most ``PAYLOAD_BYTES_MAX`` bytes."""
        mac = hmac.digest(self._key, _SEQUENCE.pack(self._sequence) + payload, "sha256")
        self._sequence += 1
        return b"".join((_LENGTH.pack(len(payload)), payload, mac))


class Opener:
    """Turns a stream of bytes back into payloads and checks each."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes received bytes and returns the payloads that are complete now.

        Raises:
            HandshakeError: a frame is too long or its MAC is wrong; the connection is of no more use.
        """
        self._buffer += data
        payloads = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > PAYLOAD_BYTES_MAX:
                raise HandshakeError(f"a frame of {length} bytes, more than the {PAYLOAD_BYTES_MAX} allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end + _MAC_BYTES:
                break
            payload = bytes(self._buffer[_LENGTH.size : end])
            mac = bytes(self._buffer[end : end + _MAC_BYTES])
            expected = hmac.digest(self._key, _SEQUENCE.pack(self._sequence) + payload, "sha256")
            if not hmac.compare_digest(mac, expected):
                raise HandshakeError("a frame with a wrong authentication code")
            del self._buffer[: end + _MAC_BYTES]
            self._sequence += 1
            payloads.append(payload)
        return payloads


def pack_fields(fields: Sequence[bytes]) -> bytes:
    """Byte strings as one byte string; the inverse of ``unpack_fields``."""
    parts = [_LENGTH.pack(len(fields))]
    for field in fields:
        parts += (_LENGTH.pack(len(field)), field)
    return b"".join(parts)


def unpack_fields(data: bytes) -> list[bytes]:
    """Byte strings from ``pack_fields``.

    Raises:
        ValueError: ``data`` is anything else: lengths beyond its end, or bytes left over.
    """
    if len(data) < _LENGTH.size:
        raise ValueError("fields are cut short")
    (count,) = _LENGTH.unpack_from(data)
    offset = _LENGTH.size
    fields = []
    for _ in range(count):
        if len(data) - offset < _LENGTH.size:
            raise ValueError("fields are cut short")
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        if len(data) - offset < length:
            raise ValueError("a field is cut short")
        fields.append(data[offset : offset + length])
        offset += length
    if offset != len(data):
        raise ValueError("bytes are left over after the last field")
    return fields
