"""``hvd.elastic.run``: the loop around a training function, with the job of this process."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from horo.bootstrap.elastic import membership
from horo.bootstrap.launchers.variables import read_launch
from horo.config.table import LaunchVariables, environment, read_variables
from horo.elastic.commits import CommitMemory, CommitShare, CommonMemory, inherited
from horo.elastic.loop import run_elastic, share_latest
from horo.elastic.state import State
from horo.errors import UsageError
from horo.torch.elastic.keeping import Keeping
from horo.torch.elastic.state import TorchState
from horo.torch.engine import runtime as _runtime
from horo.torch.engine import topology
from horo.torch.engine.submit import start_allgather
from horo.torch.optimizer.membership import forget_all

__all__ = ["run"]

_State = TypeVar("_State", bound=State)
_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")


def run(
    func: Callable[Concatenate[_State, _Options], _Result],
) -> Callable[Concatenate[_State, _Options], _Result]:
    """Makes a training function elastic: when a rank is lost or ranks come, it begins again from the last commit.

    The function takes a state, and other arguments. Before it is called, all ranks get the state of the rank with the
    latest commit. When a rank is lost, the others restore the last commit, and form a new job; when ranks have come,
    they do so at the next commit. Then the state's reset callbacks are called, gradients and what else the broken step
    has left are removed, and the function is called again. So it goes on from the attributes of its state. It returns
    when it has returned on all ranks.

    Only a job that ``hororun --min-np`` has started is elastic. Elsewhere the state is synced, the function called
    once, and an error ends the job.

    If ``hororun --elastic-dir`` or ``HORO_ELASTIC_DIR`` has named a folder, the last commit of the first ``TorchState``
    goes there when the job is to end (SIGTERM), and when a lost rank ends it. A job that starts with that folder goes
    on from it. Each host may have a folder of its own, as in ``/dev/shm``: all ranks get the latest commit of any.

    Args:
        func: ``func(state, ...)``.

    Returns:
        A function with the same arguments. It raises what ``func`` raises, except the errors of lost ranks in an
        elastic job; ``MismatchError`` and ``NotInitializedError`` are raised there too, since a script is wrong. It
        raises SystemExit if the job is to end before, and UsageError for a second state in an elastic job.

    Example:
        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 3):
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """

    @functools.wraps(func)
    def wrapper(state: _State, /, *args: _Options.args, **kwargs: _Options.kwargs) -> _Result:
        def function() -> _Result:
            return func(state, *args, **kwargs)

        member, keeping = membership(), _keeping_of(state)
        with contextlib.nullcontext() if keeping is None else keeping.at_the_end():
            if member is None:
                return _run_once(function, state, keeping)
            return run_elastic(function, state, _Job(keeping, resumes=not member.is_newcomer), member)

    return wrapper


def _run_once(function: Callable[[], _Result], state: State, keeping: Keeping | None) -> _Result:
    if topology.rank() == 0 and (topology.is_under_mpi() or read_launch(environment()).kind == "slurm"):
        logging.getLogger("horo").warning(
            "%s has started this job, which cannot go on without one of its ranks: hvd.elastic.run calls the function "
            "once; start it with hororun --min-np to have it go on",
            "MPI" if topology.is_under_mpi() else "srun",
        )
    is_resumed = False
    if keeping is not None and not _first:
        _first.append(state)
        keeping.own_memory()
        is_resumed = keeping.resume()
    job = _Job(keeping, resumes=False)
    if any(resumed for (resumed,) in job.gather([int(is_resumed)])):  # each host may have a file of its own, or none
        state.on_reset()  # the job before may have had another number of ranks
    state._standing.is_synced = False
    share_latest(state, job, 1)
    return function()


class _Job:
    def __init__(self, keeping: Keeping | None, *, resumes: bool) -> None:
        self._keeping, self._resumes = keeping, resumes

    def place(self) -> tuple[int, int]:
        return topology.rank(), topology.size()

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        sent = torch.tensor([list(own)], dtype=torch.int64, device="cpu")
        rows: list[list[int]] = start_allgather([sent], "elastic.run", None, sync=True).wait()[0].tensor.tolist()
        return rows

    def adopt(self, state: State) -> bool:
        if _first:
            if state is not _first[0]:
                raise UsageError(
                    "elastic.run: an elastic job has one state, and this is another one than before; a rank that comes "
                    "later begins with the first, and ranks would mix both up. Keep all phases in one state and one "
                    "function, as in TorchState(model, optimizer, phase=0, epoch=0)"
                )
            return False
        _first.append(state)
        if not isinstance(state, TorchState):
            return False
        own = read_variables(LaunchVariables, environment())
        fd, common = inherited(own.commit_fd), inherited(own.host_commit_fd)
        if fd is not None and own.secret is not None:
            shared = None if common is None else CommonMemory(common)
            if state._adopt(CommitMemory(fd, own.secret), shared):
                return True
        return self._resumes and self._keeping is not None and self._keeping.resume()

    def share_out(self, state: State, generation: int) -> None:
        if isinstance(state, TorchState) and state._sharded():
            copies, rank = state._copies, topology.rank()
            rows = self.gather([copies.common_identity])
            ranks = [each for each in _runtime.current().job.host_ranks if rows[each] == rows[rank]]
            copies.share = CommitShare(ranks.index(rank), len(ranks), generation) if copies.common_identity else None

    def forget(self, state: State) -> None:
        forget_all()
        if isinstance(state, TorchState):
            for _, part in state._parts():
                part.forget()
                for parameter in part.parameters():
                    parameter.grad = None

    def keep(self) -> None:
        if self._keeping is not None:
            self._keeping.keep()


_first: list[State] = []
"""The first state that was run, once there is one. It has the memory of this worker's slot, and the file."""


def _keeping_of(state: State) -> Keeping | None:
    """The file of a state, if the user has named a folder for it."""
    folder = read_variables(LaunchVariables, environment()).elastic_dir
    if folder is None:
        return None
    if isinstance(state, TorchState) and (not _first or state is _first[0]):
        return Keeping(state, folder)
    if topology.rank() == 0:
        logging.getLogger("horo").warning(
            "--elastic-dir keeps the first TorchState that a program runs; this %s is another state, and a later job "
            "begins it anew",
            type(state).__name__,
        )
    return None
