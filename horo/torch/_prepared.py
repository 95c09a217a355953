"""Requests that are kept for the next call that is like the last.

A training loop calls the same operations on tensors that look the same again and again. Then the request that the core
reads is there already, and only the addresses in it change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from horo import _core
from horo.torch._staging import Load, Spec, pack, stage

__all__ = ["Prepared", "Shelf"]

_Tensor, _strided = torch.Tensor, torch.strided  # looked up once, not per tensor

_SHELF_WEIGHT = 40_000
"""How many tensors the requests on a shelf have together; with what torch and Python keep of a shape, under 8 MiB."""
_REQUEST_WEIGHT = 10
"""What a request itself counts for beside its tensors."""


class Prepared:
    """A request but for its addresses and, without a name, its name."""

    __slots__ = ("_label", "_looks", "_name", "_spec", "_sync", "in_use", "slip")

    def __init__(self, spec: Spec, sync: bool, name: Callable[[str, str | None], str]) -> None:
        self._spec = spec
        self._sync = sync
        self._name = name
        self._looks: Sequence[tuple[torch.Size, torch.dtype]] | None = None
        self.in_use = threading.Lock()
        """Held by the call whose request this is."""
        self.in_use.acquire()
        self.slip = _core.Slip()
        self._label = ""
        if spec.name is not None:
            self._label = name(spec.kind, spec.name)
            self.slip.rename(self._label)

    def load(self, tensors: Sequence[torch.Tensor], in_place: bool) -> Load:
        """Makes it the request of an operation on ``tensors``.

        Raises:
            UsageError, UnsupportedError: The operation cannot be done with one of them.
        """
        sources = self._sources(tensors)
        if sources is None:
            return self._fill(tensors, in_place)
        if in_place or self._spec.collective == "allgather":
            self.slip.point(sources, sources)
            return Load(tensors, tensors, tensors)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        self.slip.point(sources, [output.data_ptr() for output in outputs])
        return Load(tensors, tensors, outputs)

    def label(self) -> str:
        """Its name on the wire. An automatic one is given and counted here, so only once nothing can be refused."""
        if self._spec.name is None:
            self._label = self._name(self._spec.kind, None)
            self.slip.rename(self._label)
        return self._label

    def _sources(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """The addresses of ``tensors`` if all can be used as they are and look as those before, else None."""
        looks = self._looks
        if looks is None or len(looks) != len(tensors):
            return None
        sources = []
        for tensor, (shape, dtype) in zip(tensors, looks, strict=True):
            if (
                type(tensor) is not _Tensor
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.layout is not _strided
                or not tensor.is_cpu
                or tensor.requires_grad
                or not tensor.is_contiguous()
                or tensor.is_neg()
            ):
                return None
            sources.append(tensor.data_ptr())
        return sources if all(sources) else None

    def _fill(self, tensors: Sequence[torch.Tensor], in_place: bool) -> Load:
        self._looks = None
        spec = self._spec
        load = stage(tensors, spec, in_place)
        self.slip.fill(
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
        return load


class Shelf:
    """The requests of a session, by what was asked for; those that were prepared first go first when it is full."""

    def __init__(self, name: Callable[[str, str | None], str]) -> None:
        self._name = name
        self._kept: dict[tuple[Spec, bool], tuple[Prepared, int]] = {}
        self._weight = 0
        self._lock = threading.Lock()

    def borrow(self, spec: Spec, sync: bool, tensor_count: int) -> Prepared:
        """A request of that spec, ``in_use`` by the caller, who releases that lock.

        Args:
            spec: The operation.
            sync: The caller waits at once.
            tensor_count: How many tensors it will have.

        Raises:
            UsageError: The name is no name.
        """
        key = spec, sync
        try:
            kept = self._kept.get(key)
        except TypeError:  # a name that cannot be hashed, so it is no string
            kept = None
        if kept is not None and kept[0].in_use.acquire(blocking=False):
            return kept[0]
        fresh = Prepared(spec, sync, self._name)
        if kept is None:
            self._keep(key, fresh, _REQUEST_WEIGHT + tensor_count)
        return fresh

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
            self._weight = 0

    def _keep(self, key: tuple[Spec, bool], prepared: Prepared, weight: int) -> None:
        if weight > _SHELF_WEIGHT:
            return
        with self._lock:
            while self._kept and self._weight + weight > _SHELF_WEIGHT:
                _, oldest = self._kept.pop(next(iter(self._kept)))
                self._weight -= oldest
            _, before = self._kept.get(key, (None, 0))
            self._kept[key] = prepared, weight
            self._weight += weight - before
