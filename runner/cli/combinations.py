"""Options that make no sense together, or with this launcher, or on one host: each is an error that names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from horo.runner.config import JobError

__all__ = [
    "check_combinations",
    "check_elastic",
    "check_launcher",
    "check_one_host",
    "excluded_by",
    "useless_for_horovod",
]

_OWN = frozenset({"ssh", "slurm"})
_BY_SSH = frozenset({"ssh", "mpi"})
_FOREIGN = frozenset({"mpi", "jsrun"})
_NOT_JSRUN = frozenset({"ssh", "slurm", "mpi"})
_LAUNCHERS_OF = {
    "bind_to": _OWN,
    "bind_gpus": _OWN,
    "failure_seconds": _OWN,
    "host_timeout": _OWN,
    "remote_python": _OWN,
    "store_port": _OWN,
    "master_port": _OWN,
    "no_torch_env": _OWN,
    "min_np": _OWN,
    "max_np": _OWN,
    "reset_limit": _OWN,
    "elastic_timeout": _OWN,
    "elastic_dir": _OWN,
    "host_discovery_script": _OWN,
    "slots_per_host": _OWN,
    "elastic_join": _OWN,
    "on_failure": _OWN,
    "blacklist_cooldown_range": _OWN,
    "check_hosts": _OWN,
    "json_report": _OWN,
    "output": _OWN,
    "summary": _OWN,
    "no_summary": _OWN,
    "live": _OWN,
    "metrics_port": _OWN,
    "prefix_host": _OWN,
    "ssh_port": _BY_SSH,
    "ssh_identity_file": _BY_SSH,
    "ssh_args": _BY_SSH,
    "remote_shell": _BY_SSH,
    "mpirun": frozenset({"mpi"}),
    "mpi_args": _FOREIGN,
    "binding_args": _FOREIGN,
    "tcp": _FOREIGN,
    "network_interfaces": _NOT_JSRUN,
    "prefix_timestamp": _NOT_JSRUN,
    "oversubscribe": _NOT_JSRUN,
}
"""The launchers that an option is for, where it is not for all of them."""
_FOR_REMOTE_HOSTS = (
    "ssh_port",
    "ssh_identity_file",
    "ssh_args",
    "remote_shell",
    "remote_python",
    "host_timeout",
)
_FOR_CHECK_HOSTS = frozenset(
    {
        "check_hosts",
        "hosts",
        "hostfile",
        "launcher",
        "network_interfaces",
        "port_range",
        "start_timeout",
        "verbose",
        *_FOR_REMOTE_HOSTS,
    }
)
_IDLE_IN_HOROVOD = ("mpi_args", "binding_args", "tcp", "ssh_port", "ssh_identity_file")
"""Options that Horovod takes in every job, whether they do something there or not."""
_ELASTIC = (
    "max_np",
    "reset_limit",
    "elastic_timeout",
    "elastic_dir",
    "elastic_join",
    "on_failure",
    "blacklist_cooldown_range",
)
"""Options that have a meaning in elastic jobs only."""
_NOT_ELASTIC = ("no_torch_env", "master_port", "timeline_merge", "bind_to", "bind_gpus", "check_hosts", "bench")
"""Options that an elastic job does not have: what they set is fixed at the start of a job."""
_EXCLUDED = {
    "master_port": "no_torch_env",
    "prefix_timestamp": "no_prefix",
    "stall_check_warning_time_seconds": "no_stall_check",
    "stall_check_shutdown_time_seconds": "no_stall_check",
}
"""Options that another one makes useless."""


def check_combinations(given: Mapping[str, str], command: Sequence[str]) -> None:
    """Checks the options without regard to hosts and launcher.

    Args:
        given: by destination, the options as the user spelt them.
        command: of the ranks.

    Raises:
        JobError: one option has no effect beside another; names both.
    """
    if "stacks" in given and "attach" not in given:
        raise JobError(f"{given['stacks']} is for a job that runs: add --attach PID, or leave it out")
    for alone, allowed, what in (
        ("attach", frozenset({"attach", "stacks"}), "shows a job that runs, and starts nothing"),
        ("check_build", frozenset({"check_build", "horovod"}), "looks at this installation and starts nothing"),
        ("check_hosts", _FOR_CHECK_HOSTS, "starts no rank"),
    ):
        if alone not in given:
            continue
        useless = next((option for name, option in given.items() if name not in allowed), None)
        if useless is not None:
            raise JobError(f"{given[alone]} {what}: leave out {useless}")
        if command:
            raise JobError(f"{given[alone]} {what}: leave out the command {command[0]!r}")
    for name, other in excluded_by(given).items():
        if name in given and other in given:
            raise JobError(f"{given[name]} has no effect beside {given[other]}: leave out one of them")


def check_elastic(given: Mapping[str, str], *, for_horovod: bool) -> tuple[str, ...]:
    """Checks the options of an elastic job, which ``--min-np`` or ``--host-discovery-script`` asks for.

    Returns:
        Sentences about options that do nothing, as they may for Horovod's scripts.

    Raises:
        JobError: an option is for elastic jobs only, or for other jobs only.
    """
    script = given.get("host_discovery_script")
    named = next((given[name] for name in ("hosts", "hostfile") if name in given), None)
    if script and named:
        raise JobError(f"{script} and {named} both name hosts: leave out one of them")
    if "slots_per_host" in given and not script and not for_horovod:
        raise JobError(f"{given['slots_per_host']} is for hosts of --host-discovery-script: add that, or leave it out")
    if not script and "min_np" not in given:
        useless = [given[name] for name in (*_ELASTIC, "slots_per_host") if name in given]
        if useless and not for_horovod:
            raise JobError(f"{useless[0]} is for an elastic job: add --min-np N, or leave it out")
        return tuple(f"{option} does nothing here: a job without --min-np is not elastic" for option in useless)
    for name in _NOT_ELASTIC:
        if name in given:
            asked = script or "--min-np"
            raise JobError(f"{given[name]} is not for an elastic job, which {asked} asks for: leave out one of them")
    return ()


def excluded_by(given: Collection[str]) -> dict[str, str]:
    """By destination of an option that another one makes useless, the destination of that one.

    Args:
        given: the destinations of the options that are there.
    """
    excluded = dict(_EXCLUDED)
    if "output_filename" not in given:  # its folders are named by it
        excluded["prefix_host"] = "no_prefix"
    return excluded


def check_launcher(given: Mapping[str, str], launcher: str) -> str | None:
    """A sentence about an option that does not fit the launcher; None: all fit."""
    for name, option in given.items():
        launchers = _LAUNCHERS_OF.get(name)
        if launchers is not None and launcher not in launchers:
            names = " and ".join(sorted(launchers))
            return f"{option} is for --launcher {names}; ranks of this job are started by {launcher}"
    return None


def useless_for_horovod(given: Mapping[str, str], launcher: str, has_hosts: bool) -> dict[str, str]:
    """By destination, a sentence for each option of Horovod's that does nothing in a job.

    Args:
        given: by destination, the options as the user spelt them.
        launcher: of the job.
        has_hosts: somebody has named hosts.
    """
    useless = {}
    for name in _IDLE_IN_HOROVOD:
        if name in given and launcher not in _LAUNCHERS_OF[name]:
            useless[name] = f"{given[name]} does nothing here: ranks of this job are started by {launcher}"
        elif name in given and name in _FOR_REMOTE_HOSTS and not has_hosts:
            useless[name] = f"{given[name]} does nothing here: this job has no remote hosts"
    return useless


def check_one_host(given: Mapping[str, str]) -> None:
    """Checks a job for which nobody has named hosts.

    Raises:
        JobError: an option is for remote hosts only.
    """
    for name in _FOR_REMOTE_HOSTS:
        if name in given:
            raise JobError(
                f"{given[name]} is for remote hosts, and this job has none: name them with -H or --hostfile, or leave "
                "it out"
            )
