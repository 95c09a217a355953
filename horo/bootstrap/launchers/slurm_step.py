"""Reads the Slurm step of this process from its variables. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from horo.config.hosts import SPECIAL_STEPS, parse_counts, parse_host_list
from horo.config.table import SlurmVariables, read_variables, variables_of
from horo.errors import UsageError

__all__ = ["SlurmStep", "is_lone_step", "missed_tasks", "read_step"]

_INTERACTIVE_STEP = 0xFFFFFFFA
"""The shell of salloc, where Slurm runs that on a node."""


class SlurmStep(NamedTuple):
    """One process of a step that srun started with several."""

    rank: int
    size: int
    name: str
    """Number of the job, of the step, and of restarts of the job; unique on this cluster."""
    hosts: tuple[str, ...]
    """Nodes of the step; process 0 is on the first, whatever the distribution."""
    node: int
    """Number of this process's node among them."""
    node_name: str | None
    local: tuple[int, int] | None
    """Local rank and size; None if Slurm does not set both."""


def read_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step of this process; None if it is no process of srun, or the only one.

    Raises:
        UsageError: srun started several processes, but a variable about this one is damaged; the message names it.
    """
    said = read_variables(SlurmVariables, environ)
    size = _count(said.step_num_tasks if said.step_num_tasks is not None else said.ntasks)
    step = _count(said.step_id)
    if said.step_id is None or step >= SPECIAL_STEPS or said.procid is None or size < 2:
        return None
    hosts = _hosts(said)
    rank, node = _number(said, "procid", size), _number(said, "nodeid", len(hosts), missing=0)
    name = f"{said.job_id or 'none'}.{step}.{_count(said.restart_count)}"
    return SlurmStep(rank, size, name, hosts, node, said.nodename, _local(said, node))


def is_lone_step(environ: Mapping[str, str]) -> bool:
    """Whether Slurm started this process, or the shell around it, as the only one of its step."""
    said = read_variables(SlurmVariables, environ)
    size = _count(said.step_num_tasks if said.step_num_tasks is not None else said.ntasks)
    return said.step_id is not None and (size == 1 or _count(said.step_id) >= SPECIAL_STEPS)


def missed_tasks(environ: Mapping[str, str], script: str) -> str:
    """A warning for a process that runs alone in a Slurm job of several tasks, possibly by mistake; else empty.

    SLURM_PROCID is set in a batch script and in processes that srun starts. It is not set in the shell of salloc, where
    a command means one process. ``srun -n 1`` sets SLURM_NTASKS=1. ``script``: name of the script, for the warning.
    """
    said = read_variables(SlurmVariables, environ)
    tasks = _count(said.ntasks)
    if tasks < 2 or said.procid is None or _count(said.step_id) == _INTERACTIVE_STEP:
        return ""
    alone = f"this process is alone (size 1), but the Slurm job has {tasks} tasks ({_name('ntasks')}={said.ntasks}): "
    if said.step_id is None and _count(said.procid):
        return (
            f"{alone}srun has started it ({_name('procid')}={said.procid}), and {_name('step_id')} has not reached it, "
            "as in a container with a clean environment: let the variables SLURM_* through"
        )
    return f"{alone}start it with 'srun python {script}' or 'hororun {script}'"


def _hosts(said: SlurmVariables) -> tuple[str, ...]:
    field = "step_nodelist" if said.step_nodelist is not None else "job_nodelist"
    text: str | None = getattr(said, field)
    if text is None:
        raise UsageError(
            f"SLURM_PROCID={said.procid}: srun started this process, but SLURM_STEP_NODELIST, which names the nodes, "
            "is missing; start the job with srun or hororun, or unset SLURM_PROCID to run a single process"
        )
    try:
        return tuple(parse_host_list(text))
    except ValueError as error:
        raise UsageError(f"{_name(field)}: {error}") from None


def _local(said: SlurmVariables, node: int) -> tuple[int, int] | None:
    if said.localid is None or said.step_tasks_per_node is None:
        return None
    try:
        counts = parse_counts(said.step_tasks_per_node)
    except ValueError as error:
        raise UsageError(f"{_name('step_tasks_per_node')}: {error}") from None
    if node >= len(counts):
        return None
    return _number(said, "localid", counts[node]), counts[node]


def _number(said: SlurmVariables, field: str, below: int, missing: int | None = None) -> int:
    text: str | None = getattr(said, field)
    if text is None and missing is not None:
        return missing
    if text is None or not _is_number(text) or int(text) >= below:
        raise UsageError(f"{_name(field)}={text!r} is no number below {below}, which it is in a step of srun")
    return int(text)


def _count(text: str | None) -> int:
    return int(text) if text is not None and _is_number(text) else 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _name(field: str) -> str:
    return variables_of(SlurmVariables)[field].names[0]
