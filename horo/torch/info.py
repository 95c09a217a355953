"""What this installation can do, in the words of Horovod."""

from __future__ import annotations

from horo.torch import _state

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: False, MPI carries no bytes yet.

    Raises:
        NotInitializedError: Before ``init()``.
    """
    _state.current()
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries bytes: not yet."""
    return False


def mpi_built() -> bool:
    """Whether MPI can be used: not yet."""
    return False


def gloo_enabled() -> bool:
    """False: horo has transports of its own."""
    return False


def gloo_built() -> bool:
    """False: horo has transports of its own."""
    return False


def nccl_built() -> int:
    """The version of NCCL, 0 for none: not yet."""
    return 0


def ddl_built() -> bool:
    """Whether IBM DDL can be used: no."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL can be used: no."""
    return False


def cuda_built() -> bool:
    """Whether tensors in CUDA memory can be used: not yet."""
    return False


def rocm_built() -> bool:
    """Whether tensors in ROCm memory can be used: no."""
    return False
