"""The environment of every rank: pure functions from placement and options to variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from horo.runner.job.placement import Placement
from horo.runner.processes import MARK_NAME

__all__ = [
    "FORWARDED",
    "common_variables",
    "external_variables",
    "forwarded",
    "parse_exports",
    "rank_variables",
    "tunes_malloc",
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
"""Tells glibc to keep what is freed for the next allocation. By default it gives large blocks back to the kernel, and a
training step frees all its gradients: getting as many zeroed pages again costs more than to exchange them. And tells it
(2.35 and later; older ones ignore the word) to ask for huge pages where the kernel gives them on request, as most do:
what is kept anyway is then found with fewer misses of the TLB."""

MOVE_RANKS = {"HORO_LEAVE_CROWDED_CORES": "1"}
"""Lets waiting ranks leave cores that they share: what hororun starts may expect the cores of its host."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of ``environment`` that goes to remote hosts unasked."""
    return {
        name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in FORWARDED)
    }


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


def common_variables(job_id: str, secret: str, interfaces: Sequence[str]) -> dict[str, str]:
    """What all ranks of the job share."""
    shared = {"HORO_JOB_ID": job_id, "HORO_SECRET": secret, "PYTHONUNBUFFERED": "1"}
    if interfaces:
        shared["HORO_NETWORK_INTERFACES"] = ",".join(interfaces)
    return shared


def external_variables(
    interfaces: Sequence[str], *, threads: int | None, keep_memory: bool, move_ranks: bool
) -> dict[str, str]:
    """What ranks that another launcher starts have in common.

    Args:
        interfaces: network interfaces to use; none: those that route to the peers.
        threads: ``OMP_NUM_THREADS``; None: the user has set it.
        keep_memory: freed memory stays with the process.
        move_ranks: waiting ranks may leave cores that they share.
    """
    shared = {"PYTHONUNBUFFERED": "1"}
    if interfaces:
        shared["HORO_NETWORK_INTERFACES"] = ",".join(interfaces)
    if threads is not None:
        shared["OMP_NUM_THREADS"] = str(threads)
    return shared | (KEEP_MEMORY if keep_memory else {}) | (MOVE_RANKS if move_ranks else {})


def tunes_malloc(environment: Mapping[str, str]) -> bool:
    """Whether the user has said how malloc is to behave, which then stays."""
    return "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment)


def places_ranks(environment: Mapping[str, str]) -> bool:
    """Whether the user has said if ranks may move from core to core, which then stays."""
    return any(f"{prefix}_LEAVE_CROWDED_CORES" in environment for prefix in ("HORO", "HOROVOD"))


def rank_variables(
    placement: Placement,
    *,
    host: str,
    mark: str,
    store: str,
    master: tuple[str, int] | None,
    cores: int,
    threads_set: bool,
    keep_memory: bool,
    move_ranks: bool,
) -> dict[str, str]:
    """The variables of one rank.

    Args:
        placement: its place.
        host: name of its host, as given to ``-H``.
        mark: marks processes of this job on this host.
        store: addresses of the key-value server for its host, ``addr:port[,addr:port...]``.
        master: address and port for ``torch.distributed``; None: its variables are not set.
        cores: of its host; shared out as ``OMP_NUM_THREADS``,
        threads_set: unless the user has set that.
        keep_memory: freed memory stays with the process.
        move_ranks: waiting ranks may leave cores that they share.
    """
    told = {
        MARK_NAME: mark,
        "HORO_STORE": store,
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": str(placement.rank),
        "HOROVOD_SIZE": str(placement.size),
        "HOROVOD_LOCAL_RANK": str(placement.local_rank),
        "HOROVOD_LOCAL_SIZE": str(placement.local_size),
        "HOROVOD_CROSS_RANK": str(placement.cross_rank),
        "HOROVOD_CROSS_SIZE": str(placement.cross_size),
    }
    if master is not None:
        told |= {
            "RANK": str(placement.rank),
            "WORLD_SIZE": str(placement.size),
            "LOCAL_RANK": str(placement.local_rank),
            "LOCAL_WORLD_SIZE": str(placement.local_size),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
        }
    if not threads_set:
        told["OMP_NUM_THREADS"] = str(max(1, cores // placement.local_size))
    if keep_memory:
        told |= KEEP_MEMORY
    if move_ranks:
        told |= MOVE_RANKS
    return told
