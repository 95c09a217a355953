"""The ranks that run in this process, and what happens to them when the process ends or forks."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from horo.autotune import Search, Tuner
from horo.bootstrap import ending
from horo.bootstrap.directory import Directory
from horo.bootstrap.ending import EndReporter, culprit_of, culprit_of_chain
from horo.bootstrap.launchers.variables import Place
from horo.bootstrap.mpi.exit import note_status, watch_end, watch_loss
from horo.bootstrap.mpi.world import MpiWorld
from horo.bootstrap.nccl import Nccl
from horo.bootstrap.teams import add_team, exchange_bytes
from horo.bootstrap.tuned_values import tuned_overlap, tuned_settings
from horo.config.settings import Settings
from horo.core.context import Context
from horo.core.setup import Setup
from horo.diagnostics.board import Board
from horo.errors import AbortedError, GroupError, HoroError, NotInitializedError, PeerLostError
from horo.timeline import TimelineError
from horo.timeline.recording import finish

__all__ = ["Connection", "RunningRank", "watch"]

_IN_THREAD = " (in a thread)"
"""The end of the words of a rank that has left in order, but for an error in one of its threads."""
_PROCESS_ENDS_S = 1.0
_losses: list[HoroError] = []
"""Of peers, under MPI."""

_end_reporters: list[EndReporter] = []
"""The reporters of the last start only."""
_ends_at_once: list[bool] = []
"""Of the last start: whether a rank that another one has ended need not stay behind that one. hororun knows the cause,
and under MPI it calls ``MPI_Abort``."""


@dataclass(frozen=True)
class Connection:
    """A rank with all its descriptors, before a context owns them."""

    setup: Setup
    place: Place
    is_homogeneous: bool
    hosts: tuple[tuple[int, ...], ...]
    cores: int
    overlap: str
    gradients_ready: str
    directory: Directory = field(repr=False)
    mpi: MpiWorld | None = None
    """The MPI world of the job; None if the ranks did not start through MPI."""
    search: Search | None = None
    """Rank 0's, in a job that is autotuned."""
    board: Board | None = field(default=None, repr=False)


class RunningRank:
    """One rank of a running job.

    Attributes:
        context: the native context.
        rank, size: rank and size in the job.
        local_rank, local_size, cross_rank, cross_size: among the hosts, as the launcher counts them.
        is_homogeneous: whether all hosts have equally many ranks.
        hosts: the ranks of each host, that is of each set of ranks that share memory.
        host_names: host names by rank.
        cores: number of cores on which the ranks of this host may run, together.
        overlap: the user's choice for ``HORO_OVERLAP``, or that of autotuning; see ``overlap_now``.
        gradients_ready: ``HORO_GRADIENTS_READY``, or its default.
        directory: addresses of all ranks and the job's secret; ``team_links`` needs them to make more links.
        mpi: the MPI world of the job; None if the ranks did not start through MPI.
        reporter: reports to hororun, if there is one.
        timelines: files that ranks of this host have been asked for, each with its rank.
        settings: those in force at the start; see ``settings_now``.
        thread_error: the exception that has ended a thread of this rank which took part in operations; empty: none.
        board: where the ranks of a job on one host show one another their last steps; None: there are others, or none.
        nccl_device: the number of the GPU that NCCL was set up for; None: the job does not use NCCL.
    """

    def __init__(
        self, connection: Connection, reporter: EndReporter | None = None, settings: Settings | None = None
    ) -> None:
        setup = connection.setup
        self.settings = settings or Settings({}, {})
        self.context = Context(setup, is_logged=True)
        self.rank, self.size = setup.rank, setup.size
        self.local_rank, self.local_size, self.cross_rank, self.cross_size = connection.place
        self.is_homogeneous = connection.is_homogeneous
        self.hosts = connection.hosts
        self.cores, self.overlap = connection.cores, connection.overlap
        self._tunes_overlap = setup.tuned is not None
        self._tuned_from = setup.tuned
        self._tuner = None if connection.search is None else Tuner(self.context, connection.search)
        self.gradients_ready = connection.gradients_ready
        self.directory = connection.directory
        self.board = connection.board
        self.mpi = connection.mpi
        self.nccl_device: int | None = None
        self._nccl: Nccl | None = None
        if self.mpi is not None:
            if self.mpi.size == self.mpi.mpi.COMM_WORLD.Get_size():
                _losses.clear()  # all ranks of MPI have come again: what an earlier job has lost was only late
            watch_loss(_find_loss)
            watch_end(self.mpi.mpi, _close_all)
        self.host_names = tuple(setup.host_name_of_rank)
        self.reporter = reporter or EndReporter(None)
        self._pid = os.getpid()
        self._closed = False
        self.thread_error = ""
        self.timelines: set[tuple[int, str]] = set()
        self._teams_begun = 0
        _ranks.add(self)

    def overlap_now(self) -> str:
        """The value of ``HORO_OVERLAP`` for the next backward."""
        if self._tunes_overlap:
            self.overlap, self._tunes_overlap = tuned_overlap(self.context, self.overlap)
        return self.overlap

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """The ranks of the host of this one, itself included."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def is_tuned(self) -> bool:
        """Whether autotuning may change settings."""
        return self._tuned_from is not None

    def settings_now(self) -> Settings:
        """The settings in force on this rank, with the changes by autotuning. The caller keeps the context open."""
        if self._tuned_from is None:
            return self.settings
        return self.settings.tuned(tuned_settings(self.context, self._tuned_from))

    @property
    def is_searching(self) -> bool:
        """Whether this rank measures the steps of optimizers, for ``end_step``."""
        return self._tuner is not None

    def end_step(self, optimizer: object) -> None:
        """Called at the end of each step of an optimizer of all ranks. The caller keeps the context open."""
        if self._tuner is not None and self._tuner.end_step(optimizer):
            self._tuner = None

    def close(self, words: str = "", *, aborts: bool = False) -> None:
        """Leaves the job, announces that to the peers, frees everything; idempotent. Does nothing in a forked child.

        Args:
            words: what this rank has done, for other ranks that still wait for it; empty: it has shut horo down.
            aborts: ends the job for all ranks at once, for the reason in ``words``. Others may still use the context.
        """
        if not self._closed and os.getpid() == self._pid:
            _ranks.discard(self)
            self.note_loss()
            health = self.context.health()
            self.reporter.lost(lost := culprit_of(health))
            if aborts:
                self.context.abort(words)
            else:
                if words or self.thread_error:
                    self.context.end(self.thread_error or words, has_failed=bool(self.thread_error))
                self.context.destroy()
            if self._tuner is not None:
                self._tuner.close()
            if self.board is not None:
                self.board.close()
            if isinstance(health, PeerLostError):
                self._finish_timelines(lost)
            if not _ranks:
                ending.unwatch_exceptions()
            self._closed = True  # last: a signal handler may raise before, or come here, too

    def _finish_timelines(self, lost: int | None) -> None:
        """Makes the files of ranks of this host that have ended without doing so; the process of ``lost`` ends now."""
        for rank, path in self.timelines:
            try:
                finish(path, wait_s=_PROCESS_ENDS_S if rank == lost else 0.0)
            except TimelineError as error:
                logging.getLogger("horo").warning("%s", error)

    def add_team(self, ranks: Sequence[int]) -> int:
        """Adds a team of ranks that do collectives among themselves; all ranks of the job call it, see ``teams``."""
        return add_team(self.context, self.directory, self._teams_begun + 1, ranks, self._begin_team, nccl=self._nccl)

    def connect_nccl(self, device: int | None) -> None:
        """Connects all ranks by NCCL; all ranks call it, before anything else. Blocks until all are connected.

        Args:
            device: the number of this rank's GPU; None: that of its local rank, where it sees several.

        Raises:
            HoroError: as ``Nccl.connect_world``, on all ranks.
        """
        directory = self.directory
        names = [directory.name(rank) for rank in range(self.size)]
        self._nccl = Nccl(self.context, self.rank, names, directory.timeout_s)
        exchange = partial(exchange_bytes, self.context, "init of NCCL", within_s=directory.timeout_s)
        self.nccl_device = self._nccl.connect_world(device, self.local_rank, exchange)

    def _begin_team(self) -> None:
        self._teams_begun += 1

    def note_loss(self) -> None:
        """Records, under MPI, the loss of a peer for the exit handler, which must not wait for it.

        A rank with an error in a thread has left in order, and finalizes MPI as any other.
        """
        health = self.context.health() if self.mpi is not None else None
        has_left = isinstance(health, (AbortedError, NotInitializedError)) or str(health).endswith(_IN_THREAD)
        if isinstance(health, GroupError) and not has_left:
            _losses.append(health)

    def forked(self) -> None:
        """Called in a forked child."""
        self.context.after_fork()
        if self.board is not None:
            self.board.close()


_ranks: weakref.WeakSet[RunningRank] = weakref.WeakSet()


def watch(reporter: EndReporter, *, ends_at_once: bool) -> None:
    """Has the end of this process reported."""
    _end_reporters[:] = [reporter]
    _ends_at_once[:] = [ends_at_once]
    ending.watch_exceptions(_on_exception, _note_thread)


def _find_loss() -> HoroError | None:
    """The first loss of a peer under MPI, if there was one."""
    for job in list(_ranks):
        job.note_loss()
    return _losses[0] if _losses else None


def _close_all() -> None:
    """Leaves the jobs that an MPI has started."""
    for job in list(_ranks):
        if job.mpi is not None:
            job.close()


def _on_exception(error: BaseException, where: str) -> None:
    """Reports the exception that ends this process."""
    culprits = [culprit_of(job.context.health()) for job in _ranks]
    culprit = next((rank for rank in culprits if rank is not None), None)
    if culprit is None:  # the error may come out of init(), or from a job that was left since
        culprit = culprit_of_chain(error, GroupError)
    text, status = ending.describe_exception(error), ending.exit_status(error)
    note_status(status)
    _end_reporters[-1].ended(text, where, culprit, status)
    is_interrupted = isinstance(error, KeyboardInterrupt)  # Ctrl-C reaches all ranks: each gets its own, and leaves
    with contextlib.suppress(BaseException):  # of a signal handler: the process ends in any case
        for job in list(_ranks):
            job.context.end("" if is_interrupted else text, has_failed=not is_interrupted)
    if not is_interrupted and not _ends_at_once[-1] and (culprit is not None or culprit_of_chain(error) is not None):
        ending.stay_behind_cause()


def _note_thread(thread: int | None, error: BaseException) -> None:
    """Keeps the exception that has ended a thread which took part in operations: others may soon wait for it."""
    for job in list(_ranks):
        if thread in job.context.callers():
            job.thread_error = job.thread_error or ending.describe_exception(error) + _IN_THREAD


def _after_fork_in_child() -> None:
    for job in list(_ranks):
        job.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
