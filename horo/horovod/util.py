"""What scripts import from ``horovod.common.util``."""

from __future__ import annotations

from horo.torch.info import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
