"""Reads from the environment which launcher started this process: hororun, torchrun, Slurm or none.

An incomplete environment is an error: otherwise a rank would run as a single process and train alone.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from horo.bootstrap.host.grouping import index_among
from horo.bootstrap.launchers.slurm_step import SlurmStep, read_step
from horo.bootstrap.net.addresses import Endpoint, parse_endpoints
from horo.config.table import LaunchVariables, TorchrunVariables, read_variables, variables_of
from horo.errors import UsageError

if TYPE_CHECKING:
    from horo.bootstrap.mpi.world import MpiWorld

__all__ = ["Launch", "Place", "TorchMaster", "read_launch", "read_slurm_launch", "subset"]


class Place(NamedTuple):
    """The place of a rank among the hosts, in Horovod's terms."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class TorchMaster(NamedTuple):
    """torch's own store."""

    address: str
    port: int
    served_by_agent: bool


@dataclass(frozen=True)
class Launch:
    """The launcher's facts about this process."""

    kind: Literal["hororun", "torchrun", "mpi", "slurm", "none"]
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
    secret: bytes | None = field(default=None, repr=False)
    torch_master: TorchMaster | None = None
    slurm: SlurmStep | None = None
    mpi: MpiWorld | None = None
    ranks: tuple[int, ...] | None = None
    """The numbers of this job's ranks among the started processes; None if the job has all of them."""
    generation: int | None = None
    """The number of this start of an elastic job, by its driver; None: processes count their starts themselves."""

    @property
    def started_rank(self) -> int:
        """Number of this process among those that were started."""
        return self.rank if self.ranks is None else self.ranks[self.rank]


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Reads from the environment which launcher has started this process; ``detect`` also asks MPI.

    Raises:
        UsageError: variables of a launcher are missing, contradict each other or are no numbers; names them.
    """
    own = read_variables(LaunchVariables, environ)
    host_name = own.hostname or socket.gethostname()
    if any(getattr(own, name) is not None for name in ("rank", "size", "local_rank", "cross_rank", "store")):
        return _from_hororun(own, host_name)
    torchrun_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    if any(environ.get(name) for name in torchrun_names):
        return replace(_from_torchrun(read_variables(TorchrunVariables, environ), host_name), secret=own.secret)
    return read_slurm_launch(environ) or Launch("none", 0, 1, host_name)


def read_slurm_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launch from Slurm's variables; None if srun did not start this process as one of several.

    Raises:
        UsageError: srun did, but its variables are damaged; names them.
    """
    step = read_step(environ)
    if step is None:
        return None
    own = read_variables(LaunchVariables, environ)
    return Launch(
        "slurm",
        step.rank,
        step.size,
        own.hostname or socket.gethostname(),
        job_id=step.name,
        local=step.local,
        node=step.node,
        secret=own.secret,
        slurm=step,
    )


def subset(launch: Launch, ranks: Sequence[Any]) -> Launch:
    """The job of some of the processes that were started; a rank's number is its place in ``ranks``.

    Raises:
        UsageError: ``ranks`` names no or unknown ranks, one twice, or not this one.
    """
    index, chosen = index_among(ranks, launch.rank, launch.size)
    master = launch.torch_master
    if master is not None and not master.served_by_agent and 0 not in chosen:
        raise UsageError(
            f"init(comm={list(chosen)}): where torchrun's agent does not serve the store, rank 0 does, so it must be "
            "among the ranks"
        )
    digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]
    return replace(
        launch,
        rank=index,
        size=len(chosen),
        job_id=f"{launch.job_id}/{digest}",
        local=None,
        cross=None,
        ranks=chosen,
    )


def _from_hororun(own: LaunchVariables, host_name: str) -> Launch:
    if own.rank is None or own.size is None:
        raise _incomplete(own, ["rank", "size"])
    if own.size > 1 or own.store is not None or own.secret is not None:
        missing = [name for name in ("store", "secret") if getattr(own, name) is None]
        if missing:
            raise _incomplete(own, missing)
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
        raise _incomplete(torch, ["rank", "world_size"])
    _check_below(torch, "rank", "world_size")
    if torch.local_world_size is not None:
        _check_below(torch, "local_rank", "local_world_size")
    master = None
    if torch.world_size > 1:
        if torch.master_addr is None or torch.master_port is None:
            raise _incomplete(torch, ["master_addr", "master_port"])
        master = TorchMaster(torch.master_addr, torch.master_port, bool(torch.use_agent_store))
    return Launch(
        "torchrun",
        torch.rank,
        torch.world_size,
        host_name,
        job_id=torch.run_id or "none",
        local=_both(torch.local_rank, torch.local_world_size),
        node=torch.group_rank,
        torch_master=master,
    )


def _both(rank: int | None, size: int | None) -> tuple[int, int] | None:
    return None if rank is None or size is None else (rank, size)


def _check_below(group: Any, rank: str, size: str) -> None:
    number, count = getattr(group, rank), getattr(group, size)
    if (number is None) != (count is None):
        raise _incomplete(group, [rank, size])
    if number is not None and number >= count:
        raise UsageError(f"{_shown(group, rank)} is not below {_shown(group, size)}")


def _incomplete(group: Any, needed: list[str]) -> UsageError:
    variables = variables_of(type(group))
    missing = [" or ".join(variables[name].names) for name in needed if getattr(group, name) is None]
    present = [name for name in variables if getattr(group, name) is not None]
    shown = ", ".join(_shown(group, name) for name in present)
    return UsageError(
        f"incomplete launcher environment: {shown} set, but not {', '.join(missing)}; start the job with "
        "hororun or torchrun, or unset these variables to run a single process"
    )


def _shown(group: Any, name: str) -> str:
    variable = variables_of(type(group))[name]
    label = variable.names[-1]
    return label if variable.secret else f"{label}={getattr(group, name)}"
