"""The ranks that run in this process, and what happens to them when the process ends or forks."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

from horo._bootstrap import ending
from horo._bootstrap.ending import EndReporter, culprit_of, culprit_of_chain
from horo._bootstrap.mpi.exit import note_status
from horo.errors import GroupError, HoroError

if TYPE_CHECKING:
    from horo._bootstrap.job import RunningRank

__all__ = ["IN_THREAD", "LOSSES", "RANKS", "close_all", "find_loss", "watch"]

IN_THREAD = " (in a thread)"
"""The end of the words of a rank that has left in order, but for an error in one of its threads."""
RANKS: weakref.WeakSet[RunningRank] = weakref.WeakSet()
LOSSES: list[HoroError] = []
"""Of peers, under MPI."""

_end_reporters: list[EndReporter] = []
"""The reporters of the last start only."""
_ends_at_once: list[bool] = []
"""Of the last start: whether a rank that another one has ended need not stay behind that one. hororun knows the cause,
and under MPI it calls ``MPI_Abort``."""


def watch(reporter: EndReporter, *, ends_at_once: bool) -> None:
    """Has the end of this process reported."""
    _end_reporters[:] = [reporter]
    _ends_at_once[:] = [ends_at_once]
    ending.watch_exceptions(_on_exception, _note_thread)


def find_loss() -> HoroError | None:
    """The first loss of a peer under MPI, if there was one."""
    for job in list(RANKS):
        job.note_loss()
    return LOSSES[0] if LOSSES else None


def close_all() -> None:
    """Leaves the jobs that an MPI has started."""
    for job in list(RANKS):
        if job.mpi is not None:
            job.close()


def _on_exception(error: BaseException, where: str) -> None:
    """Reports the exception that ends this process."""
    culprits = [culprit_of(job.context.health()) for job in RANKS]
    culprit = next((rank for rank in culprits if rank is not None), None)
    if culprit is None:  # the error may come out of init(), or from a job that was left since
        culprit = culprit_of_chain(error, GroupError)
    text, status = ending.describe_exception(error), ending.exit_status(error)
    note_status(status)
    _end_reporters[-1].ended(text, where, culprit, status)
    is_interrupted = isinstance(error, KeyboardInterrupt)  # Ctrl-C reaches all ranks: each gets its own, and leaves
    with contextlib.suppress(BaseException):  # of a signal handler: the process ends in any case
        for job in list(RANKS):
            job.context.end("" if is_interrupted else text, has_failed=not is_interrupted)
    if not is_interrupted and not _ends_at_once[-1] and (culprit is not None or culprit_of_chain(error) is not None):
        ending.stay_behind_cause()


def _note_thread(thread: int | None, error: BaseException) -> None:
    """Keeps the exception that has ended a thread which took part in operations: others may soon wait for it."""
    for job in list(RANKS):
        if thread in job.context.callers():
            job.thread_error = job.thread_error or ending.describe_exception(error) + IN_THREAD


def _after_fork_in_child() -> None:
    for job in list(RANKS):
        job.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
