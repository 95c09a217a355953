"""Libraries for GPUs, as the core finds them in this process or loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from horo.core.binding import ffi, lib
from horo.core.words import check, error_buffer, text_of

if TYPE_CHECKING:
    from horo.core.context import Context

__all__ = [
    "Gpu",
    "Library",
    "await_nccl",
    "connect_nccl",
    "copy_back",
    "find_library",
    "nccl_id",
    "use_cuda",
    "use_nccl",
]

_KINDS = {"cuda": lib.HORO_LIBRARY_CUDA, "nccl": lib.HORO_LIBRARY_NCCL}


class Library(NamedTuple):
    """A library that this process can use; see ``horo_library`` in ``horo_gpu.h``."""

    name: str
    """The name with its version: ``"NCCL 2.23.4"``."""
    version: int
    path: str
    device_count: int
    """Of a CUDA driver that has been initialized: devices that this process sees; else -1."""


class Gpu(NamedTuple):
    """A GPU that NCCL is to use; see ``horo_gpu`` in ``horo_gpu.h``."""

    nccl: str
    """The version of NCCL: ``"2.23.4"``."""
    uuid: bytes


def find_library(kind: str, paths: Sequence[str], *, initializes: bool = False) -> Library:
    """Takes the first of ``paths`` that can be used, and loads it.

    Args:
        kind: ``"cuda"`` or ``"nccl"``.
        paths: files, names for the system's loader, or "" for the library that this process has loaded already.
        initializes: initialize the CUDA driver, too; children that this process forks cannot use CUDA then.

    Raises:
        ResourceError: none can be used; names each place with the reason.
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
        ResourceError: no driver can be used; names each place with the reason.
    """
    names = [ffi.new("char[]", path.encode()) for path in paths]
    error = error_buffer()
    check(
        lib.horo_use_cuda(context._context, ffi.new("char *[]", names), len(names), error, lib.HORO_MESSAGE_MAX),
        error,
    )


def use_nccl(context: Context, paths: Sequence[str], device: int) -> Gpu:
    """Makes NCCL ready for requests with tensors on that GPU; see ``horo_use_nccl``. Blocks while it is loaded.

    Raises:
        ResourceError: there is no NCCL of use, or the driver refuses.
        UsageError: ``use_cuda`` has not been called, or there is no such GPU.
    """
    names = [ffi.new("char[]", path.encode()) for path in paths]
    found, error = ffi.new("horo_gpu *"), error_buffer()
    places = ffi.new("char *[]", names)
    status = lib.horo_use_nccl(context._context, places, len(names), device, found, error, lib.HORO_MESSAGE_MAX)
    check(status, error)
    version = int(found.nccl_version)
    return Gpu(f"{version // 10000}.{version // 100 % 100}.{version % 100}", bytes(ffi.buffer(found.uuid)))


def nccl_id(context: Context) -> bytes:
    """Makes an id, where the ranks of a new communicator meet.

    Raises:
        ResourceError: NCCL refuses.
    """
    where, error = ffi.new("char[]", lib.HORO_NCCL_ID_BYTES), error_buffer()
    check(lib.horo_nccl_id(context._context, where, error, lib.HORO_MESSAGE_MAX), error)
    return bytes(ffi.buffer(where))


def connect_nccl(context: Context, where: bytes, size: int, rank: int) -> None:
    """Begins to connect this rank, which is number ``rank`` of ``size``; see ``horo_connect_nccl``. Never blocks.

    Raises:
        ResourceError: NCCL refuses.
    """
    error = error_buffer()
    check(lib.horo_connect_nccl(context._context, where, size, rank, error, lib.HORO_MESSAGE_MAX), error)


def await_nccl(context: Context, timeout_ms: int, *, is_world: bool) -> bool:
    """Whether it is connected by the end of ``timeout_ms``; blocks until then, with the GIL released.

    Raises:
        ResourceError: NCCL has failed.
    """
    error = error_buffer()
    status = lib.horo_await_nccl(context._context, is_world, timeout_ms, error, lib.HORO_MESSAGE_MAX)
    if status == lib.HORO_IN_PROGRESS:
        return False
    check(status, error)
    return True


def copy_back(context: Context, handle: int, stream: int) -> None:
    """Begins to copy the results of a finished request to the GPU, and makes ``stream`` wait for them; never blocks.

    Raises:
        UsageError: it has no tensors on a GPU, or has no result.
        ResourceError: the driver refuses.
    """
    error = error_buffer()
    check(lib.horo_copy_back(context._context, handle, stream, error, lib.HORO_MESSAGE_MAX), error)
