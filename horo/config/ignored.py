"""Variables that do nothing: ``init()`` warns of those that are set, and of names that look misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from horo.config.sources import read_sources
from horo.config.table import GROUPS, Config, names_of, variables_of

__all__ = ["AT_BUILD", "PASSED_OVER", "misspelt", "passed_over"]

_GROUPED = "horo gives NCCL the tensors themselves, as one group, on one stream of its own"
_NO_NVTX = "horo marks nothing for NVTX; HORO_TIMELINE shows what it does"
_ASYNC = "operations on GPUs are always asynchronous: streams wait, not threads"
_NO_SPARK = "horo has no Spark"
_PARTS = ("PYTORCH", "TENSORFLOW", "MXNET", "MPI", "GLOO", "NVTX")
_NO_GLOO = "horo has transports of its own; HORO_PEER_TIMEOUT and HORO_NETWORK_INTERFACES are theirs"
PASSED_OVER = {
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "horo's search has no Gaussian process",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "horo reduces inside each host first by itself, and NCCL among all ranks",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "horo gathers inside each host first by itself",
    "HOROVOD_TORUS_ALLREDUCE": "horo reduces inside each host first by itself, and NCCL among all ranks",
    "HOROVOD_THREAD_AFFINITY": "hororun --bind-to core gives each rank its share of the cores",
    "HOROVOD_CPU_OPERATIONS": "horo's own algorithms reduce, gather and broadcast tensors in host memory; "
    "HORO_TRANSPORT=mpi has MPI carry the data between hosts",
    "HOROVOD_MPI_THREADS_DISABLE": "horo asks MPI for the threads that it needs",
    "HOROVOD_DISABLE_GROUP_FUSION": "tensors of a group travel in batches like all others",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "horo cuts what Adasum sends as it does for all operations",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may come and go without it",
    "HOROVOD_ELASTIC": "hororun --min-np makes a job elastic",
    "HOROVOD_ELASTIC_TIMEOUT": "hororun --elastic-timeout sets it",
    "HOROVOD_NUM_NCCL_STREAMS": _GROUPED,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _GROUPED,
    "HOROVOD_DISABLE_NVTX_RANGES": _NO_NVTX,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _ASYNC,
    "HOROVOD_ENABLE_XLA_OPS": "horo has no TensorFlow",
    "HOROVOD_CCL_CACHE": "horo does not use oneCCL",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": _NO_GLOO,
    "HOROVOD_GLOO_IFACE": _NO_GLOO,
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": _NO_GLOO,
    "HOROVOD_GLOO_RENDEZVOUS_PORT": _NO_GLOO,
    "HOROVOD_LOG_HIDE_TIME": "horo's log has no times",
    "HOROVOD_SPARK_START_TIMEOUT": _NO_SPARK,
    "HOROVOD_SPARK_WORK_DIR": _NO_SPARK,
    "HOROVOD_SPARK_PYTHONPATH": _NO_SPARK,
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": _NO_SPARK,
}
"""The variables of Horovod that do nothing here, each with the reason."""
AT_BUILD = (
    *(f"HOROVOD_{do}_{what}" for do in ("WITH", "WITHOUT") for what in _PARTS),
    *("HOROVOD_GPU", "HOROVOD_GPU_ALLREDUCE", "HOROVOD_GPU_ALLGATHER"),
    *("HOROVOD_GPU_BROADCAST", "HOROVOD_GPU_ALLTOALL", "HOROVOD_GPU_REDUCESCATTER", "HOROVOD_ALLOW_MIXED_GPU_IMPL"),
    *("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK"),
    *("HOROVOD_ROCM_HOME", "HOROVOD_NVTX_INCLUDE", "HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST"),
    *("HOROVOD_CMAKE", "HOROVOD_DEBUG", "HOROVOD_SKIP_COMPILE", "HOROVOD_LOCAL_VERSION", "HOROVOD_MIXED_INSTALL"),
)
"""Variables with which Horovod is built; often set in images. One line is enough for all of them."""
_OFF = frozenset({"", "0", "false", "no", "off"})


def passed_over(environ: Mapping[str, str], arguments: Mapping[str, Any] | None = None) -> list[str]:
    """A sentence for each variable of Horovod, or its twin in HORO_, that is set, and that horo does not read.

    And for the times of stall checks, the settings of autotuning and the marks of a timeline, where these are switched
    off, also if they are ``arguments`` of ``init()``.
    """
    sentences = [
        f"{name} does nothing here: {why}"
        for horovods, why in PASSED_OVER.items()
        for name in (horovods, horovods.replace("HOROVOD_", "HORO_"))
        if environ.get(name, "").strip().lower() not in _OFF
    ]
    built = [name for name in AT_BUILD if environ.get(name, "").strip()]
    if built:
        do = "does" if len(built) == 1 else "do"
        sentences.append(f"{', '.join(built)} {do} nothing here: horo is the same for every torch, MPI and GPU")
    return sentences + _without_switch(environ, arguments or {})


def _without_switch(environ: Mapping[str, str], arguments: Mapping[str, Any]) -> list[str]:
    """Sentences for what belongs to stall checks, autotuning or a timeline, where these are switched off."""
    given = {name: value for name, value in arguments.items() if value is not None}
    set_as = {
        name: f"init({name}={given[name]!r})" if name in given else variable.set_name(environ)
        for name, variable in variables_of(Config).items()
    }

    def is_on(switch: str) -> bool:
        return bool(given[switch]) if switch in given else environ.get(set_as[switch], "").strip().lower() not in _OFF

    sentences = []
    if is_on("stall_check_disable"):
        switch = set_as["stall_check_disable"]
        switch += "" if "stall_check_disable" in given else f"={environ[switch]}"
        times = (set_as[name] for name in ("stall_check_time_s", "stall_shutdown_time_s"))
        sentences += [f"{each} does nothing beside {switch}" for each in times if each]
    if not is_on("autotune"):
        for name, each in set_as.items():
            if name.startswith("autotune_") and each:
                as_argument = name in given or "autotune" in given
                source = "" if name in given else read_sources(variables_of(Config), environ)[name]
                if source.startswith("hororun ") and not as_argument:  # "hororun --autotune-log-file"
                    sentences.append(f"{source} does nothing without --autotune")
                    continue
                switch = "init(autotune=True)" if as_argument else f"{variables_of(Config)['autotune'].names[0]}=1"
                sentences.append(f"{each} does nothing without {switch}")
    if is_on("timeline_mark_cycles") and not (given.get("timeline") or set_as["timeline"]):
        sentences.append(f"{set_as['timeline_mark_cycles']} does nothing without HORO_TIMELINE")
    return sentences


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable whose name resembles that of one that horo or Horovod reads, but is not equal."""
    ignored = (each.replace("HOROVOD_", "HORO_") for each in PASSED_OVER)
    known = {*names_of(*GROUPS), *PASSED_OVER, *ignored, *AT_BUILD, "HORO_HOST_MARK"}  # the last is hororun's own
    sentences = []
    for name in sorted(environ):
        prefix, _, rest = name.partition("_")
        if prefix not in ("HORO", "HOROVOD") or name in known:
            continue
        names = sorted(each.removeprefix(f"{prefix}_") for each in known if each.startswith(f"{prefix}_"))
        near = difflib.get_close_matches(rest, names, 1, 0.82)
        if near:
            sentences.append(f"{name} is no variable of horo and means nothing: did you mean {prefix}_{near[0]}?")
    return sentences
