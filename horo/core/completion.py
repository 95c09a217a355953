"""A wait for the first of several requests that ends after a moment, so that others can be waited for, too."""

from __future__ import annotations

from collections.abc import Sequence

from horo.core.binding import ffi, lib
from horo.core.context import Context

__all__ = ["wait_a_moment"]

_MOMENT_MS = 50


def wait_a_moment(context: Context, handles: Sequence[int]) -> None:
    """Blocks, with the GIL released, until one of the requests is done, well or not, but at most for 50 ms."""
    lib.horo_wait_any(context._context, ffi.new("int64_t[]", handles), len(handles), _MOMENT_MS)
