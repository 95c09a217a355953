"""Tensors on a double of a GPU, for a torch without CUDA.

A ``GpuTensor`` says that it is on a CUDA device, and gives the double's address. Operations of torch on it happen at
once, in host memory behind that address; what horo and the double do happens on streams. It shows what horo.torch does
with tensors on GPUs, not what torch does with them.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

_NOT_READY = 600
_DEADLINE_S = 60.0


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


class Gpu:
    """The double in this process, which stands in place of the system's driver from then on."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.double_alloc.restype = ctypes.c_uint64
        self.lib.double_address.restype = ctypes.c_void_p
        self.lib.cuInit(0)
        self.nccl: ctypes.CDLL | None = None
        """The double of NCCL."""
        self.stream = 0
        """torch's current stream."""
        self.recorded: list[tuple[int, int]] = []
        """What was passed to ``record_stream``: the address of the tensor, and the stream."""
        self._captured: int | None = None
        self._gates: list[ctypes.c_int] = []
        """The double looks at a gate until it is open, whether its caller has kept it or not."""

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self.stream)

    def put(self, tensor: torch.Tensor, number: int = 0) -> GpuTensor:
        """A contiguous copy on the device."""
        size = tensor.numel() * tensor.element_size()
        address = int(self.lib.double_alloc(ctypes.c_size_t(max(size, 1))))
        memory = (ctypes.c_ubyte * max(size, 1)).from_address(self.lib.double_address(ctypes.c_uint64(address)))
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape).copy_(tensor.detach())
        shown = torch.Tensor._make_subclass(GpuTensor, whole)  # type: ignore[attr-defined]  # no view: alone in its memory
        return _placed(shown, self, address, number)

    def make_stream(self) -> int:
        out = ctypes.c_void_p()
        assert self.lib.cuStreamCreateWithPriority(ctypes.byref(out), 0, 0) == 0
        return int(out.value or 0)

    def add(self, tensor: torch.Tensor, value: float) -> None:
        """A kernel on the current stream that adds to float32 values."""
        self.lib.double_add(
            ctypes.c_void_p(self.stream),
            ctypes.c_uint64(tensor.data_ptr()),
            ctypes.c_size_t(tensor.numel() * 4),
            ctypes.c_float(value),
        )

    def hold(self) -> ctypes.c_int:
        """What comes behind it on the current stream waits until ``open`` is called with the result."""
        self._gates.append(gate := ctypes.c_int(0))
        self.lib.double_hold(ctypes.c_void_p(self.stream), ctypes.byref(gate))
        return gate

    def open(self, gate: ctypes.c_int) -> None:
        self.lib.double_open(ctypes.byref(gate))

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
        event, ignored = ctypes.c_void_p(), ctypes.c_void_p()
        self.lib.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
        assert self.lib.cuEventCreate(ctypes.byref(event), 0) == 0
        assert self.lib.cuEventRecord(event, ctypes.c_void_p(self.stream)) == 0
        deadline = time.monotonic() + _DEADLINE_S
        while self.lib.cuEventQuery(event) == _NOT_READY:
            assert time.monotonic() < deadline
        self.lib.cuCtxPopCurrent_v2(ctypes.byref(ignored))
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
