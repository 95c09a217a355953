"""Tensors and objects as commits: one copy of each tensor, in memory that is allocated once.

Of tensors that are equal on all ranks of a host, one copy can be enough there: each rank writes a share of it.
"""

from __future__ import annotations

import hashlib
import io
import math
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch

from horo.elastic import commits
from horo.elastic.commit_file import CommitFile
from horo.elastic.commits import Commit, CommitMemory, CommitShare, CommonMemory, Found
from horo.torch.functions.pickling import pickled

__all__ = ["Copies", "Kept", "likeness"]

_ALIGNMENT = 64
_MEMORIES = 4
"""Two slots, each of own and of common memory."""

_Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Of each tensor, the dtype and the shape."""


class Kept(NamedTuple):
    """A commit that was read."""

    commit: Commit
    objects: Any
    tensors: list[torch.Tensor]
    """On the CPU, in the memory of the commit."""
    is_split: bool = False
    """Whether some are in common memory."""
    is_there: Callable[[], bool] = lambda: True
    """Whether that has the commit still: other ranks may have gone on."""


class _Split(NamedTuple):
    """The objects of a commit some of whose tensors are in the common memory."""

    objects: Any
    key: bytes
    layout: _Layout
    """Of the tensors there."""
    is_common: tuple[bool, ...]
    """Of each tensor, whether it is there."""


class Copies:
    """The commits of one state.

    Args:
        memory: Has them.
        common: Has, once for all ranks of this host, what is equal on them.

    Attributes:
        share: This rank's part in a commit of all ranks of the host; None: each has a whole one.
    """

    def __init__(self, memory: CommitMemory, common: CommonMemory | None = None) -> None:
        self._memory, self._common = memory, common
        self.share: CommitShare | None = None
        self.common_identity = 0 if common is None else common.identity
        """Equal on ranks that have the same common memory; 0: this one has none."""
        self._views: list[tuple[mmap.mmap, _Layout, list[torch.Tensor]]] = []
        """The tensors of the layout that each slot had last."""
        self._set_layout(())

    def write(
        self, commit: Commit, objects: Any, tensors: Sequence[torch.Tensor], is_common: Sequence[bool] = ()
    ) -> None:
        """Keeps tensors, on any device, and picklable objects.

        Args:
            commit: Any.
            objects: Any.
            tensors: Any.
            is_common: Of each tensor, whether all ranks of this host write it now, with equal values. Empty: none.

        Raises:
            ResourceError: There is not enough memory.
            Exception: An object cannot be pickled. The commit before stays.
        """
        if self._common is not None and self.share is not None and self.share.count > 1 and any(is_common):
            shared = list(compress(tensors, is_common))
            key = self._write_share(self._common, self.share, commit, shared)
            objects = _Split(objects, key, _layout(shared), tuple(is_common))
            tensors = list(compress(tensors, (not each for each in is_common)))
        layout = _layout(tensors)
        if layout != self._layout:
            self._set_layout(layout)

        def fill(data: mmap.mmap) -> None:
            with torch.no_grad():
                for view, tensor in zip(self._views_of(data, layout), tensors, strict=True):
                    view.copy_(tensor)

        self._memory.write(commit, self._digest, self._end, self._pickled_layout + pickled(objects), fill)

    def _write_share(
        self, common: CommonMemory, share: CommitShare, commit: Commit, tensors: Sequence[torch.Tensor]
    ) -> bytes:
        """Writes what is this rank's of tensors that all ranks have; returns the key of the whole."""
        layout = _layout(tensors)
        places, count = _places(layout), share.count
        size, written = places[-1], repr((commit, count, share.generation))
        key = hashlib.blake2b(written.encode(), digest_size=32, key=_digest(layout)).digest()

        def fill(data: mmap.mmap) -> None:
            first, last = (size * number // count for number in (share.index, share.index + 1))
            with torch.no_grad():
                for view, tensor, place in zip(self._views_of(data, layout), tensors, places, strict=False):
                    rows = [_rows_before(edge - place, tensor) for edge in (first, last)]
                    if tensor.dim() and rows[0] < rows[1]:
                        view[slice(*rows)].copy_(tensor[slice(*rows)])
                    elif rows[0] < rows[1]:
                        view.copy_(tensor)

        common.write(key, share, size, fill)
        return key

    def _set_layout(self, layout: _Layout) -> None:
        """Sets the layout of the next commits: most have that of the one before."""
        self._layout, self._digest = layout, _digest(layout)
        self._pickled_layout, self._end = pickled(layout), _places(layout)[-1]

    def read(self) -> Kept | None:
        """The commit that was written last, by this process or an earlier one of its slot; None: there is none."""
        return next((kept for found in self._memory.whole() if (kept := self.unpacked(found)) is not None), None)

    def keep_in(self, file: CommitFile) -> bool:
        """Writes the last commit to a file; whether that lacked it.

        Raises:
            ResourceError: It cannot be written.
        """
        for found in self._memory.whole():
            kept = self.unpacked(found)
            if kept is not None:
                return file.write(found, partial(_joined, kept) if kept.is_split else None)
        return False

    def unpacked(self, found: Found) -> Kept | None:
        """A commit that was read; None: its layout is not that of its tensors, or a share of it is missing."""
        stream = io.BytesIO(found.objects)
        layout, objects = cloudpickle.load(stream), cloudpickle.load(stream)
        if _digest(layout) != found.layout:
            return None
        views = self._views_of(found.data, layout)
        if not isinstance(objects, _Split):
            return Kept(found.commit, objects, views)
        common, key, size = self._common, objects.key, _places(objects.layout)[-1]
        data = None if common is None else common.find(key, size)
        if common is None or data is None:
            return None
        both = {True: iter(self._views_of(data, objects.layout)), False: iter(views)}
        tensors = [next(both[is_common]) for is_common in objects.is_common]
        return Kept(found.commit, objects.objects, tensors, True, lambda: common.find(key, size) is data)

    def _views_of(self, data: mmap.mmap, layout: _Layout) -> list[torch.Tensor]:
        for memory, known, views in self._views:
            if memory is data and known == layout:
                return views
        places = _places(layout)
        views = [_view(data, place, *form) for place, form in zip(places, layout, strict=False)]
        others = [each for each in self._views if each[0] is not data]
        self._views = [*others[1 - _MEMORIES :], (data, layout, views)]
        return views


def _joined(kept: Kept) -> Found | None:
    """A commit in memory of its own; None: some of it is no longer there."""
    memory = CommitMemory(commits.create(), os.urandom(16), keeps_last=False)
    Copies(memory).write(kept.commit, kept.objects, kept.tensors)
    return memory.latest() if kept.is_there() else None


def likeness(commit: Commit, tensors: Sequence[torch.Tensor]) -> int:
    """A positive number of 63 bits, which is another one for another commit, and for other dtypes or shapes."""
    return int.from_bytes(_digest(((torch.int64, tuple(commit)), *_layout(tensors)))[:8], "little") >> 1


def _layout(tensors: Sequence[torch.Tensor]) -> _Layout:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def _rows_before(edge: int, tensor: torch.Tensor) -> int:
    """The number of rows of a tensor that begin before an edge, in bytes from its own begin; it may lie outside."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return min(max(-(-edge * rows // max(tensor.nbytes, 1)), 0), rows)


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _places(layout: _Layout) -> list[int]:
    """The offset of each tensor, and the end of the last one."""
    places = [0]
    for form in layout:
        places.append(places[-1] + -(-_bytes(*form) // _ALIGNMENT) * _ALIGNMENT)
    return places


def _view(data: mmap.mmap, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = _bytes(dtype, shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=place).view(dtype).view(shape)


def _digest(layout: _Layout) -> bytes:
    return hashlib.blake2b(repr(layout).encode(), digest_size=32).digest()
