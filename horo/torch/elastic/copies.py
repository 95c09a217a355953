"""Tensors and objects as commits: one copy of each tensor, in memory that is allocated once."""

from __future__ import annotations

import hashlib
import io
import math
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch

from horo.elastic.commit_file import CommitFile
from horo.elastic.commits import Commit, CommitMemory, Found
from horo.torch.functions.pickling import pickled

__all__ = ["Copies", "Kept"]

_ALIGNMENT = 64

_Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""Of each tensor, the dtype and the shape."""


class Kept(NamedTuple):
    """A commit that was read."""

    commit: Commit
    objects: Any
    tensors: list[torch.Tensor]
    """On the CPU, in the memory of the commit."""


class Copies:
    """The commits of one state.

    Args:
        memory: Has them.
    """

    def __init__(self, memory: CommitMemory) -> None:
        self._memory = memory
        self._views: list[tuple[mmap.mmap, _Layout, list[torch.Tensor]]] = []
        """The tensors of the layout that each slot had last."""
        self._set_layout(())

    def write(self, commit: Commit, objects: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps tensors, on any device, and picklable objects.

        Raises:
            ResourceError: There is not enough memory.
            Exception: An object cannot be pickled. The commit before stays.
        """
        layout = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        if layout != self._layout:
            self._set_layout(layout)

        def fill(data: mmap.mmap) -> None:
            with torch.no_grad():
                for view, tensor in zip(self._views_of(data, layout), tensors, strict=True):
                    view.copy_(tensor)

        self._memory.write(commit, self._digest, self._end, self._pickled_layout + pickled(objects), fill)

    def _set_layout(self, layout: _Layout) -> None:
        """Sets the layout of the next commits: most have that of the one before."""
        self._layout, self._digest = layout, _digest(layout)
        self._pickled_layout, self._end = pickled(layout), _places(layout)[-1]

    def read(self) -> Kept | None:
        """The commit that was written last, by this process or an earlier one of its slot; None: there is none."""
        found = self._memory.latest()
        return None if found is None else self.unpacked(found)

    def keep_in(self, file: CommitFile) -> bool:
        """Writes the last commit to a file; whether that lacked it.

        Raises:
            ResourceError: It cannot be written.
        """
        found = self._memory.latest()
        return found is not None and file.write(found)

    def unpacked(self, found: Found) -> Kept | None:
        """A commit that was read elsewhere; None: its layout is not that of its tensors."""
        stream = io.BytesIO(found.objects)
        layout, objects = cloudpickle.load(stream), cloudpickle.load(stream)
        if _digest(layout) != found.layout:
            return None
        return Kept(found.commit, objects, self._views_of(found.data, layout))

    def _views_of(self, data: mmap.mmap, layout: _Layout) -> list[torch.Tensor]:
        for memory, known, views in self._views:
            if memory is data and known == layout:
                return views
        places = _places(layout)
        views = [_view(data, place, *form) for place, form in zip(places, layout, strict=False)]
        others = [each for each in self._views if each[0] is not data]
        self._views = [*others[-1:], (data, layout, views)]
        return views


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
