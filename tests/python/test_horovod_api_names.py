"""All names of Horovod are there; others are errors that say so."""

import importlib

import pytest
from jobs import run_python

import horo.torch as hvd
import horo.torch.mpi_ops

_HOROVOD = """
elastic Compression DistributedOptimizer SyncBatchNorm allgather_object broadcast_object broadcast_optimizer_state
broadcast_parameters allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter
reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown
is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
HorovodInternalError _check_has_gpu mpi_ops
"""
HOROVOD = _HOROVOD.split()
"""All that ``horovod.torch`` has."""
_NO_OPERATIONS = """
elastic SyncBatchNorm DistributedOptimizer allgather_object broadcast_object broadcast_optimizer_state
broadcast_parameters add_process_set remove_process_set _check_has_gpu mpi_ops
"""
NO_OPERATIONS = _NO_OPERATIONS.split()
"""Of ``horovod.torch``, and not of ``horovod.torch.mpi_ops``."""


@pytest.mark.parametrize("name", HOROVOD)
def test_each_name_is_there(name: str) -> None:
    assert hasattr(hvd, name)
    exec(f"from horo.torch import {name}")


def test_what_horovod_does_not_have_either_is_pythons_own_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'horo\.torch' has no attribute 'allredcue'"):
        hvd.allredcue  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'allredcue' from 'horo\.torch'"):
        exec("from horo.torch import allredcue")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horo.torch.no_such_module")


@pytest.mark.parametrize("name", ["torch", "init", "rank"])
def test_the_package_alone_says_what_a_script_imports(name: str) -> None:
    code = f"import horo; horo.{name}"
    done = run_python("-c", code)
    said = f"AttributeError: module 'horo' has no attribute '{name}'; the calls of a training script: "
    assert done.stderr.splitlines()[-1] == said + "import horo.torch as hvd"


@pytest.mark.parametrize("name", [name for name in HOROVOD if name not in NO_OPERATIONS])
def test_mpi_ops_has_the_same_names(name: str) -> None:
    assert getattr(hvd.mpi_ops, name) is getattr(hvd, name)
    assert name in horo.torch.mpi_ops.__all__


def test_mpi_ops_has_what_only_horovods_has() -> None:
    assert hvd.mpi_ops.is_homogeneous is hvd.is_homogeneous
    assert hvd.mpi_ops.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    assert hvd.mpi_ops.handle_average_backwards_compatibility(None, None) == hvd.Average
    with pytest.raises(AttributeError, match=r"^module 'horo\.torch\.mpi_ops' has no attribute 'x'"):
        hvd.mpi_ops.x  # noqa: B018
