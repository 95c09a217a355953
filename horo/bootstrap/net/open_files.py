"""Room for connections under this process's limit of open files."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["make_room", "open_files_max"]

_OPEN_FILES = Path("/proc/self/fd")
_SPARE = 32
"""Descriptors for whatever else the process opens meanwhile."""


def open_files_max() -> int:
    """The number of files that this process may have open now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def make_room(count: int) -> str:
    """Raises the soft limit of open files, as far as that is needed to open ``count`` more.

    Returns:
        A phrase about what is missing, with both numbers; empty: there is room.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ""
    try:
        opened = sum(1 for _ in _OPEN_FILES.iterdir())
    except OSError:  # as when no further file can be opened
        opened = soft
    needed = opened + count + _SPARE
    if soft >= needed:
        return ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):  # more than the hard limit, or a container that refuses it
        return f"{needed} open files, more than this process may have: raise its limit ({hard}, see ulimit -Hn)"
    return ""
