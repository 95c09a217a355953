"""Where a workload computes: on the CPU, or on a GPU of its rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["CPU", "Place", "place_of"]


@dataclass(frozen=True)
class Place:
    """A device, and how models compute there.

    Attributes:
        device: the CPU, or a GPU.
        dtype: of parameters and inputs that are no integers.
        autocast: whether layers compute in bfloat16 nevertheless.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype) if tensor.is_floating_point() else tensor.to(self.device)

    def put_model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, self.dtype)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """For the forward pass of a model and its loss."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def finish(self) -> None:
        """Waits until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def exact(self, *, in_float64: bool) -> Iterator[Place]:
        """The same device for a comparison: without autocast, and in float32 or float64, not in what passes for it.

        Memory of a GPU that was needed for it is there for others afterwards.
        """
        exact = Place(self.device, torch.float64 if in_float64 else torch.float32)
        if not self.is_gpu:
            yield exact
            return
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield exact
        torch.cuda.empty_cache()


CPU = Place(torch.device("cpu"))


def place_of(parameters: dict[str, Any], rank: int) -> Place:
    """Of the ``parameters`` of a workload: device, "cuda" or the CPU without it; autocast. Ranks share GPUs."""
    autocast = bool(parameters.get("autocast"))
    if parameters.get("device", "cpu") == "cpu":
        return Place(torch.device("cpu"), autocast=autocast)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Place(device, autocast=autocast)
