"""The memory that the ranks of a host share, and descriptors by which they wake one another."""

from __future__ import annotations

from horo.core.binding import ffi, lib
from horo.core.words import check, error_buffer

__all__ = ["arena_bytes", "create_memory", "create_wake"]


def arena_bytes(local_size: int, segment_bytes: int, teams: int = 1) -> int:
    """Bytes of shared memory that ``local_size`` ranks on one host need; a memfd grows with teams beyond the first."""
    return int(lib.horo_arena_bytes(local_size, segment_bytes, teams))


def create_memory(byte_count: int) -> int:
    """A close-on-exec memfd of ``byte_count`` zero bytes, which cannot shrink.

    It has no name: the kernel frees it when its last descriptor is closed.

    Raises:
        ResourceError: the kernel gives no memory or descriptor.
    """
    out, error = ffi.new("int32_t *"), error_buffer()
    check(lib.horo_create_memory(byte_count, out, error, lib.HORO_MESSAGE_MAX), error)
    return int(out[0])


def create_wake() -> int:
    """A nonblocking, close-on-exec eventfd at zero.

    Raises:
        ResourceError: the kernel gives no descriptor.
    """
    out, error = ffi.new("int32_t *"), error_buffer()
    check(lib.horo_create_wake(out, error, lib.HORO_MESSAGE_MAX), error)
    return int(out[0])
