"""Errors and texts of the core, as Python has them."""

from __future__ import annotations

import re
from typing import Any

from horo.core.binding import ffi, lib
from horo.errors import error_from_status

__all__ = ["STATUS_NAMES", "as_words", "check", "error_buffer", "text_of"]

_OF_OBJECTS = re.compile(r"\b((?:allgather|broadcast)_object)-header\.(hvd\.shard)?")
"""The begin of a name of the first exchange of a call."""
STATUS_NAMES: dict[int, str] = {getattr(lib, name): name for name in dir(lib) if name.startswith("HORO_ERR_")}
"""Name of each status code of the core."""


def error_buffer() -> Any:
    """Room for the sentence of an error."""
    return ffi.new("char[]", lib.HORO_MESSAGE_MAX)


def as_words(text: str) -> bytes:
    """A text for the core: in UTF-8, and without what would end it."""
    return text.encode("utf-8", "replace").replace(b"\0", b" ")


def text_of(chars: Any) -> str:
    """A text of the core; calls have the names there that their user knows."""
    text = bytes(ffi.string(chars)).decode("utf-8", "replace")
    return _OF_OBJECTS.sub(lambda found: found[2] or f"{found[1]}.", text) if "_object-header." in text else text


def check(status: int, error: Any, is_told: bool = False) -> None:
    """Raises the error of a status, with the sentence in the buffer ``error``; returns where there is none."""
    if status != lib.HORO_OK:
        raise error_from_status(STATUS_NAMES[status], text_of(error), is_told)
