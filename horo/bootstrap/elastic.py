"""One worker's connection to the driver of an elastic job, which hororun runs.

The driver seats workers in generations, see ``generations``. A worker reports over its pipe to hororun, and reads its
seats from the job's store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from horo.bootstrap.ending import EndReporter, culprit_of_chain
from horo.bootstrap.generations import Change, Seat, change_key, members_key, seat_key
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.net.addresses import Endpoint, parse_endpoints
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import StoreTimeoutError
from horo.config.table import LaunchVariables, environment, read_variables
from horo.diagnostics.on_signal import show_stack_on_signal
from horo.errors import AbortedError, GroupError, HoroError, NotInitializedError, UsageError

__all__ = ["Change", "WorkerMembership", "membership"]

_CONNECT_S = 60.0
_LOOK_S = 10.0
"""The time after which a worker that waits for a seat reports that again."""
_COMMIT_INTERVAL_S = 1.0


class WorkerMembership:
    """One worker of an elastic job.

    Attributes:
        worker: its number, which no other process of the job ever has.
        has_joined: it is in a generation.
        generation: the one that it has joined last; 0: none yet.
        rank: its rank there.
        is_newcomer: the job had begun before this process; its ``init()`` connects to nothing.
        forecast: the seat that the driver has planned for it when it started the process.
    """

    def __init__(self, own: LaunchVariables) -> None:
        if own.worker is None or own.store is None or own.secret is None or own.rank is None or own.size is None:
            raise UsageError("HORO_WORKER is set, but not all other variables of hororun; start the job with hororun")
        self.worker = own.worker
        self.has_joined = False
        self.generation = 0
        self.rank = own.rank
        self.is_newcomer = (own.generation or 1) > 1
        local = own.local_rank or 0, own.local_size or 1
        cross = own.cross_rank or 0, own.cross_size or 1
        self.forecast = Seat(own.generation or 1, own.rank, tuple(range(own.size)), local, cross)
        self._host_name = own.hostname or socket.gethostname()
        self._job_id = own.job_id or "job"
        self._endpoints: tuple[Endpoint, ...] = tuple(parse_endpoints(own.store))
        self._secret: bytes = own.secret
        self._reporter = EndReporter(own.end_pipe)
        self._begin: Callable[[], object] | None = None
        self._end: Callable[[], object] | None = None
        self._seat: Seat | None = None
        self._seats_taken = 0
        self._store: StoreClient | None = None
        self._changes_seen = 0
        self._change = Change()
        self._commit: int | None = None
        self._waits: dict[str, object] = {}
        """The report of this worker, while it waits for a seat."""
        self._reported_s = float("-inf")

    def begin_with(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Sets the functions by which this process enters a generation, as ``init()`` does, and leaves it."""
        self._begin, self._end = begin, end
        logging.getLogger("horo.engine").addFilter(_lower_last_events)

    def ready(self) -> None:
        """Reports that this worker may be seated."""
        self._waits["ready"] = True
        self._reporter.elastic(**self._waits)

    def join(self) -> None:
        """Waits for a seat in the next generation, and enters it; again, if that generation fails.

        Blocks until the driver seats this worker. The driver ends workers that it cannot seat, and each request to the
        store has a deadline. Does nothing in a generation.

        Raises:
            UsageError: ``init()`` has not been called.
            PeerLostError: hororun is gone.
            HoroError: what ``init()`` raises, if it is no GroupError.
        """
        if self._begin is None:
            raise UsageError("this worker of an elastic job has not called init()")
        while not self.has_joined:
            self.ready()
            self._seat = self._next_seat()
            show_stack_on_signal()
            try:
                self._begin()
            except (UsageError, NotInitializedError):
                raise
            except GroupError as error:
                self.leave(error, 0)

    def launch(self, comm: Any = None) -> Launch:
        """The launcher's facts about this process in the generation that it enters.

        Raises:
            UsageError: ``comm`` is given, or this worker has no seat.
        """
        if comm is not None:
            raise UsageError("init(comm=...) in an elastic job: its generations have all workers; leave comm out")
        seat = self._seat
        if seat is None:
            raise UsageError("this worker of an elastic job has no seat: it enters a generation by join()")
        return Launch(
            "hororun",
            seat.rank,
            len(seat.workers),
            self._host_name,
            job_id=self._job_id,
            local=seat.local,
            cross=seat.cross,
            endpoints=self._endpoints,
            secret=self._secret,
            ranks=seat.workers,
            generation=seat.generation,
        )

    def joined(self) -> None:
        """Called at the end of the start of a rank: reports that this worker is in its generation."""
        if self._seat is None:
            raise UsageError("this worker of an elastic job has no seat")
        self.has_joined, self._waits = True, {}
        self.generation, self.rank = self._seat.generation, self._seat.rank
        self._changes_seen, self._change = 0, Change()
        with contextlib.suppress(HoroError):  # hororun is gone, and the end of this process is near
            self._connected().post(change_key(self._job_id, self._seat.generation, 1))
        self._reporter.elastic(within=self._seat.generation)

    def begun(self) -> None:
        """Reports that a training function begins in the generation, after another one perhaps."""
        if self.has_joined:
            self._reporter.elastic(within=self.generation)

    def done(self, *, is_kept: bool = False) -> None:
        """Reports that a training function has come to its end on all ranks, or that its state is kept."""
        self._reporter.elastic(done=self.generation, **({"kept": True} if is_kept else {}))

    def leave(self, error: BaseException | None, steps_lost: int | None = None) -> None:
        """Leaves the generation, and reports that this worker waits for the next one.

        Args:
            error: the reason; a rank that it names as hung is ended by the driver. None: the generation is to change.
            steps_lost: the finished steps since the last commit, which are undone; None: that is not known.

        Raises:
            UsageError: as ``shutdown()``.
        """
        seat, self._seat = self._seat, None
        if self._end is not None:
            self._end()
        self.has_joined = False
        self._disconnect()  # its request for a change is open
        if seat is not None:
            named = None
            if isinstance(error, GroupError) and not isinstance(error, AbortedError):
                named = culprit_of_chain(error, GroupError)
            culprit = None if named is None or named >= len(seat.workers) else seat.workers[named]
            self._waits = {"waits": seat.generation, "culprit": culprit, "commit": self._commit, "steps": steps_lost}
            self._reporter.elastic(**self._waits)

    def change(self) -> Change | None:
        """The change that the driver has asked for since this generation began; None: none. Does not block."""
        if self._store is not None and self._seat is not None:
            with contextlib.suppress(HoroError):
                while (value := self._store.poll()) is not None:
                    self._changes_seen, self._change = self._changes_seen + 1, Change.decode(value)
                    self._store.post(change_key(self._job_id, self._seat.generation, self._changes_seen + 1))
        return self._change or None

    def committed(self, number: int, *, is_kept: bool = False) -> None:
        """Reports the number of the last commit of this worker's state, at most once per second.

        To be called after each commit, and after each sync with the number that the state then has.

        Args:
            number: of the commit.
            is_kept: it is in the memory of this worker's slot.
        """
        is_first = self._commit is None
        self._commit = number
        now_s = time.monotonic()
        if is_first or now_s - self._reported_s >= _COMMIT_INTERVAL_S:
            self._reported_s = now_s
            self._reporter.elastic(commit=number, **({"kept": True} if is_kept else {}))

    def forked(self) -> None:
        """Closes the parent's connection in a forked child, which may live for longer than the generation."""
        self._disconnect()

    def _next_seat(self) -> Seat:
        self._seats_taken += 1
        key = seat_key(self._job_id, self.worker, self._seats_taken)

        def members_of(generation: int) -> bytes:
            return self._connected().get(members_key(self._job_id, generation), _LOOK_S)

        while True:
            try:
                return Seat.decode(self._connected().get(key, _LOOK_S), members_of)
            except StoreTimeoutError:  # hororun is there, and has no seat for it
                self.ready()

    def _connected(self) -> StoreClient:
        if self._store is None:
            first, *others = self._endpoints
            self._store = StoreClient(*first, self._secret, _CONNECT_S, others)
        return self._store

    def _disconnect(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def _lower_last_events(record: logging.LogRecord) -> bool:
    """Whether a message is logged. The last events before the end of a generation, which others follow, are details."""
    if record.levelno == logging.ERROR and record.getMessage().startswith("the last events on this rank"):
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return logging.getLogger(record.name).isEnabledFor(record.levelno)
    return True


@cache
def membership() -> WorkerMembership | None:
    """This process as a worker of an elastic job; None: hororun has not started it as one."""
    own = read_variables(LaunchVariables, environment())
    if own.worker is None:
        return None
    member = WorkerMembership(own)
    os.register_at_fork(after_in_child=member.forked)
    return member
