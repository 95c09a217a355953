"""The environment of every rank: pure functions from placement and options to variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from horo.config.table import LaunchVariables, TorchrunVariables, names_of
from horo.runner.job.placement import Placement
from horo.runner.processes import MARK_NAME

__all__ = [
    "FORWARDED",
    "TORCH_VARIABLES",
    "common_variables",
    "default_variables",
    "forwarded",
    "inherited",
    "outer_rank",
    "parse_exports",
    "rank_variables",
]

FORWARDED = (
    "HORO_*",
    "HOROVOD_*",
    "NCCL_*",
    "UCX_*",
    "FI_*",
    "GLOO_*",
    "OMP_*",
    "GOMP_*",
    "KMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "TORCH_*",
    "PYTORCH_*",
    "PYTHON*",
    "PATH",
    "LD_LIBRARY_PATH",
    "MALLOC_*",
    "GLIBC_TUNABLES",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "LANG",
    "LC_*",
    "TZ",
)
"""Variables that go to remote hosts unasked. Local ranks inherit everything."""

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Makes glibc keep freed memory for the next allocation. By default it gives large blocks back to the kernel, and a
training step frees all its gradients: to get as many zeroed pages again costs more than their exchange. Makes glibc
2.35 and later also ask for huge pages, which most kernels give on request, so kept memory causes fewer misses of the
TLB."""

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables of ``torch.distributed``; the number of the host, GROUP_RANK, is for Lightning's own strategies."""

MOVE_RANKS = {"HORO_LEAVE_CROWDED_CORES": "1"}
"""Lets waiting ranks leave cores that they share: ranks of hororun may expect the cores of their host."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environment`` that goes to remote hosts unasked."""
    return {
        name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in FORWARDED)
    }


def outer_rank(environment: Mapping[str, str]) -> str:
    """This process as a rank of another launcher's job, in words; empty: it is not in one, or alone in it."""
    if "HORO_JOB_ID" in environment and "HOROVOD_RANK" in environment:
        return f"rank {environment['HOROVOD_RANK']} of another hororun's job"
    torchrun = ("torchrun", "RANK", "WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in environment else None
    mpiruns = (("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("mpirun", "PMI_RANK", "PMI_SIZE"))
    for launcher, rank, size in filter(None, (torchrun, *mpiruns)):
        if rank in environment and environment.get(size, "1") != "1":
            return f"rank {environment[rank]} of a job of {launcher}"
    return ""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environment`` that ranks inherit: all but the place that another launcher has given this process.

    torchrun's variables go only where torchrun has set them: users set ``MASTER_ADDR`` themselves, too.
    """
    places = names_of(LaunchVariables, *([TorchrunVariables] if "TORCHELASTIC_RUN_ID" in environment else []))
    return {name: value for name, value in environment.items() if name not in places}


def parse_exports(items: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The values of ``-x``: ``NAME=VALUE``, or ``NAME`` for the value it has here.

    Raises:
        ValueError: a name is empty, or has no value here.
    """
    exports = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or "\0" in item:
            raise ValueError(f"-x {item!r}: write NAME or NAME=VALUE")
        if not equals:
            if name not in environment:
                raise ValueError(f"-x {name}: it is not set here; set it, or write -x {name}=VALUE")
            value = environment[name]
        exports[name] = value
    return exports


def common_variables(job_id: str, secret: str) -> dict[str, str]:
    """The variables that all ranks of the job share."""
    return {"HORO_JOB_ID": job_id, "HORO_SECRET": secret}


def default_variables(environment: Mapping[str, str], *, keep_memory: bool) -> dict[str, str]:
    """The variables that all ranks get unless ``environment`` has them already.

    Args:
        environment: of hororun, with the values of ``-x``.
        keep_memory: freed memory stays with the process.
    """
    variables = {} if "PYTHONUNBUFFERED" in environment else {"PYTHONUNBUFFERED": "1"}
    if not any(f"{prefix}_LEAVE_CROWDED_CORES" in environment for prefix in ("HORO", "HOROVOD")):
        variables |= MOVE_RANKS
    tunes_malloc = "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment)
    return variables | (KEEP_MEMORY if keep_memory and not tunes_malloc else {})


def rank_variables(
    placement: Placement,
    *,
    host: str,
    mark: str,
    store: str,
    master: tuple[str, int] | None,
    exports: Collection[str],
    cores: int,
    threads_set: bool,
) -> dict[str, str]:
    """The variables of one rank.

    Args:
        placement: its place.
        host: name of its host, as given to ``-H``.
        mark: marks processes of this job on this host.
        store: addresses of the key-value server for its host, ``addr:port[,addr:port...]``.
        master: address and port for ``torch.distributed``; None: its variables are not set.
        exports: those of its variables that the user has set.
        cores: of its host; shared out as ``OMP_NUM_THREADS``,
        threads_set: unless the user has set that.
    """
    values = {
        "HOSTNAME": host,
        "RANK": str(placement.rank),
        "SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_SIZE": str(placement.local_size),
        "CROSS_RANK": str(placement.cross_rank),
        "CROSS_SIZE": str(placement.cross_size),
    }
    told = {f"{prefix}_{name}": value for prefix in ("HORO", "HOROVOD") for name, value in values.items()}
    told |= {MARK_NAME: mark, "HORO_STORE": store}
    if master is not None:
        place = (placement.rank, placement.size, placement.local_rank, placement.local_size, placement.cross_rank)
        of_torch = zip(TORCH_VARIABLES, map(str, (*place, *master)), strict=True)
        told |= {name: value for name, value in of_torch if name not in exports}
    if not threads_set:
        told["OMP_NUM_THREADS"] = str(max(1, cores // placement.local_size))
    return told
