"""Fewer bits on the way: a smaller tensor is sent, and the result gets the dtype of the first again.

The core does the conversions of ``Compression`` itself, in the passes over host memory that it makes anyway; for NCCL,
torch does them on the GPU. A ``Compressor`` of one's own is called before the reduction and after it.
"""

from __future__ import annotations

from typing import Any

import torch

from horo.errors import UsageError

__all__ = ["Compression", "Compressor", "narrow", "split"]


class Compressor:
    """The base class of the choices for ``compression=``; derive from it for your own.

    The tensor that is sent may be the given one, a view of it or another. It is reduced in place where it can be.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send instead of ``tensor``, and a context that ``decompress`` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Turns the reduced tensor back."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """The default: sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


def narrow(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    """The tensor as ``dtype`` if it holds floats wider than that, and the dtype it had."""
    wide = tensor.dtype.is_floating_point and tensor.element_size() > dtype.itemsize
    return (tensor.to(dtype) if wide else tensor), tensor.dtype


class FP16Compressor(Compressor):
    """Sends float32 and float64 tensors as float16; values of 65520 or more become infinite."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as float16, and the dtype it had."""
        return narrow(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in the dtype ``ctx``."""
        return tensor.to(ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 tensors as bfloat16: the range of float32, 8 bits of precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as bfloat16, and the dtype it had."""
        return narrow(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in the dtype ``ctx``."""
        return tensor.to(ctx)


class Compression:
    """The choices for ``compression=``: the format in which tensors are sent.

    The result has the dtype of the tensor. Tensors of other dtypes are sent as they are. With
    ``HORO_GPU_OPERATIONS=nccl``, a tensor on a GPU is converted before factors are multiplied in, and NCCL adds in 16
    bits.

    Example:
        x = torch.full((2,), float(hvd.rank()))
        mean = hvd.allreduce(x, compression=hvd.Compression.bf16)  # on 2 ranks [0.5, 0.5]
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def split(compression: type[Compressor]) -> tuple[torch.dtype | None, type[Compressor]]:
    """The part of a compression that horo does on the way, and the part that is left for Python.

    Returns:
        The dtype that wider floats travel as, None for their own; the compressor to call.

    Raises:
        UsageError: It is no compressor.
    """
    if compression is FP16Compressor:
        return torch.float16, NoneCompressor
    if compression is BF16Compressor:
        return torch.bfloat16, NoneCompressor
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise UsageError(f"compression must be a Compressor such as hvd.Compression.fp16, not {compression!r}")
    return None, compression
