"""Likely mistakes of a user: input that no rank reads, and a hororun that is a rank itself."""

from __future__ import annotations

import array
import fcntl
import os
import stat
import termios
from collections.abc import Mapping

__all__ = ["outer_rank", "unread_input"]


def unread_input() -> bool:
    """Whether stdin is a pipe or a file with something in it."""
    try:
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            return status.st_size > os.lseek(0, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(status.st_mode):
            return False
        waiting = array.array("i", [0])
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    except OSError:
        return False
    return waiting[0] > 0


def outer_rank(environment: Mapping[str, str]) -> str:
    """Which rank of another hororun's job this process is, in words; empty: none."""
    if "HORO_JOB_ID" not in environment or "HOROVOD_RANK" not in environment:
        return ""
    return f"rank {environment['HOROVOD_RANK']} of another hororun's job"
