"""Scripts with tensors on GPUs under a real mpirun, which say what Horovod's say of a CUDA-aware MPI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doubles import CUDA, build_double
from mpi_jobs import MpiJobs, why_not

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(150)]

SCRIPT = """
import os, sys
os.environ["HORO_HOST_ID"] = "host " + os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
import gpu_checks, gpu_double
import horo.torch as hvd
hvd.init()
gpu = gpu_double.load(sys.argv[1])
for on_gpu in ((0, 1), (1,)):
    gpu_checks.reductions(gpu, on_gpu)
    gpu_checks.moves(gpu, on_gpu)
sys.stdout.write(hvd.config()["gpu_operations"] + " done\\n")
hvd.shutdown()
"""


def test_tensors_on_gpus_are_staged_on_their_way_by_mpi(tmp_path: Path) -> None:
    double = build_double(CUDA, tmp_path / "double", DELAYS=20)
    tests = Path(__file__).resolve().parent.parent
    environ = {
        "HORO_TRANSPORT": "mpi",
        "HOROVOD_GPU_OPERATIONS": "MPI",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")])),
    }
    ended = MpiJobs(tmp_path).run(2, SCRIPT, str(double), environ=environ)
    assert (ended.code, ended.lines) == (0, ["mpi done"] * 2), ended.errors
