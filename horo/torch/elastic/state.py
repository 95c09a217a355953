"""The state of a training function with models and optimizers."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from horo.elastic import commits
from horo.elastic.commit_file import CommitFile
from horo.elastic.commits import Commit, CommitMemory, CommonMemory
from horo.elastic.state import HostUpdateResult, ObjectState
from horo.errors import UsageError
from horo.torch.elastic.copies import Copies, Kept, likeness
from horo.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    PartHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)
from horo.torch.engine import topology
from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import run_allreduce
from horo.torch.functions.broadcast_state import agree, describe_shape, overwrite
from horo.torch.functions.objects import broadcast_object, share_object
from horo.torch.ops.allreduce import Max
from horo.torch.ops.process_set import global_process_set

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_SYNC = "elastic.sync"
_MEETINGS = {what: Operation("elastic", what, Max) for what in ("commit", "change")}


class TorchState(ObjectState):
    """The state of a training function: model, optimizer, and whatever else must be the same after a restart.

    Each argument becomes an attribute. Of models, optimizers, samplers and others with a ``state_dict()`` (schedulers,
    gradient scalers) the state is kept; anything else, such as the number of the epoch, is pickled: assign to the
    attribute to change it. A commit copies each tensor into memory that is allocated once, on the host also if the
    tensor is on a GPU. In an elastic job that memory outlives the process.

    Args:
        model: A module.
        optimizer: Its optimizer, distributed or not.
        kwargs: The rest, by name: other models and optimizers too.

    Raises:
        UnsupportedError: A tensor of the model or optimizer is neither on the CPU nor on a CUDA device, or is sparse.

    Example:
        state = hvd.elastic.TorchState(model, optimizer, epoch=0)
        state.commit()
        state.epoch = 1
        state.restore()  # the epoch is 0 again
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in values.items():
            _refuse_parts_within(name, value)
        handlers = {name: handler for name, value in values.items() if (handler := handler_of(value)) is not None}
        # Without a driver, only this process reads it: it has one copy of the state.
        memory = CommitMemory(commits.create(), os.urandom(16), keeps_last=False)
        self._copies = Copies(memory)
        self._handlers: dict[str, StateHandler] = {}
        for name in handlers:
            setattr(self, name, values[name])
        self._handlers = handlers
        others = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(broadcast_object, topology.rank, **others)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
            self.save()

    def restore(self) -> None:
        """Returns to the last commit, in place: parameters and their optimizer stay the same objects.

        Raises:
            UsageError: The model or the optimizer has got other parameters since.
        """
        self._standing.commit = self._load()
        for handler in self._own_handlers():
            handler.restore()

    def reset(self) -> None:
        """Called when the ranks of the job have changed: samplers share out their samples anew."""
        for _, part in self._parts():
            part.reset()

    def _parts(self) -> list[tuple[str, PartHandler]]:
        return [(name, each) for name, each in self._handlers.items() if isinstance(each, PartHandler)]

    def _optimizers(self) -> list[OptimizerStateHandler]:
        return [each for _, each in self._parts() if isinstance(each, OptimizerStateHandler)]

    def _sharded(self) -> list[Any]:
        """The sharding of each optimizer that is sharded."""
        found = (getattr(each.value, "_sharded_step", None) for each in self._optimizers())
        return [sharded for sharded in found if sharded is not None]

    def _own_handlers(self) -> list[StateHandler]:
        """The handlers that users have registered."""
        return [each for each in self._handlers.values() if not isinstance(each, PartHandler)]

    def _capture(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """The objects; ``tensors`` receives the tensors."""
        return {**self._plain(), **{name: part.capture(tensors) for name, part in self._parts()}}

    def _accept(self, objects: dict[str, Any]) -> list[torch.Tensor]:
        """Takes over captured objects; returns the tensors here that are to get the values of the captured ones."""
        parts = dict(self._parts())
        tensors: list[torch.Tensor] = []
        for name, value in objects.items():
            if name in parts:
                tensors += parts[name].accept(value)
            else:
                setattr(self, name, value)
        return tensors

    def _share(self, root_rank: int) -> None:
        lines = [f"{name}: {line}" for name, part in self._parts() for line in part.describe()]
        agree([*lines, *self._plain()], _SYNC, global_process_set)
        tensors: list[torch.Tensor] = []
        objects = share_object(lambda: self._capture(tensors), root_rank, _SYNC, None, 0)
        if topology.rank() != root_rank:
            tensors = self._accept(objects)
        overwrite([tensor.detach() for tensor in tensors], root_rank, _SYNC, 0)
        for handler in self._own_handlers():
            handler.sync()

    def _write(self, commit: Commit) -> None:
        tensors: list[torch.Tensor] = []
        self._copies.write(commit, self._capture(tensors), tensors, self._common_among(commit, tensors))
        for handler in self._own_handlers():
            handler.save()
        self._standing.commit = commit
        self._steps_between = self._begin_steps()

    def _common_among(self, commit: Commit, tensors: list[torch.Tensor]) -> list[bool]:
        """Of each tensor, whether it is equal on all ranks, which commit now; empty: none. Then waits for all of them.

        So no rank begins a commit before all have finished the one before.
        """
        standing, sharded = self._standing, self._sharded()
        is_sync = standing.incoming is not None  # all have got the same values
        if standing.membership is None or not sharded or not (is_sync or standing.is_together):
            return []
        known = {id(tensor) for each in sharded for tensor in each.shared_tensors()}
        is_common = [id(tensor) in known for tensor in tensors]
        is_unlike = not is_sync and not all(each.is_placed() for each in sharded)
        digest = likeness(commit, [tensor for tensor, is_one in zip(tensors, is_common, strict=True) if is_one])
        sent = torch.tensor([is_unlike, digest, -digest], dtype=torch.int64, device="cpu")
        run_allreduce([sent], _MEETINGS["commit"], in_place=True)
        return is_common if sent.tolist() == [0, digest, -digest] else []

    def _load(self) -> Commit:
        kept = self._copies.read()
        if kept is None:
            raise UsageError("TorchState.restore: the last commit was broken off, so there is none")
        self._take(kept)
        return kept.commit

    def _take(self, kept: Kept) -> None:
        with torch.no_grad():
            for live, copy in zip(self._accept(kept.objects), kept.tensors, strict=True):
                if live.shape != copy.shape:
                    raise UsageError(
                        f"TorchState.restore: a tensor is {describe_shape(live)}, but {describe_shape(copy)} in the "
                        "commit"
                    )
                live.detach().copy_(copy)
        self._begin_steps()

    def _begin_steps(self) -> int:
        """Counts anew; returns the steps until now."""
        done = self._steps_since_commit() or 0
        for optimizer in self._optimizers():
            optimizer.steps.done = 0
        return done

    def _undo(self) -> int | None:
        before = self._standing.commit
        steps = super()._undo()
        is_broken = self._standing.commit < before  # another rank has not finished its share
        return steps if steps is None or not is_broken else steps + self._steps_between

    def _steps_since_commit(self) -> int | None:
        return max((each.steps.done for each in self._optimizers()), default=None)

    def _agree_on_change(self, own: HostUpdateResult) -> HostUpdateResult:
        sent = torch.tensor([0 if topology.rank() else int(own)], dtype=torch.int64, device="cpu")
        run_allreduce([sent], _MEETINGS["change"], in_place=True)
        return HostUpdateResult(int(sent.item()))

    def _resume(self, file: CommitFile) -> bool:
        """Goes on from the commit in a file, if there is one; whether there is.

        Raises:
            ResourceError: The file cannot be read.
            UsageError: It is of another state.
        """
        found = file.read()
        if found is None:
            return False
        try:
            kept = self._copies.unpacked(found)
            if kept is None:
                raise UsageError("it is of another version of horo")
            self._take(kept)
        except Exception as error:  # torch's, and whatever a user's class raises
            raise UsageError(
                f"the commit in {file} does not fit this state; remove it, or name another --elastic-dir: {error}"
            ) from error
        self._write(kept.commit)
        return True

    def _adopt(self, memory: CommitMemory, common: CommonMemory | None = None) -> bool:
        """Keeps commits in other memory from now on.

        Returns:
            Whether it has the last commit that an earlier process has made there; else it is what it was.
        """
        own, self._copies = self._copies, Copies(memory, common)
        self._standing.is_kept = True
        try:
            kept = self._copies.read()
            if kept is not None and kept.commit.generation > 0:
                self._take(kept)
                if kept.is_there():
                    self._standing.commit = kept.commit
                    return True
        except Exception as error:  # torch's, and whatever a user's class raises
            logging.getLogger("horo").warning("the commit of an earlier process does not fit this state: %s", error)
        theirs, self._copies = self._copies, own
        self._load()
        self._copies = theirs
        self._write(self._standing.commit)
        return False


def _refuse_parts_within(name: str, value: Any) -> None:
    """Refuses a list or dict of models: unpickled, they would be others than those that the program trains.

    Raises:
        UsageError: It is one.
    """
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for item in items:
        if isinstance(item, (torch.nn.Module, torch.optim.Optimizer)):
            raise UsageError(
                f"TorchState({name}=...): it has a {type(item).__name__} in a {type(value).__name__}; give each model "
                "and optimizer as an argument of its own"
            )
