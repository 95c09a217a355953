"""Compares values that must be equal on all ranks, by checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horo.torch.engine.operation import Operation
from horo.torch.engine.submit import start_allreduce
from horo.torch.engine.tensor_bytes import bytes_of
from horo.torch.ops.allreduce import Max

__all__ = ["ABSENT", "Comparison", "checksum", "options_of"]

ABSENT = -(2**63)
"""In the place of a checksum: a rank has no value, and is not compared. It is also its own negative in 64 bits."""


class Comparison:
    """Compares a checksum of each of several things over all ranks of a team, in one small allreduce."""

    def __init__(self, label: str, name: str, values: Mapping[str, int], team: int) -> None:
        self._names = sorted(values)
        sums = torch.tensor([values[name] for name in self._names], dtype=torch.int64, device="cpu")
        self.request = start_allreduce([torch.cat([sums, -sums])], Operation(label, name, Max, team=team), sync=True)

    def finish(self) -> list[str]:
        """Waits; returns the names of the values that are not equal on all ranks."""
        (found,) = self.request.wait()
        highest, lowest = found.view(2, -1)
        return [self._names[index] for index in (highest != -lowest).nonzero().flatten().tolist()]


def checksum(value: Any) -> int:
    """A checksum of a tensor, of a number, or of a container of them; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return _checksum_of_tensor(value)
    if isinstance(value, (bool, int, float)):
        return zlib.crc32(repr(float(value)).encode())
    if isinstance(value, Mapping):
        return checksum([value[key] for key in sorted(value, key=str)])
    if isinstance(value, (list, tuple)):
        return zlib.crc32(b"".join(checksum(item).to_bytes(4, "little") for item in value))
    return 0


def _checksum_of_tensor(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return checksum((tensor.indices(), tensor.values()))
    if tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        return 0
    return zlib.crc32(bytes_of(tensor.detach().cpu().contiguous()))


def options_of(groups: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """A checksum of the options (``lr`` and others) of each parameter group of an optimizer."""
    return {
        f"the options of parameter group {number}": checksum({k: v for k, v in group.items() if k != "params"})
        for number, group in enumerate(groups)
    }
