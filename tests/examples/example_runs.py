"""Starts example scripts as a user would: alone, under hororun or under torchrun; or in ranks that are forked."""

import contextlib
import functools
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import port_for_later
from rank_pool import RankPool

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 240

# What another launcher, or the one that runs the tests, may have left.
_LAUNCHER_PREFIXES = ("HORO_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")
_LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


@functools.cache
def why_gloo_cannot(operation: str, dtype: str = "float32") -> str:
    """Why torch's gloo cannot do an allreduce or reducescatter, as a reason to skip; empty: it can."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    tensor = torch.ones(2, dtype=getattr(torch, dtype))
    try:
        if operation == "allreduce":
            group.allreduce([tensor]).wait()
        else:
            group._reduce_scatter_base(tensor.clone(), tensor).wait()
    except RuntimeError:
        return f"gloo of torch {torch.__version__} has no {operation} of {dtype} (`make test TORCH=torch==2.13.0`)"
    return ""


def launcher(name: str, ranks: int) -> list[str]:
    """The words before ``python script.py``; ``name`` is python, hororun or torchrun."""
    if name == "python":
        return [sys.executable]
    if name == "hororun":
        slots = f"localhost:{ranks}"  # more ranks than this machine may have cores
        return [sys.executable, "-m", "horo.runner", "-np", str(ranks), "-H", slots, "--no-prefix", sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def start(
    command: list[str], *, expected_code: int | None = 0, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Runs to the end with one thread per rank, so that ranks do not fight for cores; checks the exit code."""
    left = [name for name in environment if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)]
    kept = {name: value for name, value in environment.items() if name not in left}
    env = {**kept, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert expected_code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def forked(script: str, *arguments: str, ranks: int = 2) -> list[tuple[object, str]]:
    """What a script gives ``sys.exit()`` on each rank (0: it has come to its end), and what it prints."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_for_later())}
    pool = RankPool(ranks, init=False, environment=place)
    try:
        return pool.run(_run_here, str(ROOT / "examples" / script), arguments, deadline_s=LIMIT_SECONDS)
    finally:
        pool.close()


def _run_here(path: str, arguments: tuple[str, ...]) -> tuple[object, str]:
    sys.argv = [path, *arguments]
    os.environ["RANK"] = os.environ["HOROVOD_RANK"]  # as hororun sets it for torch
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code, printed.getvalue()
    return 0, printed.getvalue()
