"""The optimizer's state in the common memory: all ranks of the host see it as its owner has written it.

``optimizer.state`` is whole on every rank, so ``state_dict()`` is torch's own: for a parameter that this rank owns, it
has the memory that its step writes, for another one a view of it. An owner sends entries that are no tensors to
all ranks when they change.

Of a cut parameter all ranks have views. Inside the window ``optimizer.state`` has a part of each entry that has the
parameter's shape. Of the other entries, those of the first owner count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from horo.errors import UnsupportedError, UsageError
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
    is_cut: bool
    """Ranks write parts of it, as of its parameter."""

    def like(self) -> torch.Tensor:
        """A tensor like it, without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Entry(NamedTuple):
    """An entry of a parameter's state in the common memory."""

    told: _Tensor
    block: Block
    own: torch.Tensor
    """As ``optimizer.state`` of this rank has it."""
    part: torch.Tensor | None
    """The memory that this rank writes of it; None: others write."""


_Entries = dict[str, Any]
"""By key: an ``_Entry``, or a value that is no tensor."""


class StatePlacement:
    """The state of the parameters of one optimizer in the common memory of this host, in one job."""

    def __init__(self, meeting: Meeting, memory: HostMemory) -> None:
        self._meeting = meeting
        self._memory = memory
        self._entries: dict[ParameterState, _Entries] = {}
        self._dicts: dict[ParameterState, dict[str, Any]] = {}
        """Of cut parameters and those of others, as this rank has put them into ``optimizer.state``."""
        self._parts: list[Pages] = []
        self._cut_parts: list[Pages] = []
        """The memory of entries of cut parameters."""
        self._held: dict[tuple[ParameterState, str], torch.Tensor] = {}

    def keep(self, optimizer: torch.optim.Optimizer, placed: Mapping[ParameterState, Placed]) -> bool:
        """Called when this rank has written: puts state back that was replaced. Whether all have to place state."""
        state_of = optimizer.state
        is_new = False
        for state, there in placed.items():
            if there.block.is_written_by(self._meeting.index):
                is_new = not self._keep_own(state_of, state, there) or is_new
        return is_new

    def _keep_own(self, state_of: MutableMapping[Any, Any], state: ParameterState, there: Placed) -> bool:
        """Whether the state of a parameter that this rank writes has the entries that all know."""
        found, entries = state_of.get(state.parameter, {}), self._entries.get(state, {})
        if len(found) != len(entries):
            return False
        for key, value in found.items():
            entry = entries.get(key, self)
            if type(entry) is _Entry:
                if not _is_at(entry, there):
                    return False
                if value is entry.own or value is entry.part:
                    continue
                if not isinstance(value, torch.Tensor) or _describe(value, there) != entry.told:
                    return False
                self._write(entry, value, there)
                if not there.block.shares:
                    found[key] = entry.own
            elif type(value) is not type(entry) or value != entry:
                return False
        if there.block.shares and entries:
            state_of[state.parameter] = self._dicts[state]
        return True

    def _write(self, entry: _Entry, value: torch.Tensor, there: Placed) -> None:
        """Writes what this rank has to of an entry; ``value``: its part, or the whole."""
        if entry.part is not None:
            is_part = value.shape == entry.part.shape or not entry.told.is_cut
            with torch.no_grad():
                entry.part.copy_(value if is_part else self._part(value, there))

    def _part(self, value: torch.Tensor, there: Placed) -> torch.Tensor:
        """The part that this rank steps of a tensor with the shape of a cut parameter."""
        value = value.detach()
        if value.stride() != there.view.stride() or not is_dense(value):
            value = torch.empty_like(there.view, dtype=value.dtype).copy_(value)
        return there.block.part(value, self._meeting.index)

    # -- inside the window -----------------------------------------------------------------------------------------

    def hold(self, placed: Iterable[Placed]) -> None:
        """Called before ranks meet: copies what this rank steps its parts by, and the first owner writes."""
        index = self._meeting.index
        self._held = {
            (there.state, key): entry.own.clone()
            for there in placed
            if there.block.shares and there.block.owner != index and there.block.is_written_by(index)
            for key, entry in self._entries.get(there.state, {}).items()
            if type(entry) is _Entry and not entry.told.is_cut
        }

    def take_written(self) -> None:
        """Called when the window opens: what the script has written into state of cut parameters counts: all have."""
        if self._is_cut_written():  # the kernel has copied whole pages, also of parts of others
            for entries in self._entries.values():
                for entry in entries.values():
                    if type(entry) is _Entry and entry.part is not None and entry.part is not entry.own:
                        entry.part.copy_(entry.block.part(entry.own, self._meeting.index))

    def _is_cut_written(self) -> bool:
        return any(next(pages.written(), None) is not None for pages in self._cut_parts)

    def narrow(self, optimizer: torch.optim.Optimizer, there: Placed) -> dict[str, Any] | None:
        """Lets a step find the state of the part of a cut parameter. Returns that of the whole; None: there is none."""
        parameter = there.state.parameter
        found: dict[str, Any] | None = optimizer.state.get(parameter)
        if found is not None:
            entries = self._entries.get(there.state, {})
            optimizer.state[parameter] = {
                key: self._narrowed(key, value, entries.get(key), there) if isinstance(value, torch.Tensor) else value
                for key, value in found.items()
            }
        return found

    def _narrowed(self, key: str, value: torch.Tensor, entry: Any, there: Placed) -> torch.Tensor:
        if type(entry) is _Entry and value is entry.own:
            return self._held[there.state, key] if entry.part is None else entry.part
        return self._part(value, there) if value.shape == there.view.shape else value.clone()

    def is_placed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether all tensors in the state are what owners have written."""
        if self._is_cut_written():
            return False
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
        for pages in self._cut_parts:
            pages.drop(0, pages.size)

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
        index = self._meeting.index

        def describe() -> None:
            for state, there in placed.items():
                if there.block.owner == index and not self._keep_own(optimizer.state, state, there):
                    found = optimizer.state.get(state.parameter, {})
                    own[state.name] = {key: _tell(there, key, value) for key, value in found.items()}

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
                    if placed[state].block.is_written_by(index):
                        self._move(optimizer.state.get(state.parameter, {}), new[state], placed[state])

        self._meeting.refuse_failures("state.moving", tried(copy))
        for state, entries in new.items():
            self._entries[state] = entries
            if placed[state].block.owner == index and not placed[state].block.shares:
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
        missing: list[tuple[ParameterState, str, Want]] = []
        new: dict[ParameterState, _Entries] = {state: {} for state in states}
        for state in states:
            before = self._entries.get(state, {})
            for key, told in changed[state.name].items():
                new[state][key] = told
                if type(told) is _Tensor:
                    entry, block = before.get(key), placed[state].block
                    if type(entry) is _Entry and entry.told == told and _is_at(entry, placed[state]):
                        new[state][key] = entry
                    else:
                        size = max(1, told.like().numel()) * told.dtype.itemsize
                        want = Want(block.owner, size, block.shares if told.is_cut else ())
                        missing.append((state, key, want))
        for is_cut, parts in ((False, self._parts), (True, self._cut_parts)):
            chosen = [item for item in missing if bool(placed[item[0]].block.shares) == is_cut]
            if chosen:
                pages, blocks = self._memory.append([want for _, _, want in chosen])
                parts.append(pages)
                for (state, key, _), block in zip(chosen, blocks, strict=True):
                    new[state][key] = self._entry(changed[state.name][key], block, placed[state])
        return new

    def _entry(self, told: _Tensor, block: Block, there: Placed) -> _Entry:
        index = self._meeting.index
        # A script that writes what others step by, too, as the first owner of a cut parameter, writes into its view.
        is_own = block.owner == index and not there.block.shares
        own = block.tensor(told.like(), alias=is_own).requires_grad_(told.requires_grad)
        if is_own:
            return _Entry(told, block, own, own)
        part = block.part(block.tensor(told.like(), alias=True), index) if block.is_written_by(index) else None
        return _Entry(told, block, own, part)

    def _move(self, found: dict[str, Any], entries: _Entries, there: Placed) -> None:
        """Gives the state of a parameter that this rank writes the memory that its entries have now, with its values.

        Raises:
            UsageError: The first owner of a cut parameter has others.
        """
        if found.keys() != entries.keys():
            raise UsageError(f"the optimizer's state of parameter {there.state.name!r} is not alike on all ranks")
        for key, entry in entries.items():
            if type(entry) is _Entry and found[key] is not entry.own and found[key] is not entry.part:
                self._write(entry, found[key].detach(), there)
                if not there.block.shares:
                    found[key] = entry.own

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the job has ended: state becomes this rank's own, with the values that it has."""
        for state, entries in self._entries.items():
            found = optimizer.state.get(state.parameter, {})
            for key, entry in entries.items():
                is_own = type(entry) is _Entry and entry.part is entry.own
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


def _is_at(entry: _Entry, there: Placed) -> bool:
    """Whether those write an entry who write its parameter."""
    block = entry.block
    return block.owner == there.block.owner and (block.shares == there.block.shares or not entry.told.is_cut)


def _describe(value: torch.Tensor, there: Placed) -> _Tensor:
    shares, view = there.block.shares, there.view
    lengths = [(share.end - share.start,) for share in shares]
    is_cut = bool(shares) and (value.shape == view.shape or tuple(value.shape) in lengths)
    like = view if is_cut else value
    return _Tensor(tuple(like.shape), like.stride(), value.dtype, value.requires_grad, is_cut)


def _tell(there: Placed, key: str, value: Any) -> Any:
    """An entry as its owner describes it to the others.

    Raises:
        UnsupportedError: It is of another kind.
    """
    if isinstance(value, torch.Tensor):
        if value.is_cpu and value.layout is torch.strided:
            return _describe(value if is_dense(value) else value.contiguous(), there)
    elif type(value) in _PLAIN:
        return value
    raise UnsupportedError(
        f"sharding=: the optimizer's state {key!r} of parameter {there.state.name!r} is a {type(value).__name__}, "
        "which ranks cannot share; leave sharding out"
    )
