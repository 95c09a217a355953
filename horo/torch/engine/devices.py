"""Tensors on GPUs: which one a request is on, and the streams of torch that its values and results are ordered by.

Nothing here waits for a GPU. The current stream of torch is an address, so that the core is not linked with torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from horo.core import context as _core
from horo.core.libraries import copy_back
from horo.errors import HoroError, UnsupportedError, UsageError

__all__ = [
    "current_stream",
    "finish_on",
    "let_go",
    "new_empty",
    "place",
    "refuse_capture",
    "to_device",
]


def place(
    tensors: Sequence[torch.Tensor], what: str, *, in_place: bool
) -> tuple[torch.device | None, Sequence[torch.Tensor]]:
    """The device of a request whose tensors are not all in host memory.

    Args:
        tensors: Contiguous tensors in host memory or on GPUs.
        what: The operation, for the message.
        in_place: Results are written into the tensors.

    Returns:
        The GPU that all are on, and the tensors. Else None, and the tensors or copies of them, all in host memory; this
        waits for the GPUs, and only happens to calls such as ``broadcast_parameters``.

    Raises:
        UnsupportedError: They are on several devices, and results would be, too.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if len(devices) == 1:
        return devices[0], tensors
    if not in_place:
        raise UnsupportedError(
            f"{what}: its tensors are on {' and '.join(map(str, devices))}; those of one call must be on one device, "
            "unless it writes into them"
        )
    return None, [tensor if tensor.is_cpu else tensor.cpu() for tensor in tensors]


def refuse_capture(what: str) -> None:
    """Looks whether results may go to a GPU now; the request stays as it is.

    Args:
        what: The operation, for the message.

    Raises:
        UsageError: The current stream is being captured, and would have the wait for them in its graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"{what}: the current stream is being captured into a CUDA graph; results cannot be part of a graph: "
            "synchronize behind it"
        )


def current_stream(device: torch.device) -> int:
    """The address of torch's current stream of a GPU; 0 is the default stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def finish_on(device: torch.device, core: _core.Context, handle: int, tensors: Sequence[torch.Tensor]) -> None:
    """Waits until a request is done, has the current stream of its GPU wait for the results, and releases the handle.

    Its tensors may be freed at any time afterwards: torch gives their memory to others only behind that stream.

    Raises:
        HoroError: The error of the request, or the driver refuses; the handle stays valid.
    """
    stream = torch.cuda.current_stream(device)
    core.wait(handle)
    copy_back(core, handle, int(stream.cuda_stream))
    for tensor in tensors:
        tensor.record_stream(stream)
    core.release(handle)


def let_go(device: torch.device, core: _core.Context, handle: int, tensors: Sequence[torch.Tensor]) -> None:
    """The same for a request that is done and that nobody waits for any more; raises nothing."""
    with contextlib.suppress(HoroError):
        stream = torch.cuda.current_stream(device)
        copy_back(core, handle, int(stream.cuda_stream))
        for tensor in tensors:
            tensor.record_stream(stream)


def new_empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A new contiguous tensor with the dtype and device of another one, whatever torch's default device is."""
    if like.is_cpu:
        return torch.empty(shape, dtype=like.dtype, device="cpu")
    return like.new_empty(shape)


def to_device(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result in host memory, where another tensor is: itself, or a copy behind the current stream."""
    return result if like.is_cpu else like.new_empty(result.shape).copy_(result)
