"""All names of Horovod are there; others are errors that say so."""

import importlib

import pytest
from jobs import run_python

import horo.torch as hvd
from horo import errors


@pytest.mark.parametrize("name", ["elastic", "mpi_ops", "_check_has_gpu"])
def test_names_that_a_star_import_does_not_bring_are_there(name: str) -> None:
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


NOT_IN_MPI_OPS = """
DistributedOptimizer Handle LearningRateWarmup MetricAverage ReduceOp SyncBatchNorm allgather_object average_buffers
broadcast_object broadcast_optimizer_state broadcast_parameters config distribute no_sync shard stats
"""


def test_mpi_ops_has_the_same_operations() -> None:
    names = set(hvd.__all__) - set(errors.__all__) - set(NOT_IN_MPI_OPS.split()) | {"HorovodInternalError"}
    assert set(hvd.mpi_ops.__all__) - {"handle_average_backwards_compatibility"} == names
    assert all(getattr(hvd.mpi_ops, name) is getattr(hvd, name) for name in names)


def test_mpi_ops_has_what_only_horovods_has() -> None:
    assert hvd.mpi_ops.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    assert hvd.mpi_ops.handle_average_backwards_compatibility(None, None) == hvd.Average
    with pytest.raises(AttributeError, match=r"^module 'horo\.torch\.mpi_ops' has no attribute 'x'"):
        hvd.mpi_ops.x  # noqa: B018
