"""SyncBatchNorm, under the name that scripts of Horovod's use."""

from __future__ import annotations

from horo.torch.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
