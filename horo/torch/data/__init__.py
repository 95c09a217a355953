"""Each rank's part of a DataLoader."""

from __future__ import annotations

from horo.torch.data.loader import ShardedLoader
from horo.torch.data.shard import shard

__all__ = ["ShardedLoader", "shard"]
