"""Internal names of Horovod's that scripts have come to use.

``mpi_ops._basics`` is this module; ``mpi_ops._handle_map`` is made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from horo.torch.engine import runtime as _runtime
from horo.torch.engine.process_set_registry import public_id
from horo.torch.engine.topology import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from horo.torch.horovod_names.info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from horo.torch.lifecycle import init, is_initialized, shutdown
from horo.torch.ops.allreduce import Adasum, Average, Max, Min, Product, Sum
from horo.torch.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "handle_map",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The members of every process set of the job, by its id; that of all ranks has 0.

    Raises:
        NotInitializedError: Before ``init()``.
    """
    sets = _runtime.current().teams.sets
    return {0: list(range(size()))} | {public_id(team): each.ranks or [] for team, each in list(sets.items())}


class _HandleMap(Mapping[int, str]):
    """The handles of this process that are not synchronized, each with the name of its operation."""

    def __getitem__(self, handle: int) -> str:
        return self._labels()[handle]

    def __iter__(self) -> Iterator[int]:
        return iter(self._labels())

    def __len__(self) -> int:
        return len(self._labels())

    def _labels(self) -> dict[int, str]:
        runtime = _runtime.find()
        if runtime is None:
            return {}
        return {request.number: request.label for request in list(runtime.requests.values()) if request.public}


handle_map = _HandleMap()
