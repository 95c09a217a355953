"""Tensors on a double of a GPU, for a torch without CUDA.

A ``GpuTensor`` says that it is on a CUDA device, and gives the double's address. Operations of torch on it happen at
once, in host memory behind that address; what horo and the double do happens on streams. It shows what horo.torch does
with tensors on GPUs, not what torch does with them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from gpu_driver import Driver


class Stream:
    """What ``torch.cuda.current_stream`` returns."""

    def __init__(self, address: int) -> None:
        self.cuda_stream = address


class GpuTensor(torch.Tensor):
    """A tensor that horo takes for one on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    gpu: Gpu
    address: int
    number: int

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)

    def data_ptr(self) -> int:
        return self.address

    def new_empty(self, shape: Sequence[int], **_: Any) -> GpuTensor:  # type: ignore[override]
        return self.gpu.put(torch.empty(shape, dtype=self.dtype), self.number)

    def detach(self) -> GpuTensor:
        return _present(super().detach(), self.gpu, self.address, self.number)

    def __getitem__(self, index: Any) -> GpuTensor:  # type: ignore[override]
        view = super().__getitem__(index)
        assert view._base is not None, "by a mask or by numbers: it is a copy, which has no address on the device"
        address = self.address + torch.Tensor.data_ptr(view) - torch.Tensor.data_ptr(self)
        return _present(view, self.gpu, address, self.number)

    def to(self, dtype: torch.dtype) -> GpuTensor:  # type: ignore[override]
        """Behind the current stream, as on a GPU; the double waits for it."""
        return self.gpu.put(self.gpu.read(self).to(dtype), self.number)

    def copy_(self, other: torch.Tensor) -> GpuTensor:  # type: ignore[override]
        super().copy_(self.gpu.read(other) if isinstance(other, GpuTensor) else other)
        return self

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.gpu.recorded.append((self.address, stream.cuda_stream))


def _present(tensor: torch.Tensor, gpu: Gpu, address: int, number: int) -> GpuTensor:
    return _placed(tensor.as_subclass(GpuTensor), gpu, address, number)


def _placed(shown: GpuTensor, gpu: Gpu, address: int, number: int) -> GpuTensor:
    shown.gpu, shown.address, shown.number = gpu, address, number
    return shown


class Gpu(Driver):
    """The double in this process, which stands in place of the system's driver from then on."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.nccl: ctypes.CDLL | None = None
        """The double of NCCL."""
        self.stream = 0
        """torch's current stream."""
        self.recorded: list[tuple[int, int]] = []
        """What was passed to ``record_stream``: the address of the tensor, and the stream."""
        self._captured: int | None = None

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self.stream)

    def put(self, tensor: torch.Tensor, number: int = 0) -> GpuTensor:
        """A contiguous copy on the device."""
        size = tensor.numel() * tensor.element_size()
        address = self.alloc(size)
        memory = (ctypes.c_ubyte * max(size, 1)).from_address(self.lib.double_address(ctypes.c_uint64(address)))
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape).copy_(tensor.detach())
        shown = torch.Tensor._make_subclass(GpuTensor, whole)  # type: ignore[attr-defined]  # no view: alone in its memory
        return _placed(shown, self, address, number)

    def add(self, tensor: torch.Tensor, value: float) -> None:
        """A kernel on the current stream that adds to float32 values."""
        self.add_floats(self.stream, tensor.data_ptr(), tensor.numel() * 4, value)

    def hold(self) -> ctypes.c_int:
        """As ``hold_stream``, of the current one."""
        return self.hold_stream(self.stream)

    def capture(self, is_capturing: bool) -> None:
        self._captured = self.stream if is_capturing else None
        was_spoiled = self.lib.double_capture(ctypes.c_void_p(self.stream), int(is_capturing))
        assert not was_spoiled, "a call has ended the capture"

    def is_capturing(self) -> bool:
        """What ``torch.cuda.is_current_stream_capturing`` returns."""
        return self._captured == self.stream

    def launched(self) -> int:
        """Calls of NCCL that this process has launched."""
        numbers = (ctypes.c_int * 7)()
        assert self.nccl is not None
        self.nccl.double_nccl_count(numbers)
        assert numbers[3] == numbers[6] == 0, "misused, or called otherwise than on other ranks"
        return numbers[5]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values behind all that is on the current stream."""
        self.synchronize(self.stream)
        return tensor.cpu()


@functools.cache
def load(path: str, nccl: str = "") -> Gpu:
    """Loads the double, and that of NCCL if there is one, and has torch's current stream be one of it."""
    gpu = Gpu(path)
    if nccl:
        gpu.nccl = ctypes.CDLL(nccl)
    torch.cuda.current_stream = gpu.current_stream  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = gpu.is_capturing
    return gpu
