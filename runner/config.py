"""A job as frozen data: the command line fills it and everything else reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from horo.runner.hosts import HostSpec

__all__ = [
    "BATCH_GRACE_S",
    "BINDINGS",
    "EXIT_ELASTIC_TIMEOUT",
    "EXIT_INTERNAL",
    "EXIT_SETUP",
    "EXIT_TERMINATED",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "GRACE_S",
    "LAUNCHERS",
    "Elastic",
    "Job",
    "JobError",
    "Mpi",
    "OutputOptions",
    "Ssh",
    "TimelineMerge",
]

BINDINGS = ("core", "numa", "none")
LAUNCHERS = ("auto", "ssh", "slurm", "mpi", "jsrun")

GRACE_S = 5.0
"""The time from SIGTERM to SIGKILL, if a user waits at a terminal."""
BATCH_GRACE_S = 25.0
"""The same in a batch job, where ranks write a checkpoint: less than the 30 s that Slurm gives by default (KillWait),
so that hororun can still say who was killed."""

EXIT_USAGE = 2
EXIT_UNREACHABLE = 69
"""A host cannot be reached, or was lost."""
EXIT_INTERNAL = 70
"""The agent or hororun itself failed."""
EXIT_ELASTIC_TIMEOUT = 75
"""An elastic job has not got enough ranks in time."""
EXIT_TERMINATED = 143
"""The job was ended by SIGTERM, as a shell would write it."""
EXIT_SETUP = 78
"""A host was reached but lacks Python, horo, this version of it, or the directory."""


class JobError(Exception):
    """The job cannot be started. The message is for the user; ``code`` is hororun's exit code."""

    def __init__(self, message: str, code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Ssh:
    """The way remote hosts are reached.

    Attributes:
        program: the ssh program.
        port: its port, for hosts that name none.
        identity_file: its private key.
        arguments: further arguments, before the host.
    """

    program: str = "ssh"
    port: int | None = None
    identity_file: str | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mpi:
    """Options for mpirun, or for jsrun.

    Attributes:
        program: the program; None: the first of ``mpirun`` and ``mpiexec`` in PATH.
        arguments: further arguments, before the command.
        binding: arguments that bind and map ranks; None: hororun's own.
        tcp: whether Spectrum MPI is to use TCP only.
    """

    program: str | None = None
    arguments: tuple[str, ...] = ()
    binding: tuple[str, ...] | None = None
    tcp: bool = False


@dataclass(frozen=True)
class OutputOptions:
    """Form and place of the output.

    Attributes:
        prefix: whether each line begins with its rank.
        timestamp: whether each prefix has the time.
        streams: whether each prefix has the stream, in Horovod's form: ``[0]<stdout>:``.
        host: whether each prefix, and each folder in ``directory``, has the host.
        directory: where each rank's output is written as well.
        first_only: whether only the lines of rank 0 are shown.
        verbose: whether hororun prints its steps.
    """

    prefix: bool = True
    timestamp: bool = False
    streams: bool = False
    host: bool = False
    directory: str | None = None
    first_only: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class TimelineMerge:
    """The timelines of all ranks in one file, at the end.

    Attributes:
        out: the file to write.
        pattern: of the ranks' files, with ``{rank}`` in it.
    """

    out: str
    pattern: str


@dataclass(frozen=True)
class Elastic:
    """The limits of an elastic job.

    Attributes:
        size: the number of ranks to begin with.
        min_size: fewer ranks do not train.
        max_size: more ranks are not started.
        reset_limit: how often ranks may be placed anew; None: any number.
        elastic_timeout_s: how long to wait for ``min_size`` ranks.
        start_timeout_s: how long a rank may be in ``init()``, and the first ones may take until they call it.
        gather_timeout_s: how long ranks may take to leave a generation after the first one has.
        script: a command that prints the hosts of the job, also later ones; empty: they are fixed.
        slots_per_host: slots of a host of which the script prints none; None: as many as the host has.
        cooldown_s: the shortest and the longest time for which a host is left alone.
        on_failure: what is left alone if a rank fails: its "slot", or all of its "host".
        keeps: whether ranks keep the last commit in a folder, so that SIGTERM need not end them at once.
        join: whether ranks are interrupted when others are "ready" to join, or "now", when they are started.
    """

    size: int
    min_size: int
    max_size: int
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    gather_timeout_s: float = 30.0
    script: str = ""
    slots_per_host: int | None = None
    cooldown_s: tuple[float, float] = (10.0, 600.0)
    on_failure: str = "slot"
    join: str = "ready"
    keeps: bool = False

    @property
    def is_discovered(self) -> bool:
        """Whether other hosts may be found while the job runs."""
        return bool(self.script)


@dataclass(frozen=True)
class Job:
    """One run of hororun.

    Attributes:
        size: number of ranks; 0: one for each slot, once hosts have said how many they have.
        command: of every rank.
        hosts: of the ranks; ``localhost`` when neither the user nor a batch system named any.
        hosts_from: the source of the host list, for messages; empty: the user.
        in_batch: whether this is a job of a batch system.
        launcher: how ranks are started, one of ``LAUNCHERS`` without ``"auto"``.
        oversubscribe: whether more ranks than slots are allowed.
        grace_s: seconds from SIGTERM to SIGKILL.
        failure_s: seconds from the first failure to SIGTERM.
        start_timeout_s: seconds for all hosts to answer.
        host_timeout_s: silence after which a remote host is lost.
        interfaces: network interfaces to use; none: those that route to the peers.
        ports: those on which horo may listen; None: any.
        store_port: port of the key-value server; 0: any free one.
        torch_env: whether ranks find the variables of ``torch.distributed``; those of ``exports`` come before them.
        master_port: ``MASTER_PORT``; 0: any free one.
        bind_to: the CPUs that each rank is bound to, one of ``BINDINGS``.
        bind_gpus: whether each rank sees its share of its host's GPUs only.
        keep_memory: whether ranks keep freed memory for the next allocation.
        exports: variables of ``-x`` and of the tuning options for every rank.
        sources: where the values of tuning options come from, by variable, for ``hvd.config()``.
        passed_over: a sentence for each option of horovodrun that does nothing here.
        dry_run: whether to show the commands, and run nothing.
        check_hosts: whether to look at all hosts, and run nothing.
        python: the Python on remote hosts.
        ssh: how hosts are reached by ssh.
        mpi: options for mpirun.
        output: form and place of the output.
        timelines: the merge of the ranks' timelines at the end; None: none.
        json_report: the file for the course of the job; empty: none.
        summary: whether the card is printed at the end; None: on a terminal.
        live: whether a line shows the course of the job while it runs.
        metrics: address and port where Prometheus finds the counts of the ranks; None: nowhere.
        attach: the hororun whose job is to be shown, and nothing run; 0: none.
        stacks: whether the stacks of its ranks are shown instead.
        elastic: the limits of an elastic job; None: a rank that fails ends the job.
    """

    size: int
    command: tuple[str, ...]
    hosts: tuple[HostSpec, ...] = (HostSpec("localhost"),)
    hosts_from: str = ""
    in_batch: bool = False
    launcher: str = "ssh"
    oversubscribe: bool = False
    grace_s: float = GRACE_S
    failure_s: float = 1.0
    start_timeout_s: float = 60.0
    host_timeout_s: float = 45.0
    interfaces: tuple[str, ...] = ()
    ports: range | None = None
    store_port: int = 0
    torch_env: bool = True
    master_port: int = 0
    bind_to: str = "none"
    bind_gpus: bool = False
    keep_memory: bool = True
    exports: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    dry_run: bool = False
    check_hosts: bool = False
    python: str = ""
    ssh: Ssh = Ssh()
    mpi: Mpi = Mpi()
    output: OutputOptions = OutputOptions()
    timelines: TimelineMerge | None = None
    json_report: str = ""
    summary: bool | None = None
    live: bool = False
    metrics: tuple[str, int] | None = None
    attach: int = 0
    stacks: bool = False
    elastic: Elastic | None = None

    @property
    def shares_evenly(self) -> bool:
        """Whether all hosts get as many ranks: the user has named them, and has not said how many each may have."""
        return not self.hosts_from and all(host.slots is None for host in self.hosts)
