"""The data of the driver of an elastic job: its state, the events that it takes and the actions that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from horo.runner.config import Elastic

__all__ = [
    "Action",
    "Announce",
    "Committed",
    "Done",
    "DriverState",
    "ElasticEvent",
    "Ended",
    "Fail",
    "Finish",
    "Kill",
    "Phase",
    "Ready",
    "Report",
    "SlotRecord",
    "Standing",
    "StartWorker",
    "Tick",
    "Waits",
    "Within",
    "Worker",
    "WriteSeats",
]


class Phase(Enum):
    """The stages of a job."""

    STARTING = "waits until the first ranks have called init()"
    FORMING = "waits until all members are in the generation"
    RUNNING = "trains"
    GATHERING = "waits until all members have left the generation"
    SHORT = "waits for more workers"
    FINISHING = "waits for the end of all, since one has ended well"
    OVER = "has ended"


class Standing(Enum):
    """The stages of a worker."""

    COMING = "has not asked for a seat"
    READY = "waits for a seat"
    SEATED = "has a seat and is not in the generation"
    WITHIN = "is in the generation"
    DONE = "is in the generation, and all members have come to the end of hvd.elastic.run"
    ENDING = "has been killed"


@dataclass(frozen=True)
class Worker:
    """A process of the job.

    Attributes:
        number: never used again.
        slot: its place on the host, which one worker has at a time.
        started_s: the time of its start.
        standing: what it does.
        has_state: it has what the job has learnt so far: it began with the job, or has synced or committed.
    """

    number: int
    slot: int
    started_s: float
    standing: Standing = Standing.COMING
    has_state: bool = False


@dataclass(frozen=True)
class SlotRecord:
    """The failures of the workers of a slot.

    Attributes:
        failures: how many have failed in a row soon after their start.
        free_s: the time from which it may have the next one.
    """

    failures: int = 0
    free_s: float = float("-inf")


@dataclass
class DriverState:
    """The state of the driver. ``step`` copies it.

    Attributes:
        limits: what the user allows.
        now_s: the time of the last event.
        phase: what the job does.
        since_s: the time at which that began.
        generation: the number of the last generation; 0: there was none.
        members: its workers by rank, also those that have ended.
        workers: those whose processes exist, by number.
        started: how many workers there have been.
        slots: the records of the slots.
        suspects: workers that others have named as hung, with the time at which they are killed.
        changes: how many changes were announced in this generation.
        is_announced: the last one says that workers have come.
        idle_since_s: the time at which training stopped; None: it goes on.
        lost_s: the time in which it did not go on.
        kept: the last commit in the memory of each slot, as far as it was reported.
        restored: the one at which all ranks had failed, and others went on from those memories; -1: none.
    """

    limits: Elastic
    now_s: float
    phase: Phase = Phase.STARTING
    since_s: float = 0.0
    generation: int = 0
    members: tuple[int, ...] = ()
    workers: Mapping[int, Worker] = field(default_factory=dict)
    started: int = 0
    slots: Mapping[int, SlotRecord] = field(default_factory=dict)
    suspects: Mapping[int, float] = field(default_factory=dict)
    changes: int = 0
    is_announced: bool = False
    idle_since_s: float | None = None
    lost_s: float = 0.0
    kept: Mapping[int, int] = field(default_factory=dict)
    restored: int = -1


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Ready:
    """A worker can be seated."""

    worker: int


@dataclass(frozen=True)
class Within:
    """A worker is in a generation."""

    worker: int
    generation: int


@dataclass(frozen=True)
class Waits:
    """A worker has left a generation and waits for the next one.

    Attributes:
        worker: its number.
        generation: the one that it has left.
        culprit: the worker that its error names; None: none.
        has_state: it can give the state to others.
    """

    worker: int
    generation: int
    culprit: int | None = None
    has_state: bool = False


@dataclass(frozen=True)
class Committed:
    """A worker has committed or synced its state.

    Attributes:
        worker: its number.
        number: of the commit.
        is_kept: the commit is in the memory of its slot, where the next worker finds it.
    """

    worker: int
    number: int = 0
    is_kept: bool = False


@dataclass(frozen=True)
class Done:
    """``hvd.elastic.run`` returns in a worker, as in all others of a generation."""

    worker: int
    generation: int


@dataclass(frozen=True)
class Ended:
    """The process of a worker, and those that it had started, have ended.

    Attributes:
        worker: its number.
        has_failed: it has not ended with code 0.
        how: in words.
    """

    worker: int
    has_failed: bool
    how: str = ""


ElasticEvent = Tick | Ready | Within | Waits | Committed | Done | Ended


@dataclass(frozen=True)
class StartWorker:
    """Start a process; ``generation``, ``rank`` and ``size`` are a forecast."""

    worker: int
    slot: int
    generation: int
    rank: int
    size: int


@dataclass(frozen=True)
class WriteSeats:
    """Seat workers, by rank, in a generation."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """End ``init()`` on all members of a generation."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Announce:
    """Write the next change of a generation: workers have come, or none any more."""

    generation: int
    number: int
    added: bool


@dataclass(frozen=True)
class Kill:
    """End the process of a worker at once."""

    worker: int


@dataclass(frozen=True)
class Report:
    """A line for the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """End the job.

    Attributes:
        reason: a sentence; empty: the ends of the workers tell all.
        code: hororun's exit code; None: by the ends of the workers.
    """

    reason: str = ""
    code: int | None = None


Action = StartWorker | WriteSeats | Fail | Announce | Kill | Report | Finish
