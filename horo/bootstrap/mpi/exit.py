"""Handles the end of a process under MPI: if ``MPI_Finalize`` would wait for ever, ``MPI_Abort`` ends the job.

mpi4py calls ``MPI_Finalize`` after all exit handlers of Python, and ``MPI_Finalize`` waits for all ranks. The handler
that is registered here runs before it, and acts if a rank of the job is lost or this one ends with an exception. Then
not all ranks would call ``MPI_Finalize``, and the job would hang without a message.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from horo.errors import HoroError

__all__ = ["note_status", "watch_end", "watch_exit", "watch_loss"]

_FLUSH_PAUSE_S = 0.3
"""Time from the last message of a rank to ``MPI_Abort``: mpirun may lose output that arrives together with that."""
_AFTER_LOSS_S = 2.0
"""The same where another rank is lost. mpirun has mostly detected that, or been asked by that rank, and ends the job in
this time, on a busy host too; after a second request to end, the mpirun of Open MPI 5.0 sometimes never ends."""

_loss_finders: list[Callable[[], HoroError | None]] = []
_statuses = [1]
"""The last one is the exit code that the job gets."""


@cache
def watch_exit(mpi: Any) -> None:
    """Registers the exit handler of this process.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """
    atexit.register(_end, mpi, os.getpid())


@cache
def watch_end(mpi: Any, close: Callable[[], None]) -> None:
    """Registers ``close``, which is called if the script finalizes MPI while horo still uses it.

    Args:
        mpi: the module ``mpi4py.MPI``.
        close: ends all use of MPI; idempotent.
    """
    # MPI_Finalize first frees COMM_SELF and so deletes its attributes: the standard's hook for this purpose.
    keyval = mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: close())
    mpi.COMM_SELF.Set_attr(keyval, True)


def watch_loss(find_loss: Callable[[], HoroError | None]) -> None:
    """Registers ``find_loss``, which the exit handler calls; it returns the error of a lost peer, or None."""
    if find_loss not in _loss_finders:
        _loss_finders.append(find_loss)


def note_status(status: int) -> None:
    """Notes the exit code with which an exception ends this rank."""
    _statuses.append(status)


def _end(mpi: Any, pid: int) -> None:
    if os.getpid() != pid or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return
    losses = [loss for loss in (find() for find in _loss_finders) if loss is not None]
    crash: BaseException | None = getattr(sys, "last_value", None)
    if losses:
        reason = f"{losses[0]}; ending the job through MPI_Abort, since MPI_Finalize would wait for it for ever"
    elif crash is not None:
        reason = f"this rank ends with an uncaught {type(crash).__name__}; ending the job through MPI_Abort"
    else:
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"horo [{mpi.COMM_WORLD.Get_rank()}] error: {reason}\n")
        sys.stderr.flush()
    time.sleep(_AFTER_LOSS_S if losses else _FLUSH_PAUSE_S)
    mpi.COMM_WORLD.Abort(_statuses[-1] or 1)
