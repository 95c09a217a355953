"""A cache of requests: a call with the same arguments as an earlier call uses its request again.

A training loop repeats the same operations on tensors of the same shapes and dtypes. Then the request buffer is filled
already, and only the addresses in it change.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from horo.core import context
from horo.core.calls import Numbers, Slot, know_torch
from horo.torch.compat.profiler import begin_span, end_span, profiling
from horo.torch.compat.torch_private import exchange_table, forward_mode, is_transformed
from horo.torch.engine.devices import current_stream
from horo.torch.engine.operation import (
    GATHERING,
    Operation,
    StagedTensors,
    count_change,
    has_all_memory,
    make_outputs,
    pack,
    stage,
)

__all__ = ["AUTOMATIC", "CachedRequest", "Names", "RequestCache", "address_of", "taken_name"]

AUTOMATIC = ".noname."
"""Between the kind of an operation without a name and its number."""

_Tensor, _strided, _contiguous = torch.Tensor, torch.strided, torch.contiguous_format  # looked up once, not per tensor

know_torch(_Tensor, exchange_table(), profiling, count_change, forward_mode)

_WEIGHT_MAX = 40_000
"""Most tensors of all requests in a cache, besides those of optimizers. With the objects of torch and Python for a
shape, they take under 8 MiB."""
_REQUEST_WEIGHT = 10
"""Weight of a request itself, in tensors."""
_FORMS = 2
"""Requests that an optimizer has for one gradient: backward submits it, or it waits for it at once."""

_OFFERED_BYTES_MAX = (1 << 22) - 1
"""Largest result of an allgather or alltoall for which memory is offered: the core asks for huge pages above."""


def address_of(tensor: torch.Tensor, shape: torch.Size | None, dtype: torch.dtype | None) -> int:
    """The address of a tensor that has this shape and dtype and can be used without a copy; else 0."""
    try:
        if (
            type(tensor) is _Tensor
            and tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.layout is _strided
            and tensor.is_cpu
            and not tensor.requires_grad
            and forward_mode._current_level < 0
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and has_all_memory(tensor)
        ):
            return tensor.data_ptr()
    except RuntimeError:  # a nested tensor has no shape, one of torch.func no address
        if not tensor.is_nested and not is_transformed(tensor):  # a signal handler's
            raise
    return 0


def taken_name(team: int, label: str) -> str:
    """The key of ``Runtime.taken_names`` for a name on the wire. A label begins with a letter."""
    return label if team == 0 else f"{team}/{label}"


class Names(Protocol):
    """The names of a job's operations on the wire."""

    def name(self, kind: str, name: str | None, team: int = 0) -> str:
        """The name of one operation. An automatic one is counted."""

    def numbers(self, kind: str, team: int) -> Numbers:
        """The numbers of its automatic names."""


class CachedRequest(Slot):
    """A request without its addresses and, if it has an automatic name, without its name."""

    __slots__ = (
        "_casts",
        "_name",
        "_names",
        "_output_form",
        "_signatures",
        "_sync",
        "buffer",
        "device",
        "dtype",
        "shape",
        "spec",
        "taken_name",
        "weight",
    )

    def __init__(
        self,
        spec: Operation,
        sync: bool,
        names: Names,
        tensor_count: int,
        *,
        casts: bool,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._casts = casts
        self._sync = sync
        self._names = names
        self._signatures: Sequence[tuple[torch.Size, torch.dtype]] | None = None
        self._output_form: tuple[torch.Size, tuple[int, ...]] | None = None
        """Shape and strides of its result if it has only one and is not in place; None: the shape of its tensor.

        Not a tensor: what torch keeps of one lies among the program's tensors, and holds gaps open between them.
        """
        self.shape: torch.Size | None = None
        """Shape of its tensor, if it has only one; None before the first call."""
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        """The GPU that its tensors are on; None: they are in host memory."""
        self.is_taken = True  # by the call that makes it
        self.buffer = context.RequestBuffer()
        self.weight = _REQUEST_WEIGHT + tensor_count
        self._name: str | None = None  # without an automatic one
        self.taken_name: str | None = None
        """Key of its name in ``Runtime.taken_names``; None for an automatic name."""
        numbers, written = None, f"{spec.kind}{AUTOMATIC}"
        if spec.name is None:
            numbers = names.numbers(spec.kind, spec.team)
        else:
            self._name = written = names.name(spec.kind, spec.name, spec.team)
            self.taken_name = taken_name(spec.team, written)
        self.buffer.set_name(written)
        self.bind(*self.buffer.places(), numbers, len(written))

    @property
    def wire_name(self) -> str:
        """Its name, or that of its last call."""
        return self.buffer.name() if self._name is None else self._name

    @property
    def collective(self) -> str:
        """The operation of the core."""
        return self.spec.collective

    def address(self, tensor: torch.Tensor, is_out: bool) -> int:
        """For ``set_tensor``, where torch has no table for C: the address of a tensor, or of ``out``; else 0."""
        form = self._output_form if is_out else None
        return address_of(tensor, self.shape if form is None else form[0], self.dtype)

    def new_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """New memory for the result of this tensor."""
        form = self._output_form  # with strides it takes half the time
        if form is None:
            return torch.empty_like(tensor, memory_format=_contiguous)
        return tensor.new_empty_strided(*form)

    def begin_span(self) -> Any:
        """Shows the operation in torch's profiler, until ``end_span`` of what this returns."""
        return begin_span(self.collective, self.wire_name)

    def end_span(self, shown: Any) -> None:
        """As ``begin_span`` has it."""
        end_span(shown)

    def expect(self, tensor: torch.Tensor, spec: Operation, result: torch.Tensor, *, is_out: bool) -> None:
        """Notes the result of an allgather or alltoall of ``tensor``, of which ``spec`` has the splits.

        If the last one was of the same shape and dtype too, the request is made ready to offer memory for such a
        result: ``set_tensor`` succeeds from then on. ``is_out``: that memory is the caller's.
        """
        seen = [(tensor.shape, tensor.dtype), (result.shape, result.dtype)]
        is_second, self._signatures = seen == self._signatures, seen
        self.shape = self.dtype = None
        self.is_ready = False
        bytes_offered = result.numel() * result.element_size()
        if (
            not is_second
            or not bytes_offered > 0
            or not (is_out or bytes_offered <= _OFFERED_BYTES_MAX)
            or tensor.is_complex()  # the next one may be conjugated lazily
            or not address_of(tensor, tensor.shape, tensor.dtype)
        ):
            return
        self.spec = spec
        (packed,) = pack(StagedTensors([tensor], [tensor], [result]), spec)
        self.device = None
        self._fill_buffer([packed._replace(output_bytes=bytes_offered)], offers=True)
        self.shape, self.dtype, self._output_form = tensor.shape, tensor.dtype, (result.shape, result.stride())
        self.learn(tensor, result.detach(), tensor.nbytes, bytes_offered)

    def forget(self) -> None:
        """Forgets what did not fit its result: ``set_tensor`` fails until ``expect`` has been called twice."""
        self._signatures = self.shape = self.dtype = None
        self.is_ready = False

    def set_tensors(self, tensors: Sequence[torch.Tensor], in_place: bool) -> StagedTensors:
        """Sets the tensors of the request.

        Raises:
            UsageError, UnsupportedError: The operation cannot be done with one of them.
        """
        sources = self._sources(tensors)
        if sources is None:
            return self._fill(tensors, in_place)
        if in_place or self.spec.collective in GATHERING:
            self.buffer.set_addresses(sources, sources)
            return StagedTensors(tensors, tensors, tensors)
        outputs = make_outputs(tensors, self.spec)
        self.buffer.set_addresses(sources, [output.data_ptr() for output in outputs])
        return StagedTensors(tensors, tensors, outputs)

    def label(self) -> str:
        """Its name on the wire. An automatic name is counted here: call this only when nothing can be refused."""
        if self._name is not None:
            return self._name
        label = self._names.name(self.spec.kind, None, self.spec.team)
        self.buffer.set_name(label)
        return label

    def _sources(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """The addresses of ``tensors`` if all can be used without a copy and have the same signatures, else None."""
        signatures = self._signatures
        if signatures is None or len(signatures) != len(tensors):
            return None
        sources = [address_of(tensor, *signature) for tensor, signature in zip(tensors, signatures, strict=True)]
        return sources if all(sources) else None

    def _fill(self, tensors: Sequence[torch.Tensor], in_place: bool) -> StagedTensors:
        self._signatures = None
        self.is_ready = False
        spec = self.spec
        staged = stage(tensors, spec, in_place, casts=self._casts)
        self.device = staged.device
        self._fill_buffer(pack(staged, spec))
        if self.device is not None or any(source.is_complex() for source in staged.inputs):
            self.shape = self.dtype = None  # a stream may change, and a complex tensor be conjugated lazily
            return staged
        self._signatures = [(source.shape, source.dtype) for source in staged.inputs]
        self.shape, self.dtype = self._signatures[0] if len(self._signatures) == 1 else (None, None)
        only = staged.outputs[0] if self.collective == "reducescatter" else None
        self._output_form = None if only is None else (only.shape, only.stride())
        if self.shape is not None:
            source, target = staged.inputs[0].detach(), staged.outputs[0].detach()
            self.learn(source, target, source.nbytes, target.nbytes)
        return staged

    def _fill_buffer(self, tensors: Sequence[context.Tensor], *, offers: bool = False) -> None:
        spec, device = self.spec, self.device
        self.buffer.fill(
            context.OPS[spec.collective],
            tensors,
            reduce_op=spec.reduce_op,
            root_rank=spec.root_rank,
            prescale=spec.prescale,
            postscale=spec.postscale,
            sync=self._sync,
            transient=spec.name is None,
            offers=offers,
            team=spec.team,
            device=0 if device is None else device.index + 1,
            stream=0 if device is None else current_stream(device),
        )


class RequestCache:
    """The requests of one job by key. When it is full, the one that was made first goes."""

    def __init__(self, names: Names, *, casts: bool = False) -> None:
        self._names = names
        self._casts = casts
        """As the argument of ``stage``."""
        self.kept: dict[Hashable, CachedRequest] = {}
        self._weight = 0
        self._rooms: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        """Weights of the requests of optimizers, as long as those live."""
        self._lock = threading.RLock()  # a signal handler may communicate, too

    def take(self, key: Hashable) -> CachedRequest | None:
        """The cached request of ``key``; None if there is none or another call uses it. The caller uses it now.

        Args:
            key: Equal exactly for equal requests, such as the arguments of a call.
        """
        try:
            cached = self.kept.get(key)
        except TypeError:  # a name that cannot be hashed, so it is no string
            return None
        return cached if cached is not None and cached.take() else None

    def find(self, key: Hashable) -> CachedRequest | None:
        """The cached request of ``key``, whether in use or not."""
        return self.kept.get(key)

    def take_or_create(self, key: Hashable, spec: Operation, sync: bool, tensor_count: int) -> CachedRequest:
        """The cached request, or a new one. The caller sets its ``is_taken`` to False after use.

        Args:
            key: As for ``take``; None if the request is not to be cached.
            spec: The operation.
            sync: The caller waits at once.
            tensor_count: How many tensors it will have.

        Raises:
            UsageError: The name is not a valid name.
        """
        kept = None if key is None else self.take(key)
        if kept is not None:
            return kept
        fresh = CachedRequest(spec, sync, self._names, tensor_count, casts=self._casts)
        if key is not None and key not in self.kept:
            self._keep(key, fresh)
        return fresh

    def make_room(self, owner: object, gradients: int) -> None:
        """Makes room, as long as ``owner`` lives, for the requests of so many gradients."""
        with self._lock:
            rooms = weakref.WeakKeyDictionary(self._rooms)  # another thread may be adding up the old ones
            rooms[owner] = _FORMS * gradients * (_REQUEST_WEIGHT + 1)
            self._rooms = rooms

    def clear(self) -> None:
        """Removes all requests."""
        with self._lock:
            self.kept.clear()
            self._weight = 0

    def _keep(self, key: Hashable, cached: CachedRequest) -> None:
        room = _WEIGHT_MAX + sum(self._rooms.values())
        if cached.weight > room:
            return
        cached.key = key
        with self._lock:
            while self.kept and self._weight + cached.weight > room:
                self._weight -= self.kept.pop(next(iter(self.kept))).weight
            if self.kept.setdefault(key, cached) is cached:
                self._weight += cached.weight
