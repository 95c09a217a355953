"""Compression, under the name that scripts of Horovod's use."""

from __future__ import annotations

from horo.torch.ops.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    narrow,
    split,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "narrow", "split"]
