"""Values of JSON in few bytes, for what many ranks read from the store."""

from __future__ import annotations

import json
import zlib
from typing import Any

__all__ = ["pack", "unpack"]

_TEXT_BYTES_MAX = 64 << 20


def pack(value: Any) -> bytes:
    """A value of JSON as bytes."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def unpack(data: bytes) -> Any:
    """The value from ``pack``.

    Raises:
        ValueError: ``data`` is anything else, or more than a job has.
    """
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, _TEXT_BYTES_MAX)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from None
    if not stream.eof:
        raise ValueError("cut short, or too long")
    return json.loads(text)
