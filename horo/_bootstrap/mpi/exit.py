"""The end of a process under MPI: if ``MPI_Finalize`` would wait for ever, ``MPI_Abort`` ends the job.

mpi4py finalizes MPI after everything that Python runs at exit, and that waits for all ranks. So what is registered here
runs before, and steps in where a rank of the job is gone or this one ends with an exception: then some rank will not
come, and the job would hang without a message.
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

__all__ = ["watch_end", "watch_exit", "watch_loss"]

_FLUSH_PAUSE_S = 0.3
"""From the last message of a rank to ``MPI_Abort``. mpirun may lose output that comes together with the abort. And if
mpirun has seen a process die, it ends the job by itself in this time; after a second request to end, Open MPI 5.0's
sometimes never does."""

_loss_finders: list[Callable[[], HoroError | None]] = []


@cache
def watch_exit(mpi: Any) -> None:
    """Handles the end of this process from now on.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """
    atexit.register(_end, mpi, os.getpid())


@cache
def watch_end(mpi: Any, close: Callable[[], None]) -> None:
    """``close`` will be called if the script finalizes MPI while horo still uses it.

    Args:
        mpi: the module ``mpi4py.MPI``.
        close: ends all use of MPI; idempotent.
    """
    # MPI_Finalize first frees COMM_SELF, whose attributes go with it: the hook that the standard has for this.
    keyval = mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: close())
    mpi.COMM_SELF.Set_attr(keyval, True)


def watch_loss(find_loss: Callable[[], HoroError | None]) -> None:
    """``find_loss`` will be asked at exit which peer has been lost."""
    if find_loss not in _loss_finders:
        _loss_finders.append(find_loss)


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
    time.sleep(_FLUSH_PAUSE_S)
    mpi.COMM_WORLD.Abort(1)
