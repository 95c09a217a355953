"""The closing of descriptors after an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horo._core_setup import Setup

__all__ = ["close_all", "close_setup", "setup_descriptors"]


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
