"""Equal models, optimizers and objects on all ranks. Scripts of Horovod's import them from here."""

from __future__ import annotations

from horo.torch.functions.broadcast_state import average_buffers, broadcast_optimizer_state, broadcast_parameters
from horo.torch.functions.objects import allgather_object, broadcast_object

__all__ = [
    "allgather_object",
    "average_buffers",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
