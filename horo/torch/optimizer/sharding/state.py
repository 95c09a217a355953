"""The optimizer's state in the common memory: all ranks of the host see it as its owner has written it.

``optimizer.state`` is whole on every rank, so ``state_dict()`` is torch's own: for a parameter that this rank owns, it
has the memory that its step writes, for another one a view of it. An owner sends entries that are no tensors to
all ranks when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from horo.errors import UnsupportedError
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.sharding.meeting import Meeting
from horo.torch.optimizer.sharding.memory import Block, HostMemory, Want, is_dense, tried
from horo.torch.optimizer.sharding.pages import Pages
from horo.torch.optimizer.sharding.placement import Placed

__all__ = ["StatePlacement", "tensors_in"]

_PLAIN = (int, float, bool, str, type(None))


class _Tensor(NamedTuple):
    """An entry that is a tensor, as its owner describes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def like(self) -> torch.Tensor:
        """A tensor like it, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Entry(NamedTuple):
    """An entry of a parameter's state in the common memory."""

    told: _Tensor
    block: Block
    own: torch.Tensor
    """As ``optimizer.state`` of this rank has it."""


_Entries = dict[str, Any]
"""By key: an ``_Entry``, or a value that is no tensor."""


class StatePlacement:
    """The state of the parameters of one optimizer in the common memory of this host, in one job."""

    def __init__(self, meeting: Meeting, memory: HostMemory) -> None:
        self._meeting = meeting
        self._memory = memory
        self._entries: dict[ParameterState, _Entries] = {}
        self._dicts: dict[ParameterState, dict[str, Any]] = {}
        """Of the parameters of others, as this rank has put them into ``optimizer.state``."""
        self._parts: list[Pages] = []

    def keep(self, optimizer: torch.optim.Optimizer, placed: Mapping[ParameterState, Placed]) -> bool:
        """Called when this rank has written: puts state back that was replaced. Whether all have to place state."""
        state_of = optimizer.state
        is_new = False
        for state, there in placed.items():
            if there.block.owner == self._meeting.index:
                found = state_of.get(state.parameter, {})
                is_new = not self._keep_own(found, self._entries.get(state, {})) or is_new
        return is_new

    def _keep_own(self, found: dict[str, Any], entries: _Entries) -> bool:
        """Whether the state of a parameter of this rank has the entries that all know."""
        if len(found) != len(entries):
            return False
        for key, value in found.items():
            entry = entries.get(key, self)
            if type(entry) is _Entry:
                if entry.block.owner != self._meeting.index:
                    return False
                if value is entry.own:
                    continue
                if not isinstance(value, torch.Tensor) or _describe(value) != entry.told:
                    return False
                with torch.no_grad():
                    entry.own.copy_(value)
                found[key] = entry.own
            elif type(value) is not type(entry) or value != entry:
                return False
        return True

    def is_placed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all tensors in the state are what owners have written."""
        known = {
            (state.parameter, key): id(entry.own)
            for state, entries in self._entries.items()
            for key, entry in entries.items()
            if type(entry) is _Entry
        }
        return known == {place: id(tensor) for place, tensor in tensors_in(optimizer).items()}

    def keep_only(self, states: Iterable[ParameterState]) -> None:
        """Forgets the state of parameters that the optimizer has no longer."""
        kept = set(states)
        for known in (self._entries, self._dicts):
            for state in known.keys() - kept:
                del known[state]

    def show(self, optimizer: torch.optim.Optimizer, before: int) -> None:
        """Called when all ranks have written: the state of others' parameters is what they have written.

        Args:
            optimizer: Its state has the order that a step of all parameters gives it.
            before: The number of parameters that had state before the step.
        """
        for state, entries in self._dicts.items():
            parameter = state.parameter
            if optimizer.state.get(parameter) is not entries:
                optimizer.state[parameter] = entries
        if len(optimizer.state) > before:
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            places = {parameter: place for place, parameter in enumerate(parameters)}
            for parameter in sorted(list(optimizer.state)[before:], key=lambda key: places.get(key, len(places))):
                optimizer.state[parameter] = optimizer.state.pop(parameter)
        self.drop()

    def drop(self) -> None:
        """Drops what this rank has written into the state of parameters of others."""
        for pages in self._parts:
            pages.drop(0, pages.size)

    def place(self, optimizer: torch.optim.Optimizer, placed: Mapping[ParameterState, Placed]) -> None:
        """Moves state into the common memory, where it is not yet. All ranks call it.

        Raises:
            UnsupportedError: A rank has an entry that others cannot share.
            ResourceError: There is no memory.
            GroupError: A rank is lost or has shut down.
        """
        own: dict[str, dict[str, Any]] = {}

        def describe() -> None:
            for state, there in placed.items():
                if there.block.owner == self._meeting.index:
                    found = optimizer.state.get(state.parameter, {})
                    if not self._keep_own(found, self._entries.get(state, {})):
                        own[state.name] = {key: _tell(state.name, key, value) for key, value in found.items()}

        failure = tried(describe)
        self._meeting.refuse_failures("state.described", failure)
        told = self._meeting.gather("state", own)
        changed = {name: found for rank in self._meeting.host_ranks for name, found in told[rank].items()}
        states = [state for state in placed if state.name in changed]
        new: dict[ParameterState, _Entries] = {}

        def copy() -> None:
            new.update(self._laid_out(states, changed, placed))
            with torch.no_grad():
                for state in states:
                    if placed[state].block.owner == self._meeting.index:
                        _move(optimizer.state.get(state.parameter, {}), new[state])

        self._meeting.refuse_failures("state.moving", tried(copy))
        for state, entries in new.items():
            self._entries[state] = entries
            if placed[state].block.owner == self._meeting.index:
                self._dicts.pop(state, None)
            else:
                shown = {key: entry.own if type(entry) is _Entry else entry for key, entry in entries.items()}
                self._dicts[state] = optimizer.state[state.parameter] = shown

    def _laid_out(
        self,
        states: Sequence[ParameterState],
        changed: Mapping[str, Mapping[str, Any]],
        placed: Mapping[ParameterState, Placed],
    ) -> dict[ParameterState, _Entries]:
        wants: list[Want] = []
        missing: list[tuple[ParameterState, str]] = []
        new: dict[ParameterState, _Entries] = {state: {} for state in states}
        for state in states:
            before = self._entries.get(state, {})
            for key, told in changed[state.name].items():
                new[state][key] = told
                if type(told) is _Tensor:
                    there = before.get(key)
                    owner = placed[state].block.owner
                    if type(there) is _Entry and there.told == told and there.block.owner == owner:
                        new[state][key] = there
                    else:
                        missing.append((state, key))
                        size = max(1, told.like().numel()) * told.dtype.itemsize
                        wants.append(Want(owner, size))
        if wants:
            pages, blocks = self._memory.append(wants)
            self._parts.append(pages)
            for (state, key), block in zip(missing, blocks, strict=True):
                told = changed[state.name][key]
                tensor = block.tensor(told.like(), alias=block.owner == self._meeting.index)
                new[state][key] = _Entry(told, block, tensor.requires_grad_(told.requires_grad))
        return new

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the job has ended: state becomes this rank's own, with the values that it has."""
        for state, entries in self._entries.items():
            found = optimizer.state.get(state.parameter, {})
            for key, entry in entries.items():
                is_own = type(entry) is _Entry and entry.block.owner == self._meeting.index
                if is_own and found.get(key) is entry.own:
                    found[key] = entry.block.tensor(entry.told.like()).requires_grad_(entry.told.requires_grad)


def tensors_in(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.Tensor, str], torch.Tensor]:
    """The tensors in the state of an optimizer's parameters, by parameter and key."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        (parameter, key): value
        for parameter in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _describe(value: torch.Tensor) -> _Tensor:
    return _Tensor(tuple(value.shape), value.stride(), value.dtype, value.requires_grad)


def _tell(name: str, key: str, value: Any) -> Any:
    """An entry as its owner describes it to the others.

    Raises:
        UnsupportedError: It is of another kind.
    """
    if isinstance(value, torch.Tensor):
        if value.is_cpu and value.layout is torch.strided:
            return _describe(value) if is_dense(value) else _describe(value.contiguous())
    elif type(value) in _PLAIN:
        return value
    raise UnsupportedError(
        f"sharding=: the optimizer's state {key!r} of parameter {name!r} is a {type(value).__name__}, which ranks "
        "cannot share; leave sharding out"
    )


def _move(found: dict[str, Any], entries: _Entries) -> None:
    """Gives the state of a parameter of this rank the memory that its entries have now, with its values."""
    for key, entry in entries.items():
        if type(entry) is _Entry and found[key] is not entry.own:
            entry.own.detach().copy_(found[key])
            found[key] = entry.own
