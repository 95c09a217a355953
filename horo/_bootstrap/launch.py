"""Which launcher started this process, and what it said: hororun, torchrun or nobody.

An environment that is half there is an error: a rank that took itself for a lone process would train alone, silently.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from horo._bootstrap.addresses import Endpoint, parse_endpoints
from horo._config import LaunchVariables, OtherLaunchers, TorchrunVariables, read_variables, variables_of
from horo._errors import UnsupportedError, UsageError

__all__ = ["Launch", "Place", "TorchMaster", "detect_launch"]

_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
"""Steps from here on are batch scripts and interactive shells, not srun's."""


class Place(NamedTuple):
    """Where a rank is among the hosts, in Horovod's words."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class TorchMaster(NamedTuple):
    """torch's own store."""

    address: str
    port: int
    hosted_by_agent: bool


@dataclass(frozen=True)
class Launch:
    """What the launcher said about this process."""

    kind: Literal["hororun", "torchrun", "none"]
    rank: int
    size: int
    host_name: str
    job_id: str = "job"
    """Namespace of this job's keys in the store."""
    local: tuple[int, int] | None = None
    """Local rank and size as the launcher counts them, else None."""
    cross: tuple[int, int] | None = None
    """Cross rank and size as the launcher counts them, else None."""
    node: int | None = None
    """The launcher's number of this host, else None."""
    endpoints: tuple[Endpoint, ...] = ()
    """hororun's store."""
    secret: bytes | None = None
    torch_master: TorchMaster | None = None


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Reads who started this process.

    Raises:
        UsageError: variables of a launcher are missing, contradict each other or are no numbers; names them.
        UnsupportedError: mpirun or srun started several ranks, which horo does not serve yet.
    """
    own = read_variables(LaunchVariables, environ)
    host_name = own.hostname or socket.gethostname()
    if any(getattr(own, name) is not None for name in ("rank", "size", "local_rank", "cross_rank", "store", "secret")):
        return _from_hororun(own, host_name)
    torchrun_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    if any(environ.get(name) for name in torchrun_names):
        return _from_torchrun(read_variables(TorchrunVariables, environ), host_name)
    _refuse_others(read_variables(OtherLaunchers, environ))
    return Launch("none", 0, 1, host_name)


def _from_hororun(own: LaunchVariables, host_name: str) -> Launch:
    if own.rank is None or own.size is None:
        raise _half_there(own, ["rank", "size"])
    if own.size > 1 or own.store is not None or own.secret is not None:
        missing = [name for name in ("store", "secret") if getattr(own, name) is None]
        if missing:
            raise _half_there(own, missing)
    _check_below(own, "rank", "size")
    _check_below(own, "local_rank", "local_size")
    _check_below(own, "cross_rank", "cross_size")
    for name in ("local_size", "cross_size"):
        value = getattr(own, name)
        if value is not None and value > own.size:
            raise UsageError(f"{_shown(own, name)} is more than {_shown(own, 'size')}")
    return Launch(
        "hororun",
        own.rank,
        own.size,
        host_name,
        job_id=own.job_id or "job",
        local=_both(own.local_rank, own.local_size),
        cross=_both(own.cross_rank, own.cross_size),
        endpoints=tuple(parse_endpoints(own.store)) if own.store is not None else (),
        secret=own.secret,
    )


def _from_torchrun(torch: TorchrunVariables, host_name: str) -> Launch:
    if torch.rank is None or torch.world_size is None:
        raise _half_there(torch, ["rank", "world_size"])
    _check_below(torch, "rank", "world_size")
    if torch.local_world_size is not None:
        _check_below(torch, "local_rank", "local_world_size")
    master = None
    if torch.world_size > 1:
        if torch.master_addr is None or torch.master_port is None:
            raise _half_there(torch, ["master_addr", "master_port"])
        master = TorchMaster(torch.master_addr, torch.master_port, torch.use_agent_store == "True")
    return Launch(
        "torchrun",
        torch.rank,
        torch.world_size,
        host_name,
        job_id=f"{torch.run_id or 'none'}/{torch.restart_count or 0}",
        local=_both(torch.local_rank, torch.local_world_size),
        node=torch.group_rank,
        torch_master=master,
    )


def _refuse_others(others: OtherLaunchers) -> None:
    for name in ("ompi_size", "pmi_size"):
        if _count(getattr(others, name)) > 1:
            raise _unsupported(others, name, "mpirun")
    step = _count(others.slurm_step_id)
    in_step = others.slurm_step_id is not None and others.slurm_procid is not None and step < _SLURM_SPECIAL_STEPS
    name = "slurm_ntasks" if others.slurm_step_num_tasks is None else "slurm_step_num_tasks"
    if in_step and _count(getattr(others, name)) > 1:
        raise _unsupported(others, name, "srun")


def _unsupported(others: OtherLaunchers, name: str, launcher: str) -> UnsupportedError:
    return UnsupportedError(
        f"{_shown(others, name)}: this process seems to be one of several started by {launcher}, which horo does not "
        "offer yet; start the job with hororun or torchrun"
    )


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def _both(rank: int | None, size: int | None) -> tuple[int, int] | None:
    return None if rank is None or size is None else (rank, size)


def _check_below(group: Any, rank: str, size: str) -> None:
    number, count = getattr(group, rank), getattr(group, size)
    if (number is None) != (count is None):
        raise _half_there(group, [rank, size])
    if number is not None and number >= count:
        raise UsageError(f"{_shown(group, rank)} is not below {_shown(group, size)}")


def _half_there(group: Any, needed: list[str]) -> UsageError:
    variables = variables_of(type(group))
    missing = [" or ".join(variables[name].names) for name in needed if getattr(group, name) is None]
    present = [name for name in variables if getattr(group, name) is not None]
    shown = ", ".join(_shown(group, name) for name in present)
    return UsageError(
        f"the environment of this rank is half there: {shown} set, but not {', '.join(missing)}; start the job with "
        "hororun or torchrun, or unset these variables to run a single process"
    )


def _shown(group: Any, name: str) -> str:
    variable = variables_of(type(group))[name]
    label = variable.names[-1]
    return label if variable.secret else f"{label}={getattr(group, name)}"
