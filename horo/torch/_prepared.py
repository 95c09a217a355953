"""Requests that are kept for the next call that is like the last.

A training loop calls the same operations on tensors that look the same again and again. Then the request that the core
reads is there already, and only the addresses in it change.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from horo import _core
from horo.torch._staging import Load, Spec, pack, stage

__all__ = ["Prepared", "Shelf", "address_of"]

_Tensor, _strided = torch.Tensor, torch.strided  # looked up once, not per tensor

_SHELF_WEIGHT = 40_000
"""How many tensors the requests on a shelf have together; with what torch and Python keep of a shape, under 8 MiB."""
_REQUEST_WEIGHT = 10
"""What a request itself counts for beside its tensors."""
_NEWCOMERS = 32
"""On a full shelf one new request in so many takes the place of others. If each did, a step with a few more requests
than there is room for would find none of them, since each would have gone just before it was asked for again."""


def address_of(tensor: torch.Tensor, shape: torch.Size | None, dtype: torch.dtype | None) -> int:
    """Where a tensor's memory is if it can be used as it is and looks so, else 0."""
    if (
        type(tensor) is _Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.layout is _strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        return tensor.data_ptr()
    return 0


class Prepared:
    """A request but for its addresses and, without a name, its name."""

    __slots__ = ("_label", "_looks", "_name", "_spec", "_sync", "buffer", "dtype", "shape", "turn", "weight")

    def __init__(self, spec: Spec, sync: bool, name: Callable[[str, str | None], str], tensor_count: int) -> None:
        self._spec = spec
        self._sync = sync
        self._name = name
        self._looks: Sequence[tuple[torch.Size, torch.dtype]] | None = None
        self.shape: torch.Size | None = None
        """How its tensor looks, if it has one only; None before the first call."""
        self.dtype: torch.dtype | None = None
        self.turn: list[None] = []
        """Empty while a call uses the request; it appends None when done. Nothing locks for less."""
        self.buffer = _core.RequestBuffer()
        self.weight = _REQUEST_WEIGHT + tensor_count
        self._label = ""
        if spec.name is not None:
            self._label = name(spec.kind, spec.name)
            self.buffer.set_name(self._label)

    def aim(self, tensor: torch.Tensor, in_place: bool) -> torch.Tensor | None:
        """Makes it the request of an operation on ``tensor`` alone, if that looks as the one before.

        Returns:
            The tensor for the result; None if ``load`` has to have a closer look.
        """
        address = address_of(tensor, self.shape, self.dtype)
        if not address:
            return None
        rows = self.buffer.rows
        if in_place:
            rows[0] = rows[1] = address
            return tensor
        output = torch.empty_like(tensor)
        rows[0], rows[1] = address, output.data_ptr()
        return output

    def load(self, tensors: Sequence[torch.Tensor], in_place: bool) -> Load:
        """Makes it the request of an operation on ``tensors``.

        Raises:
            UsageError, UnsupportedError: The operation cannot be done with one of them.
        """
        sources = self._sources(tensors)
        if sources is None:
            return self._fill(tensors, in_place)
        if in_place or self._spec.collective == "allgather":
            self.buffer.set_addresses(sources, sources)
            return Load(tensors, tensors, tensors)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        self.buffer.set_addresses(sources, [output.data_ptr() for output in outputs])
        return Load(tensors, tensors, outputs)

    def label(self) -> str:
        """Its name on the wire. An automatic one is given and counted here, so only once nothing can be refused."""
        if self._spec.name is None:
            self._label = self._name(self._spec.kind, None)
            self.buffer.set_name(self._label)
        return self._label

    def _sources(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """The addresses of ``tensors`` if all can be used as they are and look as those before, else None."""
        looks = self._looks
        if looks is None or len(looks) != len(tensors):
            return None
        sources = [address_of(tensor, *look) for tensor, look in zip(tensors, looks, strict=True)]
        return sources if all(sources) else None

    def _fill(self, tensors: Sequence[torch.Tensor], in_place: bool) -> Load:
        self._looks = None
        spec = self._spec
        load = stage(tensors, spec, in_place)
        self.buffer.fill(
            _core.OPS[spec.collective],
            pack(load, spec),
            reduce_op=spec.reduce_op,
            root_rank=spec.root_rank,
            prescale=spec.prescale,
            postscale=spec.postscale,
            sync=self._sync,
            transient=spec.name is None,
        )
        self._looks = [(source.shape, source.dtype) for source in load.inputs]
        self.shape, self.dtype = self._looks[0] if len(self._looks) == 1 else (None, None)
        return load


class Shelf:
    """The requests of a session, by what was asked for; when it is full, the few that newcomers oust are the oldest."""

    def __init__(self, name: Callable[[str, str | None], str]) -> None:
        self._name = name
        self._kept: dict[Hashable, Prepared] = {}
        self._weight = 0
        self._lock = threading.Lock()

    def find(self, asked: Hashable) -> Prepared | None:
        """The request that is kept of what was asked for, if nobody uses it; now the caller does.

        Args:
            asked: Anything that is equal exactly if the same is asked for, such as the arguments of a call.
        """
        try:
            prepared = self._kept[asked]
            prepared.turn.pop()
        except (IndexError, KeyError, TypeError):  # in use; not there; a name that cannot be hashed, so it is no string
            return None
        return prepared

    def borrow(self, asked: Hashable, spec: Spec, sync: bool, tensor_count: int) -> Prepared:
        """The request that is kept, or a fresh one. The caller gives back its ``turn`` after use.

        Args:
            asked: As for ``find``; None if the request shall not be kept.
            spec: The operation.
            sync: The caller waits at once.
            tensor_count: How many tensors it will have.

        Raises:
            UsageError: The name is no name.
        """
        kept = None if asked is None else self.find(asked)
        if kept is not None:
            return kept
        fresh = Prepared(spec, sync, self._name, tensor_count)
        if asked is not None and asked not in self._kept:
            self._keep(asked, fresh)
        return fresh

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
            self._weight = 0

    def _keep(self, asked: Hashable, prepared: Prepared) -> None:
        if prepared.weight > _SHELF_WEIGHT:
            return
        with self._lock:
            if self._weight + prepared.weight > _SHELF_WEIGHT and random.randrange(_NEWCOMERS):
                return
            while self._kept and self._weight + prepared.weight > _SHELF_WEIGHT:
                self._weight -= self._kept.pop(next(iter(self._kept))).weight
            if self._kept.setdefault(asked, prepared) is prepared:
                self._weight += prepared.weight
