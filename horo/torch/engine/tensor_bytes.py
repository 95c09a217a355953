"""The bytes of tensors, without numpy: a torch cannot use one that is of another version than it was built for."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["bytes_of", "tensor_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense, contiguous tensor in host memory. It stays allocated as long as the view exists."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * count).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view keeps the array, and that its owner
    return memoryview(memory).cast("B")


def tensor_of(data: bytes) -> torch.Tensor:
    """A uint8 tensor with a copy of the bytes."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
