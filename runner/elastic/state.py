"""The data of the driver of an elastic job: its state, the events that it takes and the actions that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from horo.bootstrap.generations import Change
from horo.runner.config import Elastic

__all__ = [
    "Action",
    "Announce",
    "Committed",
    "Connect",
    "Disconnect",
    "Dismiss",
    "Done",
    "DriverState",
    "ElasticEvent",
    "Ended",
    "Fail",
    "Finish",
    "FoundHost",
    "Generation",
    "Host",
    "HostEvent",
    "HostLost",
    "HostUp",
    "HostsFound",
    "Kill",
    "Leave",
    "Phase",
    "Reach",
    "Ready",
    "Refused",
    "Report",
    "Restart",
    "Slot",
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

    CONNECTING = "waits for hosts"
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
    KEPT = "is in the generation, and has kept its state, since the job ends"
    ENDING = "has been killed"
    DISMISSED = "is to end"
    ADRIFT = "cannot be reached, like its host, and may still run there"


_GOING = (Standing.ENDING, Standing.DISMISSED, Standing.ADRIFT)


class Slot(NamedTuple):
    """A place for one worker at a time; ``number`` counts from 0 on each host, and is its local rank."""

    host: str
    number: int


class Reach(Enum):
    """The stages of a host."""

    AWAY = "has no agent"
    COMING = "is about to have one"
    UP = "has one"


@dataclass(frozen=True)
class Host:
    """A host that may have workers.

    Attributes:
        name: as the user or the discovery writes it.
        slots: how many workers it may have at a time; None: not known before it has an agent.
        reach: whether workers can be started there.
        since_s: the time since when that holds.
        is_listed: the user or the discovery names it; else its workers leave.
        leaves_s: the time at which it goes away, or takes its workers away; None: it stays.
        free_s: the time before which nothing is started there.
        failures: the times at which workers have failed there lately.
        cooldowns: how often it was left alone for a while.
    """

    name: str
    slots: int | None
    reach: Reach = Reach.AWAY
    since_s: float = float("-inf")
    is_listed: bool = True
    leaves_s: float | None = None
    free_s: float = float("-inf")
    failures: tuple[float, ...] = ()
    cooldowns: int = 0


@dataclass(frozen=True)
class Worker:
    """A process of the job.

    Attributes:
        number: never used again.
        slot: its place, which one worker has at a time.
        started_s: the time of its start.
        standing: what it does.
        has_state: it has what the job has learnt so far: it began with the job, or has synced or committed.
        until_s: the time at which it has ended for certain, where it is adrift.
    """

    number: int
    slot: Slot
    started_s: float
    standing: Standing = Standing.COMING
    has_state: bool = False
    until_s: float = 0.0

    @property
    def is_going(self) -> bool:
        """Whether it will be in no further generation, and only its end is awaited."""
        return self.standing in _GOING


@dataclass(frozen=True)
class SlotRecord:
    """The failures of the workers of a slot.

    Attributes:
        failures: how many have failed in a row soon after their start.
        free_s: the time from which it may have the next one.
    """

    failures: int = 0
    free_s: float = float("-inf")


@dataclass(frozen=True)
class Generation:
    """A generation that has trained.

    Attributes:
        number: counted from 1; there may be others between that one and the one before, which have not trained.
        members: its workers.
        still_s: the time for which training stood still before it.
        steps_lost: the finished steps of the one before that were undone then; None: nobody has counted them.
    """

    number: int
    members: tuple[int, ...]
    still_s: float = 0.0
    steps_lost: int | None = None


@dataclass(frozen=True)
class Restart:
    """Workers that go on from the memories of those before, who have all failed.

    Attributes:
        commit: from which they do; -1: there were none.
        generation: the last one before.
        error: that of the script in which it has ended, without numbers.
        alike: how many restarts in a row have come to the same error, and before it no further than a commit each.
    """

    commit: int = -1
    generation: int = 0
    error: str = ""
    alike: int = 0


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
        hosts: by name, in the order in which their slots are filled.
        slots: the records of the slots.
        suspects: workers that others have named as hung, with the time at which they are killed.
        changes: how many changes were announced in this generation.
        announced: the last one of them.
        is_broken: a member has left the generation, so that nobody can be at work in it.
        silent: hosts where members may train on, since nothing is known of them; nobody is seated before these times.
        broken_s: the time from which members have to leave the generation within the gather timeout: one has left, has
            ended, or none was in it. None: they may be at work, and leave at their next commit.
        idle_since_s: the time at which training stopped; None: it goes on.
        steps_lost: the finished steps that are undone since then, as far as workers have counted them.
        history: the generations that have trained.
        kept: the last commit in the memory of each slot, as far as it was reported.
        restart: the last time that all ranks had failed, and others went on from those memories.
        committed: the last commit that was reported; another state of the script counts from 1 again.
        failing: the last generation that an error of the script has ended, ``alike``: so many since the last commit.
        error: that by which the script has ended the last member of this generation; empty: something else has.
        refused: the workers that could not be started before the first generation, and are left out of it.
        has_trained: a training function has begun on some worker: it has synced its state.
        late: members that have not come to the end of a training where another has; they are killed at these times.
        has_learnt: some worker had the state once, so that a generation needs one that has it.
        leaves_s: the time at which all of the job has to have ended; None: there is none.
        seed: of the random parts of cooldowns.
    """

    limits: Elastic
    now_s: float
    phase: Phase = Phase.CONNECTING
    since_s: float = 0.0
    generation: int = 0
    members: tuple[int, ...] = ()
    workers: Mapping[int, Worker] = field(default_factory=dict)
    started: int = 0
    hosts: Mapping[str, Host] = field(default_factory=dict)
    slots: Mapping[Slot, SlotRecord] = field(default_factory=dict)
    suspects: Mapping[int, float] = field(default_factory=dict)
    changes: int = 0
    announced: Change = field(default_factory=Change)
    is_broken: bool = False
    silent: Mapping[str, float] = field(default_factory=dict)
    broken_s: float | None = None
    idle_since_s: float | None = None
    steps_lost: int | None = None
    history: tuple[Generation, ...] = ()
    kept: Mapping[Slot, int] = field(default_factory=dict)
    restart: Restart = field(default_factory=Restart)
    committed: int = -1
    failing: Restart = field(default_factory=Restart)
    error: str = ""
    refused: tuple[Refused, ...] = ()
    has_trained: bool = False
    late: Mapping[int, float] = field(default_factory=dict)
    has_learnt: bool = False
    leaves_s: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class FoundHost:
    """A host and the number of its slots; None: as many as it reports."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class HostsFound:
    """All hosts that the job may use from now on, in the order in which their slots are to be filled."""

    hosts: tuple[FoundHost, ...]


@dataclass(frozen=True)
class HostUp:
    """``Connect`` has led to an agent on a host. ``slots``: how many it has, if its list does not say."""

    host: str
    slots: int


@dataclass(frozen=True)
class HostLost:
    """A host has no agent any more, or has got none. This is the end of all its workers, without an ``Ended`` for each.

    Attributes:
        host: its name.
        how: in words that go on behind the name.
        may_run_s: how long its workers may still be at work; None: nobody knows.
    """

    host: str
    how: str
    may_run_s: float | None = 0.0


@dataclass(frozen=True)
class Leave:
    """A host, or all of the job if ``host`` is None, has to have ended within a time; workers commit before."""

    host: str | None
    within_s: float
    why: str = ""


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
        culprit_s: the time that the culprit has to leave, too, or to end.
        steps_lost: the finished steps since its last commit, which are undone; None: it has not counted them.
        commit: the number of that commit; -1: it has none.
    """

    worker: int
    generation: int
    culprit: int | None = None
    has_state: bool = False
    culprit_s: float = 1.0
    steps_lost: int | None = None
    commit: int = -1


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
    """``hvd.elastic.run`` returns in a worker, as in all others of a generation, or has kept its state to end."""

    worker: int
    generation: int
    is_kept: bool = False


@dataclass(frozen=True)
class Ended:
    """The process of a worker, and those that it had started, have ended.

    Attributes:
        worker: its number.
        has_failed: it has not ended with code 0.
        how: in words.
        is_error: it has failed by itself, with an exit code or an exception; no signal has ended it.
    """

    worker: int
    has_failed: bool
    how: str = ""
    is_error: bool = False


@dataclass(frozen=True)
class Refused:
    """The process of a worker could not be started. ``reason``: a sentence with its host; ``code``: that of a shell."""

    worker: int
    reason: str
    code: int


HostEvent = HostsFound | HostUp | HostLost | Leave
ElasticEvent = Tick | HostEvent | Ready | Within | Waits | Committed | Done | Ended | Refused


@dataclass(frozen=True)
class Connect:
    """Start an agent on a host: ``HostUp`` or ``HostLost`` answers."""

    host: str


@dataclass(frozen=True)
class Disconnect:
    """End the agent of a host, or the attempt to start one, and what may be left there. Nothing answers."""

    host: str


@dataclass(frozen=True)
class StartWorker:
    """Start a process; ``generation``, ``rank`` and ``size`` are a forecast."""

    worker: int
    slot: Slot
    generation: int
    rank: int
    size: int


@dataclass(frozen=True)
class WriteSeats:
    """Seat workers, by rank, in a generation. Those of a host follow each other."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """End ``init()`` on all members of a generation."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Announce:
    """Write the next change of a generation, counted by ``number``, which replaces those before."""

    generation: int
    number: int
    change: Change


@dataclass(frozen=True)
class Kill:
    """End the process of a worker at once."""

    worker: int


@dataclass(frozen=True)
class Dismiss:
    """Ask the process of a worker, for which there is nothing left to do, to end; end it if it does not."""

    worker: int
    why: str = field(default="", compare=False)


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
        failed: the worker whose error ends the job; the others get a moment to see theirs, as in any job.
    """

    reason: str = ""
    code: int | None = None
    failed: int | None = None


Action = Connect | Disconnect | StartWorker | WriteSeats | Fail | Announce | Kill | Dismiss | Report | Finish
