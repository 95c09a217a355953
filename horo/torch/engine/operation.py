"""Tensors of the user as memory that the core can work on, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from horo.core import context
from horo.errors import UnsupportedError, UsageError
from horo.torch.compat.torch_private import change_counter, has_tangent, is_transformed
from horo.torch.engine.devices import new_empty, place

__all__ = [
    "DTYPES",
    "GATHERING",
    "Operation",
    "StagedTensors",
    "check_tensor",
    "count_change",
    "describe",
    "has_all_memory",
    "is_reducible",
    "list_tensors",
    "make_outputs",
    "pack",
    "refuse_lazy",
    "share_of_rows",
    "stage",
]

GATHERING = ("allgather", "alltoall")
"""Operations for which the core allocates the results, because their sizes depend on the other ranks."""

_REDUCING = ("allreduce", "reducescatter")

_NO_MEMORY = (
    "has no memory of its own, so there is nothing to send; call it with the tensor that it stands for, outside of "
    "FakeTensorMode and torch.export"
)

_NARROWED = (torch.float32, torch.float64)
"""Dtypes that can be sent as a 16-bit float."""

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, number in context.DTYPES.items() if hasattr(torch, name)
}
_REDUCIBLE_END = 1 + context.DTYPES["bool"]


count_change = change_counter()


class Operation(NamedTuple):
    """An operation without its tensors."""

    kind: str
    """First part of its name on the wire: "allreduce", or the function that the user called."""
    name: str | None
    """The rest of it; None for an automatic one."""
    reduce_op: int = 0
    """``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``."""
    prescale: float = 1.0
    """Multiplied in before the reduction."""
    postscale: float = 1.0
    """Multiplied in after it."""
    wire: torch.dtype | None = None
    """float16 or bfloat16: float32 and float64 tensors are rounded to it while they are sent."""
    root_rank: int = 0
    collective: str = "allreduce"
    """The operation of the core by its name in ``context.OPS``."""
    team: int = 0
    """The core's number of the ranks that take part."""
    splits: tuple[int, ...] = ()
    """For an alltoall: rows of its tensor for each rank, all of them together."""
    place: tuple[int, int] = (0, 1)
    """For a reducescatter: number of this rank among those that take part, and how many they are."""


class StagedTensors(NamedTuple):
    """The tensors of one request. The core reads ``inputs`` and writes ``outputs`` until the request is done."""

    tensors: Sequence[torch.Tensor]
    """The tensors of the user."""
    inputs: Sequence[torch.Tensor]
    """The same or contiguous copies, perhaps in the dtype that they travel as."""
    outputs: Sequence[torch.Tensor]
    """``inputs`` itself for an operation in place, and for those of ``GATHERING``."""
    device: torch.device | None = None
    """The GPU that ``inputs`` and ``outputs`` are on; None: they are in host memory."""

    def on_device(self) -> list[torch.Tensor]:
        """All tensors that the request uses."""
        return [*self.inputs, *(self.outputs if self.outputs is not self.inputs else ())]

    def results(self) -> tuple[torch.Tensor, ...]:
        """The results; in place, the user's tensors, marked as changed for autograd."""
        if self.outputs is not self.inputs:
            if self.device is None:
                return tuple(self.outputs)
            return tuple(
                output if output.dtype == tensor.dtype else output.to(tensor.dtype)
                for tensor, output in zip(self.tensors, self.outputs, strict=True)
            )
        if self.inputs is self.tensors:
            count_change(self.tensors)
            return tuple(self.tensors)
        written = []
        for tensor, output in zip(self.tensors, self.outputs, strict=True):
            if tensor is output:
                written.append(tensor)
            else:
                with torch.no_grad():
                    tensor.copy_(output)
        count_change(written)
        return tuple(self.tensors)


def stage(tensors: Sequence[torch.Tensor], spec: Operation, in_place: bool, *, casts: bool = False) -> StagedTensors:
    """Finds memory for an operation on ``tensors``.

    Args:
        tensors: Dense tensors of any shape and strides, in host memory or on GPUs.
        spec: The operation.
        in_place: Write the results into ``tensors``, else into new contiguous tensors.
        casts: Tensors on a GPU are converted there to what they travel as: NCCL converts nothing.

    Raises:
        UsageError, UnsupportedError: The operation cannot be done with one of them.
    """
    inputs: Sequence[torch.Tensor] = [_source(tensor, spec, in_place) for tensor in tensors]
    device = None
    if not all(tensor.is_cpu for tensor in inputs):
        device, inputs = place(inputs, describe(spec.kind, spec.name), in_place=in_place)
    if casts and device is not None and spec.wire is not None:
        inputs = [each.detach().to(spec.wire) if each.dtype in _NARROWED else each for each in inputs]
    if in_place or spec.collective in GATHERING:
        return StagedTensors(tensors, inputs, inputs, device)
    return StagedTensors(tensors, inputs, make_outputs(inputs, spec), device)


def make_outputs(inputs: Sequence[torch.Tensor], spec: Operation) -> list[torch.Tensor]:
    """New contiguous tensors for the results of an operation that is not in place, and none of ``GATHERING``."""
    if spec.collective == "reducescatter":
        return [_empty_share(tensor, *spec.place) for tensor in inputs]
    return [new_empty(source, source.shape) for source in inputs]


def share_of_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The first row that a reducescatter gives a rank, and how many: the first ranks get one more."""
    base, longer = divmod(rows, size)
    return rank * base + min(rank, longer), base + (rank < longer)


def _empty_share(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    _, rows = share_of_rows(tensor.shape[0], rank, size)
    return new_empty(tensor, (rows, *tensor.shape[1:]))


def pack(staged: StagedTensors, spec: Operation) -> list[context.Tensor]:
    """The staged tensors in the form that the core needs."""
    wire = 0 if spec.wire is None else DTYPES[spec.wire]
    rows = []
    for source, target in zip(staged.inputs, staged.outputs, strict=True):
        dtype = source.dtype
        rows.append(
            context.Tensor(
                source.data_ptr(),
                target.data_ptr(),
                source.shape,
                DTYPES[dtype],
                wire if dtype in _NARROWED else 0,
                splits=spec.splits,
            )
        )
    return rows


def _source(tensor: torch.Tensor, spec: Operation, in_place: bool) -> torch.Tensor:
    check_tensor(tensor, spec.kind, spec.name, reduced=spec.collective in _REDUCING)
    if in_place and tensor.requires_grad:
        _check_graph(tensor, spec)
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        source = tensor
    else:
        if in_place:
            _check_strides(tensor, spec)
        source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if source.data_ptr() == 0 and source.numel() > 0:
        what = describe(spec.kind, spec.name)
        raise UnsupportedError(f"{what}: the tensor ({type(tensor).__name__}) {_NO_MEMORY}")
    return source


def is_reducible(dtype: torch.dtype) -> bool:
    """Whether ``Sum`` takes such tensors; others can be moved only."""
    return dtype.is_complex or DTYPES.get(dtype, _REDUCIBLE_END) < _REDUCIBLE_END


def check_tensor(tensor: torch.Tensor, kind: str, name: str | None = None, *, reduced: bool = False) -> None:
    """Refuses a tensor that the core cannot work on.

    Args:
        tensor: From the user.
        kind: The operation, for the message.
        name: Its name, for the message.
        reduced: The operation calculates with the values; else it only moves them.

    Raises:
        UsageError: Not a tensor, or one that has no shape yet.
        UnsupportedError: The core cannot work on such a layout, device or dtype.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{describe(kind, name)}: expected a torch.Tensor, not {type(tensor).__name__}")
    refuse_lazy(tensor, describe(kind, name))
    if is_transformed(tensor):
        reason = (
            "torch.func (vmap, grad, jvp and others) has no rule for what all ranks do together; call it outside of "
            "the function that is transformed, on what that returns"
        )
    elif has_tangent(tensor):
        reason = (
            "forward-mode autograd (make_dual) has no rule for what all ranks do together; call it on the parts of "
            "torch.autograd.forward_ad.unpack_dual(tensor)"
        )
    elif tensor.is_nested:
        reason = (
            "nested tensors are not supported here, since their parts may have another shape on each rank; use "
            "torch.nested.to_padded_tensor(tensor, 0.0)"
        )
    elif tensor.layout is not torch.strided:
        reason = f"{tensor.layout} tensors are not supported here; use tensor.to_dense()"
    elif not (tensor.is_cpu or tensor.is_cuda):
        reason = f"the tensor is on {tensor.device}; tensors on the CPU and on CUDA devices are supported"
    elif tensor.dtype not in DTYPES:
        reason = f"dtype {tensor.dtype} is not supported; {_instead_of(tensor)}"
    elif reduced and not is_reducible(tensor.dtype):
        reason = (
            f"dtype {tensor.dtype} cannot be reduced; allgather, alltoall and broadcast move it, and for a reduction "
            "convert the tensor to another dtype"
        )
    elif (needed := _spanned_bytes(tensor)) > (there := _storage_bytes(tensor)):
        lack = f"needs {needed} bytes, and its storage has {there}" if there else _NO_MEMORY
        reason = f"the tensor ({type(tensor).__name__}) {lack}"
    else:
        return
    raise UnsupportedError(f"{describe(kind, name)}: {reason}")


def refuse_lazy(tensor: torch.Tensor, what: str) -> None:
    """Refuses a parameter or buffer of a module such as ``LazyLinear`` that has seen no input.

    Raises:
        UsageError: It is one; the sentence begins with ``what``.
    """
    if is_lazy(tensor):
        raise UsageError(f"{what}: {type(tensor).__name__} has no shape yet; run one forward pass of the model first")


def has_all_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a contiguous tensor still reaches to its end: a script may have cut it off."""
    there = tensor.untyped_storage().nbytes()
    return there >= tensor.storage_offset() * tensor.element_size() + tensor.nbytes


def _spanned_bytes(tensor: torch.Tensor) -> int:
    """From the begin of its storage to the end of its last element."""
    count = tensor.numel()
    if count == 0:
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset() + count) * tensor.element_size()
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _storage_bytes(tensor: torch.Tensor) -> int:
    try:
        storage = tensor.untyped_storage()
        return 0 if storage.device.type == "meta" else storage.nbytes()  # that of a fake tensor
    except RuntimeError:  # a wrapper has none; NotImplementedError is one
        return 0


def _instead_of(tensor: torch.Tensor) -> str:
    if tensor.is_quantized:
        return "use tensor.int_repr(), and send its scale and zero point with it"
    return "convert the tensor to another dtype"


def list_tensors(tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """The tensors of a group.

    Raises:
        UsageError: It is one tensor, or empty.
    """
    if isinstance(tensors, torch.Tensor):
        raise UsageError(f"{what}: expected a list of tensors, not one tensor")
    listed = list(tensors)
    if not listed:
        raise UsageError(f"{what}: the list of tensors is empty")
    return listed


def _check_graph(tensor: torch.Tensor, spec: Operation) -> None:
    if not tensor.is_leaf and torch.is_grad_enabled():
        raise UsageError(
            f"{describe(spec.kind, spec.name)}: autograd cannot follow an in-place operation on a computed tensor that "
            "requires grad; use the form without underscore, or tensor.detach()"
        )


def _check_strides(tensor: torch.Tensor, spec: Operation) -> None:
    reach = 0  # of the dimensions so far, from the first element to the last
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride <= reach:
            what = describe(spec.kind, spec.name)
            kind = "an expanded tensor" if stride == 0 else "a tensor whose elements overlap in memory"
            raise UsageError(f"{what}: {kind} cannot be written in place; use tensor.contiguous()")
        reach += (extent - 1) * stride


def describe(kind: str, name: str | None) -> str:
    """An operation, for the begin of a message."""
    return kind if name is None else f"{kind} {name!r}"
