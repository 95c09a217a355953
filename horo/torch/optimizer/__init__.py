"""Optimizers whose gradients are averaged. Scripts of Horovod's import them from here."""

from __future__ import annotations

from horo.torch.optimizer.distributed import Distributed, DistributedOptimizer

__all__ = ["Distributed", "DistributedOptimizer"]
