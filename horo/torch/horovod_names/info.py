"""The abilities of this installation, by Horovod's names."""

from __future__ import annotations

import torch

from horo.bootstrap.gpu_libraries import find_cuda, find_nccl
from horo.bootstrap.mpi.world import why_no_mpi
from horo.errors import ResourceError, UsageError
from horo.horovod import is_installed
from horo.torch.engine import runtime, topology

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
    """Whether MPI may be called from several threads at once (``MPI_THREAD_MULTIPLE``). Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: The ranks of this job did not start through MPI.

    Example:
        if hvd.mpi_enabled():
            print(hvd.mpi_threads_supported())
    """
    world = runtime.current().job.mpi
    if world is None:
        raise UsageError("mpi_threads_supported(): the ranks of this job did not start through MPI; see mpi_enabled()")
    return world.threads_multiple


def mpi_enabled() -> bool:
    """Whether the ranks of this job started through MPI; False before ``init()``."""
    return topology.is_under_mpi()


def mpi_built() -> bool:
    """Whether MPI can be used here: mpi4py is installed and finds the library of an MPI. This starts none."""
    return not why_no_mpi()


def gloo_enabled() -> bool:
    """Whether there are transports besides MPI under Horovod's names (``hororun --horovod``); horo has no gloo."""
    return is_installed() and not mpi_enabled()


def gloo_built() -> bool:
    """True under Horovod's names (``hororun --horovod``): scripts ask for a transport besides MPI so. Else False."""
    return is_installed()


def nccl_built() -> int:
    """The version of the NCCL that this process can use, by NCCL's numbering: 22304 is 2.23.4; 0: there is none.

    It is found at run time: loaded by torch, from the package nvidia-nccl, or installed on the system.
    ``hororun --check-build`` shows where, or why not. It is used with
    ``HORO_GPU_OPERATIONS=nccl``.
    """
    try:
        return find_nccl().version
    except ResourceError:
        return 0


def ddl_built() -> bool:
    """Whether IBM DDL can be used: no."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL can be used: no."""
    return False


def cuda_built() -> bool:
    """Whether this process can use a CUDA driver, which is found at run time; it is not initialized for this.

    ``hororun --check-build`` shows where it is, or why there is none. It copies tensors on GPUs.
    """
    try:
        find_cuda()
    except ResourceError:
        return False
    return True


def rocm_built() -> bool:
    """Whether tensors in ROCm memory can be used: no."""
    return False


def _check_has_gpu() -> bool:
    """Whether torch sees a GPU."""
    return torch.cuda.is_available()
