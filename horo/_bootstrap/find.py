"""Who started this process, with MPI asked where an MPI seems to have."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from horo._bootstrap.console import prepare_log
from horo._bootstrap.launch import Launch, detect_launch, slurm_launch, subset
from horo._bootstrap.mpi_launch import (
    MpiSign,
    MpiWorld,
    check_sign,
    is_communicator,
    library_of,
    load_mpi,
    mpi_importable,
    read_sign,
    world_of,
    world_of_ranks,
)
from horo._bootstrap.slurm_step import is_lone_step
from horo._config import Config, LaunchVariables, read_variables
from horo._errors import ResourceError, UsageError

__all__ = ["find_launch"]

_INSTEAD = "HORO_CONTROLLER=slurm says so without asking MPI"


def find_launch(environ: Mapping[str, str], config: Config, comm: Any = None) -> Launch:
    """Who started this process, and which of the processes form the job.

    Args:
        environ: of this process.
        config: its settings.
        comm: None for all processes; a list of their ranks; or a communicator of mpi4py, which then decides alone.

    Raises:
        UsageError: the environment is half there, MPI and its launcher disagree, or ``comm`` is not what it may be.
        ResourceError: MPI is needed but is not there.
        TimeoutError: not all ranks of a communicator came.
    """
    if is_communicator(comm):
        return _from_communicator(environ, config, comm)
    if comm is not None and (isinstance(comm, str | bytes) or not isinstance(comm, Sequence)):
        raise UsageError(
            f"init(comm={comm!r}): comm is None, a list of ranks (integers) or a communicator of mpi4py (MPI.Comm), "
            f"not a {type(comm).__name__}"
        )
    found = _find(environ, config)
    if isinstance(found, Launch):
        return found if comm is None else subset(found, comm)
    if comm is None:
        return _mpi_launch(environ, world_of(found, found.COMM_WORLD, config.start_timeout_s))
    return _mpi_launch(environ, *world_of_ranks(found, comm, config.start_timeout_s))


def _from_communicator(environ: Mapping[str, str], config: Config, comm: Any) -> Launch:
    why = "init(comm=...)"
    if config.controller not in {"auto", "mpi"}:
        raise UsageError(f"{why} with a communicator of mpi4py, but HORO_CONTROLLER={config.controller} rules MPI out")
    mpi = load_mpi(why)
    sign = read_sign(environ)
    if sign is not None:
        check_sign(mpi, sign)
    return _mpi_launch(environ, world_of(mpi, comm, config.start_timeout_s))


def _mpi_launch(environ: Mapping[str, str], world: MpiWorld, ranks: tuple[int, ...] | None = None) -> Launch:
    host_name = read_variables(LaunchVariables, environ).hostname or socket.gethostname()
    return Launch("mpi", world.rank, world.size, host_name, job_id="mpi", mpi=world, ranks=ranks)


def _find(environ: Mapping[str, str], config: Config) -> Any:
    """The launch, or the module ``mpi4py.MPI`` where MPI knows it."""
    sign = read_sign(environ)
    if config.controller == "mpi":
        mpi = load_mpi("HORO_CONTROLLER=mpi")
        _check_forced(mpi, sign, environ)
        return mpi
    if config.controller == "slurm":
        launch = slurm_launch(environ)
        if launch is None:
            raise UsageError(
                "HORO_CONTROLLER=slurm, but this process is not one of several that srun started: SLURM_STEP_ID, "
                "SLURM_PROCID and SLURM_STEP_NUM_TASKS do not say so"
            )
        return launch
    launch = detect_launch(environ)
    if launch.kind in {"hororun", "torchrun"} or sign is None or (sign.size is None and is_lone_step(environ)):
        return launch
    if config.controller == "gloo":
        if launch.kind == "none":
            raise UsageError(
                f"HORO_CONTROLLER=gloo, but {sign} says that MPI started this process, and nothing else tells ranks of "
                "each other; unset HORO_CONTROLLER, or start the job with hororun, torchrun or srun"
            )
        return launch
    if launch.slurm is not None and _is_slurms(sign, launch):
        return _ask_under_slurm(sign, launch, config)
    mpi = load_mpi(str(sign))
    check_sign(mpi, sign)
    return mpi


def _check_forced(mpi: Any, sign: MpiSign | None, environ: Mapping[str, str]) -> None:
    """Where MPI is asked for, a world of one is right only if nobody says that there are several processes."""
    if sign is not None:
        check_sign(mpi, sign)
    elif mpi.COMM_WORLD.Get_size() == 1:
        launch = detect_launch(environ)
        if launch.size > 1:
            raise UsageError(
                f"HORO_CONTROLLER=mpi, but to MPI this is a single process, while {launch.kind} started {launch.size}; "
                "start the job with mpirun, or unset HORO_CONTROLLER"
            )


def _is_slurms(sign: MpiSign, launch: Launch) -> bool:
    """Whether srun itself set the sign: mpirun inside an allocation counts its own processes, not srun's tasks."""
    return sign.size in {None, launch.size} and sign.rank in {None, launch.rank} and "OMPI" not in sign.variable


def _ask_under_slurm(sign: MpiSign, launch: Launch, config: Config) -> Any:
    """srun offers MPI a way to start whether or not an MPI is there: MPI where it agrees, else Slurm."""
    prepare_log(config.log_level, launch.rank)
    log = logging.getLogger("horo")
    if not mpi_importable():
        log.info("%s, but mpi4py is not installed: ranks meet as Slurm describes them; %s", sign, _INSTEAD)
        return launch
    try:
        mpi = load_mpi(str(sign))
    except ResourceError as error:
        log.info("ranks meet as Slurm describes them (%s), since: %s", _INSTEAD, error)
        return launch
    size = mpi.COMM_WORLD.Get_size()
    if size == launch.size:
        return mpi
    if size == 1:
        log.warning(
            "srun started %d processes (%s), but each is alone to mpi4py's MPI (%s), which this srun cannot start: "
            "ranks meet as Slurm describes them; %s, srun --mpi=list shows what srun can start",
            launch.size,
            sign,
            library_of(mpi),
            _INSTEAD,
        )
        return launch
    raise UsageError(f"{sign} and Slurm say {launch.size} processes, mpi4py's MPI says {size}; {_INSTEAD}")
