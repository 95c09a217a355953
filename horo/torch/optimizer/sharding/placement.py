"""Parameters in the common memory: their way there, and the writes of a script into its views of them.

A parameter that would keep the ranks waiting for its owner is cut, where each rank can step a part of it.

A parameter moves in three steps: all ranks describe it and compare the descriptions; its owner copies it; when all
owners have, every rank sets ``p.data`` to its view. If a rank ends meanwhile, the others have whole values.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from horo.core.calls import is_shared
from horo.errors import UnsupportedError, UsageError
from horo.torch.compat.torch_private import storage_key
from horo.torch.engine.tensor_bytes import bytes_of
from horo.torch.optimizer.parameter_state import ParameterState
from horo.torch.optimizer.sharding.hosts import arithmetic, refuse_different, refuse_unlike
from horo.torch.optimizer.sharding.meeting import Meeting, own_process
from horo.torch.optimizer.sharding.memory import Block, HostMemory, Want, flat, is_dense, tried
from horo.torch.optimizer.sharding.owners import StepShare, cut, is_too_large, share_out
from horo.torch.optimizer.sharding.pages import Pages
from horo.torch.optimizer.sharding.window import Window
from horo.torch.optimizer.shared_gradients import COUNTS_IN_HOOKS

__all__ = ["ParameterPlacement", "Placed"]


class Placed(NamedTuple):
    """A parameter in the common memory."""

    state: ParameterState
    block: Block
    view: torch.Tensor
    alias: torch.Tensor
    address: int
    """The address of its view. A parameter that is elsewhere has left it."""

    def part(self, index: int) -> torch.Tensor:
        """The part of a writer with that place on the host."""
        return self.block.part(self.alias, index)

    def part_of_gradient(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        """The part of a cut parameter's gradient by which that rank steps; in its memory, if that is laid out alike."""
        if gradient.stride() != self.view.stride() or not is_dense(gradient):
            gradient = torch.empty_like(self.view, dtype=gradient.dtype).copy_(gradient)
        return self.block.part(gradient, index)


class _Description(NamedTuple):
    """A parameter that is to move, as ranks compare it."""

    likeness: tuple[Any, ...]
    """Shape, strides, dtype."""
    piece: tuple[int, int, int]
    """The number of the piece of memory that moves, its bytes, and the place of the parameter there, in elements."""
    is_trained: bool
    may_be_cut: bool
    checksum: int
    has_left: bool
    """Whether it was in the common memory before."""
    problem: str
    """The reason that it cannot move; empty if it can."""


class ParameterPlacement:
    """The parameters of one optimizer in the common memory of this host, in one job.

    Args:
        meeting: The ranks.
        may_cut: The optimizer steps each element of a parameter by itself.
    """

    def __init__(self, meeting: Meeting, *, may_cut: bool) -> None:
        self._meeting = meeting
        self._may_cut = may_cut
        self.memory = HostMemory(meeting)
        self.placed: dict[ParameterState, Placed] = {}
        self.window: Window | None = None
        """None until the memory is there."""
        self._parts: list[Pages] = []
        self._loads = [0] * len(meeting.host_ranks)
        self._is_warned = False

    def moved(self, states: Iterable[ParameterState]) -> list[ParameterState]:
        """The parameters that are not in place: not placed yet, their data was reassigned, or they are cut and have
        sparse gradients, by which some optimizers step otherwise or not at all."""
        placed = self.placed
        return [
            state
            for state in states
            if (there := placed.get(state)) is None
            or state.parameter.data_ptr() != there.address
            or (there.block.shares and _is_sparse(state.parameter))
            if state.parameter.numel()
        ]

    def keep_only(self, states: Iterable[ParameterState]) -> None:
        """Forgets the parameters that the optimizer has no longer."""
        self.placed = {state: self.placed[state] for state in states if state in self.placed}
        self._drop_parts()

    # -- writes of the step ------------------------------------------------------------------------------------------

    def take_reassigned(self, writing: Iterable[Placed]) -> None:
        """Called behind the step of a class that is not torch's: ``p.data = p.data - change`` is a write, too."""
        with torch.no_grad():
            for there in writing:
                if there.state.parameter.data_ptr() != there.alias.data_ptr():
                    there.alias.copy_(there.state.parameter.detach())

    def show(self) -> None:
        """Called when all owners have written: their writes count, not those of this rank's step into its views."""
        for pages in self._parts:
            for start, end in list(pages.written()):
                pages.drop(start, end)
        for there in self.placed.values():
            if there.state.parameter.data_ptr() != there.address:
                there.state.parameter.data = there.view

    # -- private writes --------------------------------------------------------------------------------------------

    def is_written(self) -> bool:
        """Whether this rank has written into its view of a parameter."""
        return any(next(pages.written(), None) is not None for pages in self._parts)

    def merge(self, steps: int) -> None:
        """Gives owners what all ranks have written alike, and drops the private copies. All ranks call it.

        Args:
            steps: The number of steps that have been done, for the error.

        Raises:
            UsageError: Ranks have written different things.
            GroupError: A rank is lost or has shut down.
        """
        written = {pages: ranges for pages in self._parts if (ranges := list(pages.written()))}
        changed = {
            item.state.name: item
            for item in self.placed.values()
            if item.block.pages in written
            if item.state.parameter.data_ptr() == item.address and not _equal_bytes(item.view, item.alias)
        }
        told = self._meeting.gather("written", {name: _checksum(item.view) for name, item in changed.items()})
        for name in sorted({name for sums in told.values() for name in sums}):
            ranks = [rank for rank, sums in told.items() if name in sums]
            if len(ranks) < len(told) or len({told[rank][name] for rank in ranks}) > 1:
                raise UsageError(_difference(name, ranks, steps))
        with torch.no_grad():
            for item in changed.values():
                if item.block.is_written_by(self._meeting.index):
                    item.part(self._meeting.index).copy_(item.block.part(item.view, self._meeting.index))
        for pages, ranges in written.items():
            for start, end in ranges:
                pages.drop(start, end)

    def compare_hosts(self, step: int) -> None:
        """Compares the parameters of all hosts. All ranks call it.

        Raises:
            UsageError: Hosts have different ones.
            GroupError: A rank is lost or has shut down.
        """
        own = [item for item in self.placed.values() if item.block.owner == self._meeting.index]
        told = self._meeting.gather("hosts", {item.state.name: _checksum(item.view) for item in own})
        refuse_different(told.values(), step)

    # -- moving ----------------------------------------------------------------------------------------------------

    def place(self, states: Sequence[ParameterState], moved: Sequence[ParameterState]) -> None:
        """Moves parameters into the common memory. All ranks call it.

        Args:
            states: All of the optimizer.
            moved: Those that are not in place on this rank; with those of other ranks, they move.

        Raises:
            UsageError: Ranks have different parameters, or one cannot move.
            ResourceError: There is no memory.
            GroupError: A rank is lost or has shut down.
        """
        names = self._meeting.gather("moved", [state.name for state in moved])
        wanted = {name for found in names.values() for name in found}
        moving = [state for state in states if state.name in wanted]
        described = self._describe(moving)
        giver = None if self.window is not None else self.memory.offer()
        try:
            told = self._meeting.gather(
                "described", (described, own_process(), None if giver is None else giver.address, arithmetic())
            )
            if self._meeting.is_on_hosts:
                refuse_unlike({rank: found[3] for rank, found in told.items()})
            self._compare({rank: found[0] for rank, found in told.items()})
            self._warn_of_shared(moving)
            new: dict[ParameterState, Placed] = {}

            def copy() -> None:
                if self.window is None:
                    processes = [told[rank][1] for rank in self._meeting.host_ranks]
                    address = told[self._meeting.host_ranks[0]][2]
                    self.memory.open(Window.size(len(processes)), giver, address)
                    self.window = Window(self.memory.descriptor, self._meeting.index, processes)
                new.update(self._copied(moving, described))

            self._meeting.refuse_failures("moving", tried(copy))
        finally:
            if giver is not None:
                giver.close()
        for state, placed in new.items():
            state.parameter.data = placed.view
        self.placed.update(new)
        self._drop_parts()

    def _drop_parts(self) -> None:
        """Forgets memory that no parameter is in any more."""
        used = {there.block.pages for there in self.placed.values()}
        self._parts = [pages for pages in self._parts if pages in used]

    def _copied(
        self, states: Sequence[ParameterState], described: dict[str, _Description]
    ) -> dict[ParameterState, Placed]:
        """The new places of the parameters, with the values of those that this rank owns."""
        new = self._returned(states, described)
        others = [state for state in states if state not in new]
        if others:
            new.update(self._laid_out(others, described))
        with torch.no_grad():
            for state, placed in new.items():
                if placed.block.is_written_by(self._meeting.index):
                    own = placed.block.part(state.parameter.detach(), self._meeting.index)
                    placed.part(self._meeting.index).copy_(own)
        return new

    def _returned(
        self, states: Sequence[ParameterState], described: dict[str, _Description]
    ) -> dict[ParameterState, Placed]:
        """The places of the parameters that have left theirs and fit there; ranks find the same ones."""
        renewed: dict[int, Block] = {}
        new = {}
        for state in states:
            there = self.placed.get(state)
            if there is None or _likeness(there.alias) != described[state.name].likeness:
                continue
            if there.block.shares and not described[state.name].may_be_cut:
                continue
            block, alias = there.block, there.alias
            if there.view.data_ptr() != there.address:
                block = renewed.setdefault(id(block), block.renewed())
                there = there._replace(block=block, view=block.tensor(alias, int(alias.storage_offset())))
            new[state] = there
        return new

    def _laid_out(
        self, states: Sequence[ParameterState], described: dict[str, _Description]
    ) -> dict[ParameterState, Placed]:
        pieces: dict[int, int] = {}
        trained: set[int] = set()
        owner_of: dict[int, int] = {}
        users: dict[int, list[ParameterState]] = {}
        for state in states:
            number, size, _ = described[state.name].piece
            pieces[number] = size
            users.setdefault(number, []).append(state)
            trained.update([number] if described[state.name].is_trained else [])
            if state in self.placed and not self.placed[state].block.shares:
                owner_of[number] = self.placed[state].block.owner
        new_pieces = {number: size * (number in trained) for number, size in pieces.items() if number not in owner_of}
        total = sum(self._loads) + sum(new_pieces.values())
        shares: dict[int, tuple[StepShare, ...]] = {}
        for number, size in new_pieces.items():
            first, *others = users[number]
            if not others and described[first.name].may_be_cut and is_too_large(size, total, len(self._loads)):
                shares[number] = cut(first.parameter.numel(), first.parameter.element_size(), self._loads)
                owner_of[number] = shares[number][0].owner
        whole = [number for number in new_pieces if number not in shares]
        owners = share_out([new_pieces[number] for number in whole], self._loads)
        owner_of.update(zip(whole, owners, strict=True))
        wants = [Want(owner_of[number], size, shares.get(number, ())) for number, size in pieces.items()]
        pages, blocks = self.memory.append(wants)
        block_of = dict(zip(pieces, blocks, strict=True))
        new = {}
        for state in states:
            number, _, offset = described[state.name].piece
            block, like = block_of[number], state.parameter.detach()
            view, alias = (block.tensor(like, offset, alias=is_alias) for is_alias in (False, True))
            new[state] = Placed(state, block, view, alias, view.data_ptr())
        self._parts.append(pages)
        return new

    def _describe(self, states: Sequence[ParameterState]) -> dict[str, _Description]:
        users: dict[int, list[ParameterState]] = {}
        for state in states:
            if state.parameter.is_cpu:
                users.setdefault(storage_key(state.parameter), []).append(state)
        described = {}
        pieces = {state: piece for found in users.values() for state, piece in _pieces(found).items()}
        numbers = {
            first: number for number, first in enumerate(dict.fromkeys(first for first, _, _ in pieces.values()))
        }
        for state in states:
            parameter = state.parameter
            problem = _problem(parameter, users.get(storage_key(parameter), []) if parameter.is_cpu else [])
            first, size, offset = pieces.get(state, (state, 0, 0))
            described[state.name] = _Description(
                _likeness(parameter),
                (numbers.get(first, 0), size, offset),
                parameter.requires_grad,
                self._may_cut and _steps_elements(parameter),
                0 if problem else _checksum(parameter),
                state in self.placed and parameter.data_ptr() != self.placed[state].address,
                problem,
            )
        return described

    def _compare(self, told: dict[int, dict[str, _Description]]) -> None:
        """Refuses what ranks do not have alike.

        Raises:
            UsageError: A parameter is not equal on all ranks, or cannot move.
        """
        first = next(iter(told.values()))
        for rank, described in told.items():
            if described.keys() != first.keys():
                name = sorted(described.keys() ^ first.keys())[0]
                raise UsageError(f"parameter {name!r} is not in the optimizer of every rank: rank {rank} differs")
            for name, found in described.items():
                if found.problem:
                    raise UnsupportedError(f"sharding=: parameter {name!r} {found.problem} (rank {rank})")
        for name, found in first.items():
            if any(
                described[name]._replace(has_left=False) != found._replace(has_left=False)
                for described in told.values()
            ):
                raise UsageError(_unequal(name, {rank: described[name] for rank, described in told.items()}))

    def _warn_of_shared(self, moving: Sequence[ParameterState]) -> None:
        if self._is_warned or not COUNTS_IN_HOOKS:
            return
        storages = [storage_key(state.parameter) for state in moving]
        for state in moving:
            if storages.count(storage_key(state.parameter)) == 1 and is_shared(state.parameter):
                self._is_warned = True
                warnings.warn(
                    f"sharding=: parameter {state.name!r} shares memory with another tensor, which keeps the old "
                    "values from the first step() on",
                    stacklevel=2,
                )
                return


def _difference(name: str, ranks: Sequence[int], steps: int) -> str:
    who = ", ".join(str(rank) for rank in ranks)
    return (
        f"parameter {name!r} is not equal on all ranks: changed on rank {who} since step {steps}; with sharding=, "
        "change parameters outside step() on all ranks alike, or undo the change before step()"
    )


def _unequal(name: str, found: dict[int, _Description]) -> str:
    left = [rank for rank, described in found.items() if described.has_left]
    if left:
        return (
            f"parameter {name!r} has left the shared memory (its data was reassigned) on rank "
            f"{', '.join(map(str, left))}, and is not equal on all ranks; do the same on all ranks"
        )
    return (
        f"parameter {name!r} is not equal on all ranks before the first step; call "
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training begins"
    )


def _likeness(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def _problem(parameter: torch.Tensor, users: Sequence[ParameterState]) -> str:
    """The reason that a parameter cannot move; ``users``: the parameters that have its storage."""
    if not parameter.is_cpu or parameter.layout is not torch.strided:
        return f"is on {parameter.device} with layout {parameter.layout}; sharding= is for dense ones in host memory"
    if not is_dense(parameter):
        return f"has strides {parameter.stride()} for shape {list(parameter.shape)}, which leave gaps or overlap"
    covered = 0
    for start, end in sorted(_extent(state.parameter) for state in users):
        if start > covered:
            break
        covered = max(covered, end)
    if covered < parameter.untyped_storage().nbytes():
        return "is a part of a larger tensor, which would not follow it; give it memory of its own (clone)"
    return ""


def _pieces(users: Sequence[ParameterState]) -> dict[ParameterState, tuple[ParameterState, int, int]]:
    """Of each parameter of a storage: the first one of its piece of memory, in which parameters overlap; the bytes of
    that; where the parameter begins there, in elements."""
    pieces: list[list[Any]] = []
    for state in sorted(users, key=lambda state: _extent(state.parameter)):
        start, end = _extent(state.parameter)
        if not pieces or start >= pieces[-1][1]:
            pieces.append([start, end, []])
        pieces[-1][1] = max(pieces[-1][1], end)
        pieces[-1][2].append(state)
    return {
        state: (members[0], end - start, (_extent(state.parameter)[0] - start) // state.parameter.element_size())
        for start, end, members in pieces
        for state in members
    }


def _extent(parameter: torch.Tensor) -> tuple[int, int]:
    start = int(parameter.storage_offset()) * parameter.element_size()
    return start, start + parameter.numel() * parameter.element_size()


def _steps_elements(parameter: torch.Tensor) -> bool:
    """Whether a step of a part of it has the bits of one of all: its gradient has all its rows, and no short dtype,
    which torch rounds otherwise at the ends of what a thread works on."""
    is_long = parameter.dtype in (torch.float32, torch.float64)
    return parameter.requires_grad and is_long and not _is_sparse(parameter)


def _is_sparse(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is not torch.strided


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(flat(one).view(torch.uint8), flat(other).view(torch.uint8))


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(flat(tensor).view(torch.uint8)))
