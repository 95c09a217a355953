"""Horovod's module of the same name: the operations of ``horo.torch``, and its functions about the job.

For scripts that call ``hvd.mpi_ops.synchronize`` and the like. It has nothing to do with MPI.
"""

from __future__ import annotations

from horo.errors import HorovodInternalError
from horo.torch.engine.topology import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from horo.torch.horovod_names import basics as _basics  # noqa: F401 - scripts of Horovod ask it
from horo.torch.horovod_names.basics import handle_map as _handle_map  # noqa: F401
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
from horo.torch.ops.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from horo.torch.ops.allreduce import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from horo.torch.ops.alltoall import alltoall, alltoall_async
from horo.torch.ops.barrier import barrier
from horo.torch.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from horo.torch.ops.compression import Compression
from horo.torch.ops.join import join
from horo.torch.ops.process_set import ProcessSet, add_process_set, global_process_set, remove_process_set
from horo.torch.ops.reduce_op import resolve_op as handle_average_backwards_compatibility
from horo.torch.ops.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horo.torch.ops.sparse import sparse_allreduce_async
from horo.torch.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
