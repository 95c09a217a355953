"""The table of all settings, and every other variable that horo reads; the library reads the environment only here.

Each variable is a field of one of the frozen dataclasses in ``GROUPS``, with its name, kind, unit, default, range and
meaning. A setting also has its options of hororun and its place in a file of Horovod's form. From them come
``docs/reference/environment.md``, the options in ``hororun --help`` and the keys of ``--config-file``. ``HORO_X`` takes
precedence over ``HOROVOD_X``. An empty value counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from horo.config.launch_variables import (
    CallVariables,
    HororunVariables,
    LaunchVariables,
    MpiVariables,
    SlurmVariables,
    TorchrunVariables,
)
from horo.config.sources import ARGUMENT, DEFAULT, read_sources
from horo.config.variable import (
    Option,
    Variable,
    check_settings,
    exact_variable,
    names_of,
    parse_ports,
    read_variables,
    variable,
    variables_of,
)

__all__ = [
    "GROUPS",
    "LOG_LEVELS",
    "CallVariables",
    "Config",
    "HororunVariables",
    "LaunchVariables",
    "MpiVariables",
    "Option",
    "SlurmVariables",
    "TorchrunVariables",
    "Variable",
    "check_arguments",
    "drop_variables",
    "environment",
    "name_for_children",
    "names_of",
    "read_config",
    "read_variables",
    "set_variables",
    "variables_of",
]

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "off")
"""In the order of ``enum horo_log_level``."""


_ENABLED = "autotune: enabled"


@dataclass(frozen=True)
class Config:
    """The settings of the user."""

    fusion_threshold: int = variable(
        "FUSION_THRESHOLD",
        128 << 20,
        "Most bytes of small tensors in one batch; 0 sends every tensor alone.",
        Option(
            "--fusion-threshold-mb",
            "fuse tensors up to this size",
            "MB",
            scale=1 << 20,
            unit="MB",
            key="params: fusion_threshold_mb",
        ),
        unit="bytes",
        low=0,
        high=1 << 40,
    )
    cycle_time_ms: float = variable(
        "CYCLE_TIME",
        0.0,
        "Extra wait for more tensors before a batch is formed. 0: a batch is formed as soon as the link is free.",
        Option("--cycle-time-ms", "wait so long for more tensors to fuse", "MS", key="params: cycle_time_ms"),
        unit="ms",
        low=0,
        high=1000,
    )
    cache_capacity: int = variable(
        "CACHE_CAPACITY",
        4096,
        "Tensors that are announced by number after their first time, at 0.2 to 0.6 KiB each; 0 turns that off.",
        Option("--cache-capacity", "responses remembered; 0: none", "N", key="params: cache_capacity"),
        low=0,
        high=1 << 20,
    )
    stall_check_disable: bool = variable(
        "STALL_CHECK_DISABLE",
        False,
        "1: no warnings about late ranks, no check for deadlocks, no end of waits.",
        Option(
            "--no-stall-check",
            "never warn about ranks that fall behind",
            value="1",
            key="stall_check: enabled",
            stands_for=False,
        ),
        Option("--stall-check", "warn (the default), against the environment", value="0", key="stall_check: enabled"),
    )
    stall_check_time_s: float = variable(
        "STALL_CHECK_TIME_SECONDS",
        60.0,
        "Wait for the ranks that have not submitted a tensor before a warning names them; 0: no check at all.",
        Option(
            "--stall-check-warning-time-seconds", "warn after this time", "S", key="stall_check: warning_time_seconds"
        ),
        unit="s",
        low=0,
        high=1e6,
    )
    stall_shutdown_time_s: float = variable(
        "STALL_SHUTDOWN_TIME_SECONDS",
        600.0,
        "Wait for the ranks that have not submitted a tensor before it fails with StalledError; 0: wait for ever.",
        Option(
            "--stall-check-shutdown-time-seconds",
            "give up after this time; 0: never",
            "S",
            key="stall_check: shutdown_time_seconds",
        ),
        unit="s",
        low=0,
        high=1e6,
    )
    deadlock_time_s: float = variable(
        "DEADLOCK_TIME_SECONDS",
        1.0,
        "Time for which a rank waits before it reports that to rank 0. If all ranks wait and nothing can finish, "
        "DeadlockError ends the job within a second more.",
        Option("--deadlock-time-seconds", "a rank that waits for so long reports that", "S"),
        unit="s",
        low=0.1,
        high=1e6,
    )
    log_level: str = variable(
        "LOG_LEVEL",
        "warning",
        "Least severe message that is logged, unless the program has set a level for the logger `horo` (see Logging). "
        "`fatal`, a word of Horovod's, means `off`.",
        Option("--log-level", "trace, debug, info, warning (the default), error or off", "LEVEL", key="logging: level"),
        choices=(*LOG_LEVELS, "fatal"),
    )
    timeline: str | None = variable(
        "TIMELINE",
        None,
        "File for a timeline, from init() on: rank 0's, or with `{rank}` in it one of each rank. A second init() of "
        "the process writes `t.2.json` for `t.json`. Horovod's `DYNAMIC`: none before start_timeline().",
        Option("--timeline-filename", "write a timeline; {rank} in it: of each rank", "FILE", key="timeline: filename"),
        kind=str,
    )
    timeline_mark_cycles: bool = variable(
        "TIMELINE_MARK_CYCLES",
        False,
        "1: that timeline marks the beginning of each batch, as `CYCLE_START`.",
        Option(
            "--timeline-mark-cycles", "mark the beginnings of batches in it", value="1", key="timeline: mark_cycles"
        ),
        Option(
            "--no-timeline-mark-cycles",
            "do not (the default), against the environment",
            value="0",
            key="timeline: mark_cycles",
            stands_for=False,
        ),
    )
    start_timeout_s: float = variable(
        "START_TIMEOUT",
        60.0,
        "Wait of init() for other ranks, without any progress, before it fails and names the missing ones.",
        Option("--start-timeout", "for all hosts to answer, and for init()", "S", is_shared=True),
        unit="s",
        low=0.1,
        high=1e6,
    )
    peer_timeout_s: float = variable(
        "PEER_TIMEOUT",
        30.0,
        "Silence of another host, while something is awaited from it, after which it counts as lost.",
        Option("--peer-timeout", "a host from which nothing comes for so long, where it should, is lost", "S"),
        unit="s",
        low=0.1,
        high=1e6,
    )
    segment_bytes: int | None = variable(
        "SEGMENT_BYTES",
        None,
        "Size of the pieces in which large tensors pass through shared memory; unset: 256 KiB in a job of one host, "
        "1 MiB in a job of several.",
        Option("--segment-bytes", "pieces in which large tensors pass through shared memory", "BYTES"),
        kind=int,
        unit="bytes",
        low=4096,
        high=1 << 30,
        multiple_of=4096,
    )
    spin_us: int = variable(
        "SPIN_US",
        1000,
        "Longest busy wait of a call before it sleeps; it yields its core to other processes. The background thread "
        "waits busily for a twentieth of it.",
        Option("--spin-us", "longest busy wait of a call", "US"),
        kind=int,
        unit="us",
        low=0,
        high=1_000_000,
    )
    leave_crowded_cores: bool = variable(
        "LEAVE_CROWDED_CORES",
        False,
        "1: a waiting thread may move, within its affinity, from a core that several ranks use to one that fewer use; "
        "`hororun` sets it.",
        Option("--no-move-ranks", "leave waiting ranks on the cores they are on", value="0"),
    )
    single_copy: bool = variable(
        "SINGLE_COPY",
        True,
        "1: in a larger broadcast, allgather, alltoall or reducescatter, ranks of one host read each other's memory, "
        "if the system permits that to all of them; a line at level `info` names the way. 0: data passes through "
        "shared memory.",
        Option("--no-single-copy", "ranks do not read each other's memory", value="0"),
    )
    overlap: str = variable(
        "OVERLAP",
        "auto",
        "When gradients travel: `always` while backward still runs, `never` at its end (with "
        "`HORO_GRADIENTS_READY=step`: at `step()` or `synchronize()`). `auto`: `never` if one host runs the whole job "
        "and all its cores compute, else `always`.",
        Option("--overlap", "when gradients travel: auto (the default), always or never", "WHEN"),
        choices=("auto", "always", "never"),
    )
    gradients_ready: str | None = variable(
        "GRADIENTS_READY",
        None,
        "When gradients are averaged, unless `DistributedOptimizer(gradients_ready=)` is given: `backward`, when "
        "`backward()` returns, or `step`, at `synchronize()` or `step()`, as in Horovod. Not set: `backward`; with "
        "`HORO_HOROVOD`, `step`.",
        Option("--gradients-ready", "gradients are averaged when backward() returns, or at the step", "WHEN"),
        kind=str,
        choices=("backward", "step"),
    )
    first_checks: bool = variable(
        "FIRST_CHECKS",
        True,
        "1: ranks compare parameters at the first step, by checksums, and gradients after three steps. Different "
        "parameters are an error, equal gradients a warning.",
        Option("--no-first-checks", "ranks do not compare parameters at the first step", value="0"),
    )
    check_nan: bool = variable(
        "CHECK_NAN",
        False,
        "1: a NaN or infinite value in a gradient is an error on all ranks, with the rank, parameter and step. "
        "Gradients then travel at the end of backward. Not with a `GradScaler`, which makes infinite ones on purpose.",
        Option("--check-nan", "NaN in a gradient of any rank is an error", value="1"),
    )
    horovod: bool = exact_variable(
        "HORO_HOROVOD",
        bool,
        "1: the job's scripts are written for Horovod. `hororun --horovod` and `python -m horo.horovod` set it, "
        "and let Python find horo as `horovod`.",
        Option("--horovod", "for a script written for Horovod: its names are those of horo", value="1", is_shared=True),
        default=False,
        is_argument=False,
    )
    gpu_operations: str = variable(
        "GPU_OPERATIONS",
        "staged",
        "How tensors on GPUs travel: `staged`, through host memory (Horovod's `mpi` means the same), or `nccl`, from "
        "GPU to GPU (see Use GPUs), which has not run on a GPU yet.",
        Option("--gpu-operations", "staged (the default) or nccl", "WHAT"),
        choices=("staged", "mpi", "nccl"),
    )
    transport: str = variable(
        "TRANSPORT",
        "auto",
        "How data travels between hosts: by `tcp` or `mpi`. `auto`: `mpi` in a job that an MPI has launched, else "
        "`tcp`. Agreement between hosts always travels by TCP.",
        Option("--transport", "between hosts: auto (the default), tcp or mpi", "WAY"),
        choices=("auto", "tcp", "mpi"),
    )
    sockets_per_peer: int = variable(
        "SOCKETS_PER_PEER",
        1,
        "TCP connections that share the data between two ranks of different hosts, if one connection does not reach "
        "the rate of the link.",
        Option("--sockets-per-peer", "connections between two ranks of different hosts; default: 1", "N"),
        low=1,
        high=8,
    )
    autotune: bool = variable(
        "AUTOTUNE",
        False,
        "1: rank 0 tries other sizes, switch points and numbers of sockets, and keeps those that make steps shorter. "
        "The other settings are its start.",
        Option("--autotune", "look for better sizes and switch points while the job runs", value="1", key=_ENABLED),
        Option(
            "--no-autotune",
            "keep them (the default), against the environment",
            value="0",
            key=_ENABLED,
            stands_for=False,
        ),
    )
    autotune_log: str | None = variable(
        "AUTOTUNE_LOG",
        None,
        "File on rank 0's host in which each sample of autotuning is a line of CSV; an earlier one is replaced.",
        Option("--autotune-log-file", "where each of its samples is written, as CSV", "FILE", key="autotune: log_file"),
        kind=str,
    )
    autotune_warmup_samples: int = variable(
        "AUTOTUNE_WARMUP_SAMPLES",
        3,
        "Samples of autotuning at the start of the job that do not count.",
        Option("--autotune-warmup-samples", "first samples that do not count", "N", key="autotune: warmup_samples"),
        low=0,
        high=1_000_000,
    )
    autotune_steps_per_sample: int = variable(
        "AUTOTUNE_STEPS_PER_SAMPLE",
        10,
        "Steps of the program in one sample of autotuning, whose median counts.",
        Option("--autotune-steps-per-sample", "steps in a sample", "N", key="autotune: steps_per_sample"),
        low=1,
        high=1000,
    )
    autotune_max_samples: int = variable(
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        40,
        "Most samples of autotuning before the best values are compared with the first. The name is Horovod's.",
        Option(
            "--autotune-bayes-opt-max-samples",
            "samples before the comparison at the end, at most",
            "N",
            key="autotune: bayes_opt_max_samples",
        ),
        low=1,
        high=1_000_000,
    )
    controller: str = variable(
        "CONTROLLER",
        "auto",
        "How ranks find each other: `mpi` by mpi4py; `gloo` by the store that `hororun`, `torchrun` or Slurm describe,"
        " never by MPI; `slurm` as Slurm describes; `auto`: by the launcher of the process.",
        choices=("auto", "mpi", "gloo", "slurm"),
    )
    network_interfaces: str | None = variable(
        "NETWORK_INTERFACES",
        None,
        "Interfaces for other hosts: names and networks (`eth0,10.1.0.0/16`), of which each host needs at least one. "
        "Default: the one that routes to the other hosts.",
        Option("--network-interfaces", "interfaces and networks for other hosts", "A,B", is_shared=True),
        kind=str,
    )
    port_range: str | None = variable(
        "PORT_RANGE",
        None,
        "Ports on which horo listens, for a firewall between the hosts: of the job's store, of ranks while they "
        "connect, of `hororun --check-hosts`, and `MASTER_PORT` for `torch.distributed`. Each host needs one per rank "
        "and two more. Default: the system chooses.",
        Option("--port-range", "ports on which horo listens: 40000-40100", "FIRST-LAST"),
        kind=str,
        form="a range of ports as 40000-40100, from 1024 to 65535",
        check_form=parse_ports,
    )
    host_id: str | None = variable(
        "HOST_ID",
        None,
        "Ranks with different values never share memory, as if they ran on different hosts.",
        kind=str,
    )

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """By name, as ``source()`` returns them."""

    @property
    def ports(self) -> range | None:
        """The ports of ``port_range``; None: any."""
        return None if self.port_range is None else parse_ports(self.port_range)

    def source(self, name: str) -> str:
        """The source of the value of a setting, as ``Settings.source()`` returns it."""
        return self.sources.get(name, DEFAULT)

    def told(self, name: str) -> str:
        """A setting with its value, for messages: as the argument or the variable that the user has set."""
        source, setting, value = self.source(name), variables_of(Config)[name], getattr(self, name)
        if source == ARGUMENT:
            return f"init({name}={value!r})"
        shown = value if setting.choices else f"{value:d}" if setting.kind is bool else repr(value)
        if source in setting.names:
            return f"{source}={shown}"
        return f"{setting.names[0]}={shown}" + (f" ({source})" if source != DEFAULT else "")

    @property
    def log_level_number(self) -> int:
        """``log_level`` as ``enum horo_log_level``."""
        return LOG_LEVELS.index("off" if self.log_level == "fatal" else self.log_level)

    @property
    def gradients_ready_default(self) -> str:
        """``gradients_ready``, or its default where the user has not set it."""
        return self.gradients_ready or ("step" if self.horovod else "backward")


GROUPS: tuple[type[Any], ...] = (
    Config,
    HororunVariables,
    LaunchVariables,
    CallVariables,
    TorchrunVariables,
    MpiVariables,
    SlurmVariables,
)


def read_config(environ: Mapping[str, str], arguments: Mapping[str, Any] | None = None) -> Config:
    """Reads the user's settings from the arguments of ``init()`` and from ``environ``.

    Raises:
        UsageError: a value is not what its variable allows, or an argument is no setting.
    """
    given = check_arguments(arguments or {})
    read = {name: each.read(environ) for name, each in variables_of(Config).items() if name not in given}
    sources = {**read_sources(variables_of(Config), environ), **dict.fromkeys(given, ARGUMENT)}
    return Config(**read, **given, sources=sources)


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the arguments of ``init()``, as ``Config`` has them; see ``check_settings``."""
    return check_settings(variables_of(Config), arguments)


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
