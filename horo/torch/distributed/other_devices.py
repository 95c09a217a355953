"""Tensors that are not in host memory: torch's NCCL does their operations, beside horo for the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as torch_distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from horo.errors import UnsupportedError

__all__ = ["OtherDevices", "by_device", "is_for_horo"]

Method = TypeVar("Method", bound=Callable[..., Any])


def is_for_horo(tensor: torch.Tensor) -> bool:
    """Whether horo does the operations of a tensor itself."""
    return tensor.is_cpu


def by_device(method: Method) -> Method:
    """Of a process group: calls this method of ``other_devices`` for tensors that are not ``is_for_horo``."""

    @functools.wraps(method)
    def choose(self: Any, tensors: Any, *arguments: Any, **options: Any) -> Any:
        first = tensors
        while not isinstance(first, torch.Tensor):
            first = first[0] if first else arguments[0][0]  # a gather has outputs on the root only
        if is_for_horo(first):
            return method(self, tensors, *arguments, **options)
        return getattr(self.other_devices.group(first.device), method.__name__)(tensors, *arguments, **options)

    return choose  # type: ignore[return-value]


class OtherDevices:
    """The part of a process group for devices other than the CPU; made when the first such tensor comes."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self._arguments = store, rank, size
        self._timeout = timeout
        self._group: torch_distributed.ProcessGroup | None = None

    @staticmethod
    def are_there() -> bool:
        """Whether this torch has NCCL, and this process a GPU."""
        return torch_distributed.is_nccl_available() and torch.cuda.is_available()

    def group(self, device: torch.device) -> Any:
        """The group for such a device. UnsupportedError: this torch has none."""
        if self._group is None:
            kind, backend = self._make_backend(device)
            store, rank, size = self._arguments
            group = torch_distributed.ProcessGroup(store, rank, size)
            group._set_default_backend(kind)
            group._register_backend(torch.device(device.type), kind, backend)
            self._group = group
        return self._group

    def _make_backend(self, device: torch.device) -> tuple[Any, Any]:
        if device.type != "cuda" or not self.are_there():
            raise UnsupportedError(
                f"the tensor is on {device}: horo does the operations of tensors in host memory, and torch's NCCL "
                "those of tensors on CUDA devices; here torch has no NCCL, or no GPU"
            )
        nccl: Any = torch_distributed.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
        store, rank, size = self._arguments
        options = nccl.Options()
        options._timeout = self._timeout
        return torch_distributed.ProcessGroup.BackendType.NCCL, nccl(PrefixStore("nccl/", store), rank, size, options)

    def backend(self, device: torch.device) -> Any:
        """The backend for such a device, as torch has it."""
        return self.group(device)._get_backend(device)

    def shutdown(self) -> None:
        """Ends it, if it was made."""
        if self._group is not None:
            self._group.shutdown()

    def abort(self) -> None:
        """Gives up its operations, if it was made."""
        if self._group is not None:
            self._group.abort()
