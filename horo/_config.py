"""Declares every environment variable that horo reads; the library reads the environment only here.

Each variable is a field of one of the frozen dataclasses below, with its name, kind, unit, default, range and meaning.
``docs/reference/environment.md`` is generated from them. ``HORO_X`` takes precedence over ``HOROVOD_X``. An empty value
counts as not set.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from horo.errors import UsageError

__all__ = [
    "GROUPS",
    "LOG_LEVELS",
    "CallVariables",
    "Config",
    "LaunchVariables",
    "MpiVariables",
    "SlurmVariables",
    "TorchrunVariables",
    "Variable",
    "drop_variables",
    "environment",
    "misspelt",
    "name_for_children",
    "names_of",
    "read_config",
    "read_variables",
    "set_variables",
    "variables_of",
]

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "off")
"""In the order of ``enum horo_log_level``."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Variable:
    """One variable of the environment."""

    names: tuple[str, ...]
    """The first that is set counts."""
    kind: type
    """int, float, bool, str or bytes (written in hexadecimal)."""
    default: Any
    meaning: str
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    multiple_of: int = 1
    secret: bool = False

    def allowed(self) -> str:
        """The allowed values, as a phrase."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.kind is str:
            return "a text"
        if self.kind is bytes:
            return f"hexadecimal digits for at least {self.low:g} bytes"
        phrase = "an integer" if self.kind is int else "a number"
        high = f" to {self.high:.15g}" if math.isfinite(self.high) else " up"
        phrase += f" from {self.low:.15g}{high}" + (f" {self.unit}" if self.unit else "")
        return phrase + (f", a multiple of {self.multiple_of}" if self.multiple_of > 1 else "")

    def read(self, environ: Mapping[str, str]) -> Any:
        """The value in ``environ``, or the default.

        Raises:
            UsageError: names the variable, its value (never a secret one) and what is allowed.
        """
        for name in self.names:
            text = environ.get(name, "").strip()
            if text:
                try:
                    return self._parse(text)
                except ValueError:
                    shown = f" ({len(text)} characters)" if self.secret else f"={text!r}"
                    raise UsageError(f"{name}{shown} is not {self.allowed()}") from None
        return self.default

    def _parse(self, text: str) -> Any:
        value: Any
        if self.choices:
            value = text.lower()
            if value not in self.choices:
                raise ValueError(text)
            return value
        if self.kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError(text)
            return text.lower() in _TRUE
        if self.kind is bytes:
            value = bytes.fromhex(text)
            if len(value) < self.low:
                raise ValueError(text)
            return value
        if self.kind is str:
            return text
        value = self.kind(text)
        if not self.low <= value <= self.high or (self.multiple_of > 1 and value % self.multiple_of):
            raise ValueError(text)
        return value


def _variable(name: str, default: Any, meaning: str, **details: Any) -> Any:
    """A field for a variable of horo: ``HORO_name`` or, if that is not set, ``HOROVOD_name``."""
    kind = details.pop("kind", type(default))
    variable = Variable((f"HORO_{name}", f"HOROVOD_{name}"), kind, default, meaning, **details)
    return field(default=default, metadata={"variable": variable})


def _exactly(name: str, kind: type, meaning: str, **details: Any) -> Any:
    """A field for a variable that has only this name: another program's, or one that Horovod does not have."""
    default = details.pop("default", None)
    variable = Variable((name,), kind, default, meaning, **details)
    return field(default=default, repr=not variable.secret, metadata={"variable": variable})


@dataclass(frozen=True)
class Config:
    """The settings of the user."""

    fusion_threshold: int = _variable(
        "FUSION_THRESHOLD",
        128 << 20,
        "Most bytes of small tensors that travel together in one batch; 0 sends every tensor alone.",
        unit="bytes",
        low=0,
        high=1 << 40,
    )
    cycle_time_ms: float = _variable(
        "CYCLE_TIME",
        0.0,
        "Extra wait for more tensors before a batch is formed; the default forms a batch as soon as the link is free.",
        unit="ms",
        low=0,
        high=1000,
    )
    cache_capacity: int = _variable(
        "CACHE_CAPACITY",
        4096,
        "Tensors that are announced by number after their first time, at 0.2 to 0.6 KiB each; 0 turns that off.",
        low=0,
        high=1 << 20,
    )
    stall_check_disable: bool = _variable(
        "STALL_CHECK_DISABLE",
        False,
        "1: do not look for tensors that some ranks have submitted and others not, nor for deadlocks; wait for ever.",
    )
    stall_check_time_s: float = _variable(
        "STALL_CHECK_TIME_SECONDS",
        60.0,
        "Wait for the ranks that have not submitted a tensor before a warning names them; 0: no check at all.",
        unit="s",
        low=0,
        high=1e6,
    )
    stall_shutdown_time_s: float = _variable(
        "STALL_SHUTDOWN_TIME_SECONDS",
        600.0,
        "Wait for the ranks that have not submitted a tensor before it fails with StalledError; 0: wait for ever.",
        unit="s",
        low=0,
        high=1e6,
    )
    deadlock_time_s: float = _variable(
        "DEADLOCK_TIME_SECONDS",
        1.0,
        "Time for which a rank must have waited for another before it says so; where all have and nothing can finish, "
        "DeadlockError ends the job in less than a second.",
        unit="s",
        low=0.1,
        high=1e6,
    )
    log_level: str = _variable(
        "LOG_LEVEL",
        "warning",
        "Least severe message that is written to stderr: from `info` on rank 0 says at the start what has started, "
        "from `debug` on every rank where it is; `fatal`, a word of Horovod's, means `off`.",
        choices=(*LOG_LEVELS, "fatal"),
    )
    start_timeout_s: float = _variable(
        "START_TIMEOUT",
        60.0,
        "How long init() waits for other ranks without any progress before it fails and names those missing.",
        unit="s",
        low=0.1,
        high=1e6,
    )
    peer_timeout_s: float = _variable(
        "PEER_TIMEOUT",
        30.0,
        "Silence of another host, while something is awaited from it, after which it counts as lost.",
        unit="s",
        low=0.1,
        high=1e6,
    )
    segment_bytes: int | None = _variable(
        "SEGMENT_BYTES",
        None,
        "Size of the pieces in which large tensors pass through shared memory; unset: 256 KiB in a job of one host, "
        "1 MiB in a job of several.",
        kind=int,
        unit="bytes",
        low=4096,
        high=1 << 30,
        multiple_of=4096,
    )
    spin_us: int = _variable(
        "SPIN_US",
        1000,
        "Longest busy wait of a call before it sleeps, which gives way to every other process that wants its core; "
        "the background thread waits busily for a twentieth of it.",
        kind=int,
        unit="us",
        low=0,
        high=1_000_000,
    )
    leave_crowded_cores: bool = _variable(
        "LEAVE_CROWDED_CORES",
        False,
        "1: a thread that waits for other ranks may move, within its affinity, from a core that several ranks use to "
        "one that fewer use; `hororun` sets it.",
    )
    overlap: str = _variable(
        "OVERLAP",
        "auto",
        "When gradients travel: `always` while backward still runs, `never` at its end (with "
        "`HORO_GRADIENTS_READY=step`: at `step()` or `synchronize()`); `auto`: never where one host runs the whole "
        "job and its cores are all computing, else always.",
        choices=("auto", "always", "never"),
    )
    gradients_ready: str | None = _variable(
        "GRADIENTS_READY",
        None,
        "When gradients are averaged, unless `DistributedOptimizer(gradients_ready=)` says it: `backward`, when "
        "`backward()` returns, or `step`, at `synchronize()` or `step()`, as in Horovod, where touching them before is "
        "an error. Not set: `backward`; with `HORO_HOROVOD`, `step`.",
        kind=str,
        choices=("backward", "step"),
    )
    horovod: bool = _exactly(
        "HORO_HOROVOD",
        bool,
        "1: the job's scripts are written for Horovod. `hororun --horovod` and `python -m horo.horovod` set it, "
        "and let Python find horo as `horovod`.",
        default=False,
    )
    cpu_operations: str = _variable(
        "CPU_OPERATIONS",
        "auto",
        "What reduces, gathers and broadcasts tensors in host memory: `host`, horo's own algorithms (`gloo`, a word of "
        "Horovod's, means the same), or `mpi`, the collectives of the job's MPI, for sites where those are tuned or "
        "offloaded; `auto`: host.",
        choices=("auto", "host", "gloo", "mpi"),
    )
    transport: str = _variable(
        "TRANSPORT",
        "auto",
        "What moves data between hosts: `tcp`, or `mpi`, for the site's own network; `auto`: mpi in a job that an MPI "
        "has launched, else tcp. Agreement between hosts travels by TCP in any case.",
        choices=("auto", "tcp", "mpi"),
    )
    sockets_per_peer: int = _variable(
        "SOCKETS_PER_PEER",
        1,
        "TCP connections that share the data between two ranks of different hosts, for networks on which one "
        "connection does not reach the rate of the link.",
        low=1,
        high=8,
    )
    controller: str = _variable(
        "CONTROLLER",
        "auto",
        "How ranks learn of each other: `mpi` through mpi4py, whoever started them; `gloo` in horo's own store, as "
        "`hororun`, `torchrun` or Slurm describe it, never through MPI; `slurm` as Slurm describes it; `auto`: as who "
        "started the process needs it.",
        choices=("auto", "mpi", "gloo", "slurm"),
    )
    network_interfaces: str | None = _variable(
        "NETWORK_INTERFACES",
        None,
        "Interfaces to listen on for other hosts: names and networks (`eth0,10.1.0.0/16`), of which each host uses "
        "those that it has; by default the one that routes to the other hosts.",
        kind=str,
    )
    host_id: str | None = _variable(
        "HOST_ID",
        None,
        "Ranks with different values never share memory, as if they ran on different hosts.",
        kind=str,
    )

    @property
    def log_level_number(self) -> int:
        """``log_level`` as ``enum horo_log_level``."""
        return LOG_LEVELS.index("off" if self.log_level == "fatal" else self.log_level)

    @property
    def gradients_ready_default(self) -> str:
        """``gradients_ready``, or what it is where the user has not said it."""
        return self.gradients_ready or ("step" if self.horovod else "backward")


_RANK = {"kind": int, "low": 0, "high": (1 << 31) - 1}
_COUNT = {"kind": int, "low": 1, "high": (1 << 31) - 1}


@dataclass(frozen=True)
class LaunchVariables:
    """The variables that hororun sets for each rank."""

    rank: int | None = _variable("RANK", None, "Number of this process in the job.", **_RANK)
    size: int | None = _variable("SIZE", None, "Processes in the job.", **_COUNT)
    local_rank: int | None = _variable("LOCAL_RANK", None, "Number of this process on its host.", **_RANK)
    local_size: int | None = _variable("LOCAL_SIZE", None, "Processes of the job on this host.", **_COUNT)
    cross_rank: int | None = _variable(
        "CROSS_RANK", None, "Number of this host among those with a process of this local rank.", **_RANK
    )
    cross_size: int | None = _variable("CROSS_SIZE", None, "Hosts that have a process of this local rank.", **_COUNT)
    hostname: str | None = _variable("HOSTNAME", None, "This host's name as the user wrote it, for messages.", kind=str)
    store: str | None = _exactly(
        "HORO_STORE",
        str,
        "Where the job meets: `ADDRESS:PORT`, or several that lead to the same store, comma-separated; addresses "
        "are numeric, IPv6 in brackets.",
    )
    secret: bytes | None = _exactly(
        "HORO_SECRET",
        bytes,
        "The job's secret, which authenticates every connection; never put it on a command line. May be exported "
        "in a batch script for plain `srun` and `torchrun`, equal on all ranks.",
        low=16,
        secret=True,
    )
    job_id: str | None = _exactly(
        "HORO_JOB_ID",
        str,
        "Name of the job, the namespace of its keys in the store.",
    )
    end_pipe: str | None = _exactly(
        "HORO_END_PIPE",
        str,
        "Where this rank says what ended it: descriptor and inode of a pipe to `hororun`.",
    )

    rank_process: str | None = _exactly(
        "HORO_RANK_PROCESS",
        str,
        "Set by `init()` in a rank's own process, for those that it starts: they have inherited its place, and "
        "their `init()` is refused.",
    )


@dataclass(frozen=True)
class TorchrunVariables:
    """The variables that torchrun sets for each rank."""

    rank: int | None = _exactly("RANK", int, "Number of this process in the job.", low=0, high=(1 << 31) - 1)
    world_size: int | None = _exactly("WORLD_SIZE", int, "Processes in the job.", low=1, high=(1 << 31) - 1)
    local_rank: int | None = _exactly("LOCAL_RANK", int, "Number of this process on its host.", low=0)
    local_world_size: int | None = _exactly("LOCAL_WORLD_SIZE", int, "Processes of the job on this host.", low=1)
    group_rank: int | None = _exactly("GROUP_RANK", int, "Number of this host's agent.", low=0)
    master_addr: str | None = _exactly("MASTER_ADDR", str, "Host of torch's store.")
    master_port: int | None = _exactly("MASTER_PORT", int, "Port of torch's store.", low=1, high=65535)
    run_id: str | None = _exactly("TORCHELASTIC_RUN_ID", str, "Name of the job; part of the names of its keys.")
    restart_count: int | None = _exactly(
        "TORCHELASTIC_RESTART_COUNT", int, "How often the job was restarted; part of the names of its keys.", low=0
    )
    use_agent_store: bool | None = _exactly(
        "TORCHELASTIC_USE_AGENT_STORE", bool, "1 or `True`: the agent hosts torch's store; otherwise rank 0 does."
    )


@dataclass(frozen=True)
class MpiVariables:
    """The variables that the launcher of an MPI sets. Texts, so that stale values do not stop a lone process."""

    ompi_size: str | None = _exactly("OMPI_COMM_WORLD_SIZE", str, "Processes, said by Open MPI's mpirun.")
    ompi_rank: str | None = _exactly("OMPI_COMM_WORLD_RANK", str, "Number, said by Open MPI's mpirun.")
    pmi_size: str | None = _exactly("PMI_SIZE", str, "Processes, said by MPICH, Intel MPI or `srun --mpi=pmi2`.")
    pmi_rank: str | None = _exactly("PMI_RANK", str, "Number, said by MPICH, Intel MPI or `srun --mpi=pmi2`.")
    pmix_rank: str | None = _exactly("PMIX_RANK", str, "Number, said by PRRTE or `srun --mpi=pmix`.")


@dataclass(frozen=True)
class SlurmVariables:
    """The variables that Slurm sets. Texts, since many are also set in processes that srun did not start."""

    job_id: str | None = _exactly("SLURM_JOB_ID", str, "Number of the job; part of its name.")
    step_id: str | None = _exactly("SLURM_STEP_ID", str, "Number of the step; part of the job's name.")
    restart_count: str | None = _exactly("SLURM_RESTART_COUNT", str, "How often Slurm has started the job again.")
    procid: str | None = _exactly("SLURM_PROCID", str, "Number of this process in the step.")
    step_num_tasks: str | None = _exactly("SLURM_STEP_NUM_TASKS", str, "Processes in the step.")
    ntasks: str | None = _exactly("SLURM_NTASKS", str, "Processes, where the variable before is missing.")
    localid: str | None = _exactly("SLURM_LOCALID", str, "Number of this process on its node.")
    nodeid: str | None = _exactly("SLURM_NODEID", str, "Number of this node in the step.")
    step_tasks_per_node: str | None = _exactly("SLURM_STEP_TASKS_PER_NODE", str, "Processes on each node: `2(x3),1`.")
    step_nodelist: str | None = _exactly("SLURM_STEP_NODELIST", str, "Nodes of the step; the first has process 0.")
    job_nodelist: str | None = _exactly("SLURM_JOB_NODELIST", str, "Nodes, where the variable before is missing.")
    nodename: str | None = _exactly("SLURMD_NODENAME", str, "Slurm's name of this node.")


@dataclass(frozen=True)
class CallVariables:
    """The variables that ``horo.run`` sets for each rank."""

    store: str | None = _exactly("HORO_CALL_STORE", str, "Where the function is: `ADDRESS:PORT`, or several.")
    secret: bytes | None = _exactly(
        "HORO_CALL_SECRET", bytes, "Authenticates the connection to it.", low=16, secret=True
    )


GROUPS: tuple[type[Any], ...] = (
    Config,
    LaunchVariables,
    CallVariables,
    TorchrunVariables,
    MpiVariables,
    SlurmVariables,
)

_Group = TypeVar("_Group")


def variables_of(group: type[Any]) -> dict[str, Variable]:
    """The variables of one of ``GROUPS``, by field name."""
    return {item.name: item.metadata["variable"] for item in fields(group)}


def names_of(*groups: type[Any]) -> frozenset[str]:
    """All names under which the variables of some of ``GROUPS`` may be set."""
    return frozenset(name for group in groups for each in variables_of(group).values() for name in each.names)


def read_variables(group: type[_Group], environ: Mapping[str, str]) -> _Group:
    """Reads one of ``GROUPS`` from ``environ``.

    Raises:
        UsageError: a value is not what its variable allows.
    """
    return group(**{name: variable.read(environ) for name, variable in variables_of(group).items()})


def read_config(environ: Mapping[str, str]) -> Config:
    """Reads the user's settings from ``environ``; raises UsageError as ``read_variables`` does."""
    return read_variables(Config, environ)


def environment() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def name_for_children(text: str) -> None:
    """Sets ``HORO_RANK_PROCESS`` in the environment of this process."""
    os.environ["HORO_RANK_PROCESS"] = text


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets variables in the environment of this process."""
    os.environ.update(variables)


def drop_variables(names: Iterable[str]) -> None:
    """Removes variables from the environment of this process."""
    for name in names:
        os.environ.pop(name, None)


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable whose name resembles that of a variable that horo reads, but is not equal."""
    known = [name.removeprefix("HORO_") for name in sorted(names_of(*GROUPS))]
    known.append("HOST_MARK")  # hororun's own
    sentences = []
    for name in sorted(environ):
        rest = name.removeprefix("HORO_")
        if rest == name or rest in known:
            continue
        near = difflib.get_close_matches(rest, known, 1, 0.82)
        if near:
            sentences.append(f"{name} is no variable of horo and means nothing: did you mean HORO_{near[0]}?")
    return sentences
