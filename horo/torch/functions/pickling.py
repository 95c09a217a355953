"""Objects as bytes, with cloudpickle, and tensors of every dtype in them."""

from __future__ import annotations

import io
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

__all__ = ["pickled"]

_PICKLED = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""The dtypes that torch can both write and read again."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        """Tensors whose dtype torch pickles and then cannot read, such as those of float8, go as bytes."""
        if type(obj) is torch.Tensor and _goes_as_bytes(obj):
            data = obj.detach().contiguous().view(-1).view(torch.uint8)
            return _rebuild, (data, obj.dtype, obj.shape, obj.requires_grad)
        return super().reducer_override(obj)


def _goes_as_bytes(tensor: torch.Tensor) -> bool:
    plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.is_leaf and tensor.dtype not in _PICKLED and not tensor.is_conj()


def _rebuild(data: torch.Tensor, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> torch.Tensor:
    return data.view(dtype).view(shape).requires_grad_(requires_grad)


def pickled(obj: Any) -> bytes:
    """The object, as ``cloudpickle.loads`` reads it."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()
