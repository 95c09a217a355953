"""Descriptors that a process inherits, with the words in its environment by which it knows them again."""

from __future__ import annotations

import contextlib
import os

__all__ = ["inherited", "words_of"]


def words_of(fd: int) -> str:
    """The value of the variable for a process that inherits ``fd`` under this number: it and its inode."""
    return f"{fd}:{os.fstat(fd).st_ino}"


def inherited(words: str | None) -> int | None:
    """The descriptor that ``words_of`` describes, closed by ``exec`` from now on; None: it is not there.

    A program between the agent and this process may have closed it, and its number may be that of another file.
    """
    fd, _, inode = (words or "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(fd)).st_ino == int(inode):
            os.set_inheritable(int(fd), False)
            return int(fd)
    return None
