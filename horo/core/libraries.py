"""Libraries for GPUs, as the core finds them in this process or loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from horo.core.binding import ffi, lib
from horo.core.words import check, error_buffer, text_of

if TYPE_CHECKING:
    from horo.core.context import Context

__all__ = ["Library", "copy_back", "find_library", "use_cuda", "use_nccl"]

_KINDS = {"cuda": lib.HORO_LIBRARY_CUDA, "nccl": lib.HORO_LIBRARY_NCCL}


class Library(NamedTuple):
    """A library that this process can use; see ``horo_library`` in ``horo_gpu.h``."""

    name: str
    """The name with its version: ``"NCCL 2.23.4"``."""
    version: int
    path: str
    device_count: int
    """Of a CUDA driver that has been initialized: devices that this process sees; else -1."""


def find_library(kind: str, paths: Sequence[str], *, initializes: bool = False) -> Library:
    """Takes the first of ``paths`` that can be used, and loads it.

    Args:
        kind: ``"cuda"`` or ``"nccl"``.
        paths: files, names for the system's loader, or "" for the library that this process has loaded already.
        initializes: initialize the CUDA driver, too; children that this process forks cannot use CUDA then.

    Raises:
        ResourceError: there is none of use; says of every place why.
    """
    names = [ffi.new("char[]", path.encode()) for path in paths]
    found, error = ffi.new("horo_library *"), error_buffer()
    status = lib.horo_find_library(
        _KINDS[kind], ffi.new("char *[]", names), len(names), initializes, found, error, lib.HORO_MESSAGE_MAX
    )
    check(status, error)
    return Library(text_of(found.name), int(found.version), text_of(found.path), int(found.device_count))


def use_cuda(context: Context, paths: Sequence[str]) -> None:
    """Lets requests of the context have tensors on GPUs; see ``horo_use_cuda``. Blocks until the driver is initialized.

    Raises:
        ResourceError: there is no driver of use; says of every place why.
    """
    names = [ffi.new("char[]", path.encode()) for path in paths]
    error = error_buffer()
    check(
        lib.horo_use_cuda(context._context, ffi.new("char *[]", names), len(names), error, lib.HORO_MESSAGE_MAX),
        error,
    )


def use_nccl(context: Context, paths: Sequence[str]) -> None:
    """Lets NCCL execute those requests with tensors on GPUs that it can; see ``horo_use_nccl``.

    If a rank has no NCCL of use, all ranks learn that at the first such request, and log it.

    Raises:
        UsageError: ``use_cuda`` has not been called.
    """
    names = [ffi.new("char[]", path.encode()) for path in paths]
    error = error_buffer()
    check(
        lib.horo_use_nccl(context._context, ffi.new("char *[]", names), len(names), error, lib.HORO_MESSAGE_MAX),
        error,
    )


def copy_back(context: Context, handle: int, stream: int) -> None:
    """Begins to copy the results of a finished request to the GPU, and makes ``stream`` wait for them; never blocks.

    Raises:
        UsageError: it has no tensors on a GPU, or has no result.
        ResourceError: the driver refuses.
    """
    error = error_buffer()
    check(lib.horo_copy_back(context._context, handle, stream, error, lib.HORO_MESSAGE_MAX), error)
