"""The torch-facing API: a Horovod script changes one word, ``import horo.torch as hvd``."""

from __future__ import annotations

from horo.errors import (
    AbortedError,
    DeadlockError,
    GroupError,
    HoroError,
    HorovodInternalError,
    InternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ResourceError,
    StalledError,
    UnsupportedError,
    UsageError,
)
from horo.errors import TimeoutError as TimeoutError  # not in __all__: Python has an error of this name
from horo.torch.compat.torch_version import TORCH_VERSION_MIN as _TORCH_VERSION_MIN  # noqa: F401  (first: its error names what is missing)

# isort: split
from horo.torch.data.shard import shard
from horo.torch.engine.handles import Handle
from horo.torch.engine.topology import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from horo.torch.functions.broadcast_state import average_buffers, broadcast_optimizer_state, broadcast_parameters
from horo.torch.functions.metrics import MetricAverage
from horo.torch.functions.objects import allgather_object, broadcast_object
from horo.torch.functions.schedules import LearningRateWarmup
from horo.torch.horovod_names.info import (
    _check_has_gpu,  # noqa: F401 - scripts of Horovod call it
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
from horo.torch.lifecycle import config, init, is_initialized, shutdown, stats
from horo.torch.nn.sync_batch_norm import SyncBatchNorm
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
from horo.torch.ops.reduce_op import ReduceOp
from horo.torch.ops.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from horo.torch.ops.sparse import sparse_allreduce_async
from horo.torch.optimizer.distributed import DistributedOptimizer
from horo.torch.optimizer.model import distribute, no_sync
from horo.torch.timeline import start_timeline, stop_timeline

__all__ = [
    "AbortedError",
    "Adasum",
    "Average",
    "Compression",
    "DeadlockError",
    "DistributedOptimizer",
    "GroupError",
    "Handle",
    "HoroError",
    "HorovodInternalError",
    "InternalError",
    "LearningRateWarmup",
    "Max",
    "MetricAverage",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "ResourceError",
    "StalledError",
    "Sum",
    "SyncBatchNorm",
    "UnsupportedError",
    "UsageError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "average_buffers",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "config",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "distribute",
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
    "no_sync",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
]

from horo.torch import elastic as elastic  # after the names above, of which a script may import each from here
from horo.torch import mpi_ops as mpi_ops
