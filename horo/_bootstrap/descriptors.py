"""Shared memory and wake-up descriptors of a host, and the closing of descriptors after an error."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from horo.errors import ResourceError

if TYPE_CHECKING:
    from horo._setup import Setup

__all__ = ["close_all", "close_setup", "create_memory", "create_wake", "setup_descriptors"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def create_memory(byte_count: int) -> int:
    """A close-on-exec memfd of ``byte_count`` zero bytes. It cannot be resized, and it has no name: the kernel frees it
    when its last descriptor is closed.

    Raises:
        ResourceError: the kernel gives no memory or descriptor.
    """
    try:
        memory = os.memfd_create("horo-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ResourceError(f"cannot create shared memory: {error.strerror}") from error
    try:
        os.ftruncate(memory, byte_count)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(memory)
        raise ResourceError(f"cannot create {byte_count} bytes of shared memory: {error.strerror}") from error
    return memory


def create_wake() -> int:
    """A nonblocking, close-on-exec eventfd at zero."""
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise ResourceError(f"cannot create an eventfd: {error.strerror}") from error


def setup_descriptors(setup: Setup) -> list[int]:
    """All open descriptors that ``setup`` would hand over."""
    numbers = [setup.arena_fd, *setup.wake_fds, *setup.life_fds, *setup.control_fds, *setup.data_fds]
    return [number for number in numbers if number >= 0]


def close_setup(setup: Setup) -> None:
    """Closes what no context has taken over."""
    close_all(setup_descriptors(setup))


def close_all(numbers: Iterable[int]) -> None:
    """Closes descriptors; those closed already are ignored."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)
