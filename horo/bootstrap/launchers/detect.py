"""Finds the launcher of this process. Queries MPI if an MPI seems to be the launcher."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horo.bootstrap.launchers.slurm_step import is_lone_step, missed_tasks
from horo.bootstrap.launchers.variables import Launch, read_launch, read_slurm_launch, subset
from horo.bootstrap.log import prepare_log
from horo.bootstrap.mpi.world import (
    MpiLauncherVariable,
    MpiWorld,
    check_world_size,
    is_communicator,
    library_of,
    load_mpi,
    mpi_importable,
    read_launcher_variable,
    world_of,
    world_of_ranks,
)
from horo.config.table import Config, LaunchVariables, read_variables
from horo.errors import ResourceError, UsageError

__all__ = ["detect_launch", "rank_of_launcher"]

_INSTEAD = "HORO_CONTROLLER=slurm does so without asking MPI"


def detect_launch(environ: Mapping[str, str], config: Config, comm: Any = None) -> Launch:
    """Finds the launcher of this process, and the processes that form the job.

    Args:
        environ: environment of this process.
        config: settings of this process.
        comm: None for all processes; a list of their ranks; or a communicator of mpi4py, whose processes form the job.

    Raises:
        UsageError: the launcher's environment is incomplete, MPI and its launcher disagree, or ``comm`` does not fit.
        ResourceError: MPI is needed but is not there.
        TimeoutError: not all ranks of a communicator called this in time.
    """
    if is_communicator(comm):
        return _from_communicator(environ, config, comm)
    if comm is not None and (isinstance(comm, str | bytes) or not isinstance(comm, Sequence)):
        raise UsageError(
            f"init(comm={comm!r}): comm is None, a list of ranks (integers) or a communicator of mpi4py (MPI.Comm), "
            f"not a {type(comm).__name__}"
        )
    found = _detect(environ, config)
    if isinstance(found, Launch):
        if found.kind == "none" and comm is None:
            _warn_if_alone(environ, config)
        return found if comm is None else subset(found, comm)
    if comm is None:
        return _mpi_launch(environ, world_of(found, found.COMM_WORLD, config.start_timeout_s))
    return _mpi_launch(environ, *world_of_ranks(found, comm, config.start_timeout_s))


def rank_of_launcher(environ: Mapping[str, str]) -> int | None:
    """The rank by the variables of a launcher, as far as they go: nothing is loaded, and nobody is asked.

    None: no launcher has started this process, or its variables are incomplete, which ``init()`` will refuse.
    """
    try:
        launch = read_launch(environ)
    except UsageError:
        return None
    if launch.kind != "none":
        return launch.rank
    variable = read_launcher_variable(environ)
    return None if variable is None or (variable.size is None and is_lone_step(environ)) else variable.rank


def _warn_if_alone(environ: Mapping[str, str], config: Config) -> None:
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0].endswith(".py") else "SCRIPT"
    sentence = missed_tasks(environ, script)
    if sentence:
        prepare_log(config.log_level, 0)
        logging.getLogger("horo").warning(sentence)


def _from_communicator(environ: Mapping[str, str], config: Config, comm: Any) -> Launch:
    why = "init(comm=...)"
    if config.controller not in {"auto", "mpi"}:
        told = config.told("controller")
        raise UsageError(f"{why} with a communicator of mpi4py, but {told} rules MPI out")
    mpi = load_mpi(why)
    variable = read_launcher_variable(environ)
    if variable is not None:
        check_world_size(mpi, variable)
    return _mpi_launch(environ, world_of(mpi, comm, config.start_timeout_s))


def _mpi_launch(environ: Mapping[str, str], world: MpiWorld, ranks: tuple[int, ...] | None = None) -> Launch:
    host_name = read_variables(LaunchVariables, environ).hostname or socket.gethostname()
    return Launch("mpi", world.rank, world.size, host_name, job_id="mpi", mpi=world, ranks=ranks)


def _detect(environ: Mapping[str, str], config: Config) -> Any:
    """The launch, or the module ``mpi4py.MPI`` if MPI is the launcher."""
    variable = read_launcher_variable(environ)
    if config.controller == "mpi":
        mpi = load_mpi(config.told("controller"))
        _check_forced(mpi, variable, environ, config.told("controller"))
        return mpi
    if config.controller == "slurm":
        launch = read_slurm_launch(environ)
        if launch is None:
            raise UsageError(
                f"{config.told('controller')}, but this process is not one of several that srun started: "
                "see SLURM_STEP_ID, SLURM_PROCID and SLURM_STEP_NUM_TASKS"
            )
        return launch
    launch = read_launch(environ)
    if launch.kind in {"hororun", "torchrun"} or variable is None or (variable.size is None and is_lone_step(environ)):
        return launch
    if config.controller == "gloo":
        if launch.kind == "none":
            raise UsageError(
                f"{config.told('controller')}, but {variable} shows that MPI started this process, and nothing else "
                "connects the ranks; leave it out, or start the job with hororun, torchrun or srun"
            )
        return launch
    if launch.slurm is not None and _is_set_by_srun(variable, launch):
        return _choose_mpi_or_slurm(variable, launch, config)
    mpi = load_mpi(str(variable))
    check_world_size(mpi, variable)
    return mpi


def _check_forced(mpi: Any, variable: MpiLauncherVariable | None, environ: Mapping[str, str], told: str) -> None:
    """Refuses a world of one rank with ``controller="mpi"`` if another launcher has started several processes."""
    if variable is not None:
        check_world_size(mpi, variable)
    elif mpi.COMM_WORLD.Get_size() == 1:
        launch = read_launch(environ)
        if launch.size > 1:
            raise UsageError(
                f"{told}, but to MPI this is a single process, while {launch.kind} started {launch.size}; "
                "start the job with mpirun, or leave it out"
            )


def _is_set_by_srun(variable: MpiLauncherVariable, launch: Launch) -> bool:
    """Whether srun itself set the variable: mpirun inside an allocation counts its own processes, not srun's tasks."""
    equal = variable.size in {None, launch.size} and variable.rank in {None, launch.rank}
    return equal and "OMPI" not in variable.name


def _choose_mpi_or_slurm(variable: MpiLauncherVariable, launch: Launch, config: Config) -> Any:
    """srun sets variables of MPI even if there is no MPI. MPI is used if it counts the same processes, else Slurm."""
    prepare_log(config.log_level, launch.rank)
    log = logging.getLogger("horo")
    if not mpi_importable():
        log.info("%s, but mpi4py is not installed: ranks start as Slurm describes them; %s", variable, _INSTEAD)
        return launch
    try:
        mpi = load_mpi(str(variable))
    except ResourceError as error:
        log.info("ranks start as Slurm describes them (%s), since: %s", _INSTEAD, error)
        return launch
    size = mpi.COMM_WORLD.Get_size()
    if size == launch.size:
        return mpi
    if size == 1:
        log.warning(
            "srun started %d processes (%s), but each is alone to mpi4py's MPI (%s), which this srun cannot start: "
            "ranks start as Slurm describes them; %s, srun --mpi=list shows what srun can start",
            launch.size,
            variable,
            library_of(mpi),
            _INSTEAD,
        )
        return launch
    raise UsageError(f"{variable} and Slurm count {launch.size} processes, mpi4py's MPI counts {size}; {_INSTEAD}")
