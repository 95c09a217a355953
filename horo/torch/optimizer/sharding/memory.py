"""The memory that an optimizer's ranks on one host share: a file that grows, and the blocks in it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from horo.bootstrap.host.passed_file import FileAddress, FileGiver, take_file
from horo.core.memory import create_memory
from horo.errors import HoroError, ResourceError
from horo.torch.optimizer.sharding.meeting import Meeting
from horo.torch.optimizer.sharding.owners import StepShare
from horo.torch.optimizer.sharding.pages import Pages, rounded

__all__ = ["Block", "HostMemory", "Want", "flat", "is_dense", "tried"]

_ALIGNMENT = 64
_SMALL = 64
_SMALL_ALIGNMENT = 16


class Want(NamedTuple):
    """A block that is to be made."""

    owner: int
    """Its place on the host."""
    size: int
    shares: tuple[StepShare, ...] = ()
    """The shares of its writers, if it is cut; the first is the owner's."""


class Block(NamedTuple):
    """Memory for a storage: one rank of the host writes it, or each its share of it."""

    owner: int
    shares: tuple[StepShare, ...]
    pages: Pages
    offset: int
    view: torch.UntypedStorage
    alias: torch.UntypedStorage

    def is_written_by(self, index: int) -> bool:
        """Whether the rank with that place on the host writes here."""
        return self.owner == index or any(share.owner == index for share in self.shares)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The part of a tensor that a writer steps: all of it; if the block is cut, a row of its elements."""
        if not self.shares:
            return tensor
        share = next(share for share in self.shares if share.owner == index)
        return flat(tensor)[share.start : share.end]

    def renewed(self) -> Block:
        """The same memory, with another view: ``share_memory_()`` takes a storage away with all tensors in it."""
        return self._replace(view=self.pages.storage(self.offset, self.alias.nbytes(), alias=False))

    def tensor(self, like: torch.Tensor, offset: int = 0, *, alias: bool = False) -> torch.Tensor:
        """A tensor in it with the dtype, shape and strides of ``like``; ``offset`` in elements."""
        storage = self.alias if alias else self.view
        with torch.no_grad():
            return torch.empty(0, dtype=like.dtype, device="cpu").set_(storage, offset, like.size(), like.stride())


class HostMemory:
    """A file of the ranks of one host, and its parts that are mapped.

    Args:
        meeting: The ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.descriptor = -1
        self._size = 0

    def offer(self) -> FileGiver | None:
        """At the rank that makes the memory, what gives it to the others; None elsewhere.

        Raises:
            ResourceError: No socket can be made.
        """
        is_alone = len(self._meeting.host_ranks) == 1
        return FileGiver() if self._meeting.index == 0 and not is_alone else None

    def open(self, size: int, giver: FileGiver | None, address: FileAddress | None) -> None:
        """Makes the file, or takes it from the rank that has; blocks until all ranks of the host have it.

        Args:
            size: Of its beginning, in bytes.
            giver: As ``offer`` has returned it.
            address: Of the giver; None if it has failed.

        Raises:
            ResourceError: There is no memory, or a rank did not come for it.
        """
        meeting = self._meeting
        if meeting.index == 0:
            self._keep(create_memory(size))
            if giver is not None:
                takers = len(meeting.host_ranks) - 1
                giver.give(self.descriptor, takers, meeting.timeout_s, meeting.refuse_ended)
        elif address is None:
            raise ResourceError("the first rank of this host has no socket to pass shared memory over")
        else:
            self._keep(take_file(address, meeting.timeout_s))
        self._size = size

    def _keep(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False

    def append(self, wants: Sequence[Want]) -> tuple[Pages, list[Block]]:
        """Makes the file longer by these blocks; all ranks of the host do so alike.

        Args:
            wants: The blocks.

        Raises:
            ResourceError, UnsupportedError: As ``Pages``.
        """
        offsets, size = _lay_out(wants)
        end = self._size + size
        try:
            if os.fstat(self.descriptor).st_size < end:
                os.ftruncate(self.descriptor, end)
        except OSError as error:
            # Another rank may have made it longer meanwhile, also for later blocks; it cannot be made shorter.
            if os.fstat(self.descriptor).st_size < end:
                raise ResourceError(f"shared memory of {end} bytes cannot be had: {error.strerror}") from error
        pages = Pages(self.descriptor, self._size, size)
        self._size = end
        blocks = []
        for want, offset in zip(wants, offsets, strict=True):
            view, alias = (pages.storage(offset, want.size, alias=is_alias) for is_alias in (False, True))
            blocks.append(Block(want.owner, want.shares, pages, offset, view, alias))
        return pages, blocks


def _lay_out(wants: Sequence[Want]) -> tuple[list[int], int]:
    """The place of each block, and the length of all: what different owners write lies on different pages."""
    offsets = [0] * len(wants)
    end = 0
    for index, want in enumerate(wants):
        if want.shares:
            offsets[index] = end
            end = rounded(end + want.size)
    for owner in sorted({want.owner for want in wants}):
        end = rounded(end)
        for index, want in enumerate(wants):
            if want.owner == owner and not want.shares:
                alignment = _ALIGNMENT if want.size >= _SMALL else _SMALL_ALIGNMENT
                end = -(-end // alignment) * alignment
                offsets[index] = end
                end += want.size
    return offsets, rounded(end)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, each one place of it."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def tried(step: Callable[[], None]) -> HoroError | None:
    """The error that a step of this rank raises, which all ranks must learn before any of them raises."""
    try:
        step()
    except HoroError as error:
        return error
    return None
