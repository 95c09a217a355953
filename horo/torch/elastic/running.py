"""``hvd.elastic.run``: the loop around a training function, with the job of this process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch

from horo.bootstrap.elastic import membership
from horo.config.table import LaunchVariables, environment, read_variables
from horo.elastic.commits import CommitMemory, inherited
from horo.elastic.loop import run_elastic
from horo.elastic.state import State
from horo.torch.elastic.state import TorchState
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

    Args:
        func: ``func(state, ...)``.

    Returns:
        A function with the same arguments. It raises what ``func`` raises, except the errors of lost ranks in an
        elastic job; ``MismatchError`` and ``NotInitializedError`` are raised there too, since a script is wrong.

    Example:
        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 3):
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """

    @functools.wraps(func)
    def wrapper(state: _State, /, *args: _Options.args, **kwargs: _Options.kwargs) -> _Result:
        member = membership()
        if member is not None:
            return run_elastic(lambda: func(state, *args, **kwargs), state, _Job(), member)
        if topology.is_under_mpi() and topology.rank() == 0:
            logging.getLogger("horo").info(
                "MPI has started this job, and no job of MPI can go on without one of its ranks: hvd.elastic.run calls "
                "the function once; start it with hororun --min-np to have it go on"
            )
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper


class _Job:
    def place(self) -> tuple[int, int]:
        return topology.rank(), topology.size()

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        sent = torch.tensor([list(own)], dtype=torch.int64, device="cpu")
        rows: list[list[int]] = start_allgather([sent], "elastic.run", None, sync=True).wait()[0].tensor.tolist()
        return rows

    def adopt(self, state: State) -> bool:
        if not isinstance(state, TorchState) or _keepers or (memory := _slot_memory()) is None:
            return False
        _keepers.append(state)
        return state._adopt(memory)

    def forget(self, state: State) -> None:
        forget_all()
        if isinstance(state, TorchState):
            for _, part in state._parts():
                part.forget()
                for parameter in part.parameters():
                    parameter.grad = None


_keepers: list[State] = []
"""The state that has the memory of this worker's slot, if there is one: the first that was run."""


def _slot_memory() -> CommitMemory | None:
    own = read_variables(LaunchVariables, environment())
    fd = inherited(own.commit_fd)
    return None if fd is None or own.secret is None else CommitMemory(fd, own.secret)
