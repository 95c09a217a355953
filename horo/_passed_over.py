"""Variables that do nothing: ``init()`` warns of those that are set."""

from __future__ import annotations

from collections.abc import Mapping

from horo._config import Config, Variable, variables_of

__all__ = ["PASSED_OVER", "passed_over"]

_HOSTS_FIRST = "horo reduces inside each host first by itself"
_NO_TUNER = "this version of horo has no autotuner"
_NO_TIMELINE = "this version of horo has no timeline"
_NO_GPU = "this version of horo has no GPU path"
_NO_GLOO = "horo has transports of its own; HORO_PEER_TIMEOUT and HORO_NETWORK_INTERFACES are theirs"
PASSED_OVER = {
    "HOROVOD_TIMELINE": _NO_TIMELINE,
    "HOROVOD_TIMELINE_MARK_CYCLES": _NO_TIMELINE,
    "HOROVOD_AUTOTUNE": _NO_TUNER,
    "HOROVOD_AUTOTUNE_LOG": _NO_TUNER,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NO_TUNER,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NO_TUNER,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NO_TUNER,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_TUNER,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _HOSTS_FIRST,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _HOSTS_FIRST,
    "HOROVOD_TORUS_ALLREDUCE": _HOSTS_FIRST,
    "HOROVOD_THREAD_AFFINITY": "hororun --bind-to core gives each rank its share of the cores",
    "HOROVOD_MPI_THREADS_DISABLE": "horo asks MPI for the threads that it needs",
    "HOROVOD_DISABLE_GROUP_FUSION": "tensors of a group travel in batches like all others",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "horo cuts what Adasum sends as it does for all operations",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets may come and go without it",
    "HOROVOD_ELASTIC": "this version of horo has no elastic jobs",
    "HOROVOD_ELASTIC_TIMEOUT": "this version of horo has no elastic jobs",
    "HOROVOD_NUM_NCCL_STREAMS": _NO_GPU,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _NO_GPU,
    "HOROVOD_DISABLE_NVTX_RANGES": _NO_GPU,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _NO_GPU,
    "HOROVOD_ENABLE_XLA_OPS": "horo has no TensorFlow",
    "HOROVOD_CCL_CACHE": "horo does not use oneCCL",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": _NO_GLOO,
    "HOROVOD_GLOO_IFACE": _NO_GLOO,
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": _NO_GLOO,
    "HOROVOD_GLOO_RENDEZVOUS_PORT": _NO_GLOO,
    "HOROVOD_LOG_HIDE_TIME": "horo's log has no times",
}
"""Why each does nothing here."""
_OFF = frozenset({"", "0", "false", "no", "off"})


def passed_over(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of Horovod that is set, unless to 0 or to nothing, and that horo does not read.

    And for the times of stall checks, where these are switched off.
    """
    sentences = [
        f"{name} does nothing here: {why}"
        for name, why in PASSED_OVER.items()
        if environ.get(name, "").strip().lower() not in _OFF
    ]
    variables = variables_of(Config)
    switch = _set_name(variables["stall_check_disable"], environ)
    if switch and environ[switch].strip().lower() not in _OFF:
        times = (_set_name(variables[field], environ) for field in ("stall_check_time_s", "stall_shutdown_time_s"))
        sentences += [f"{name} does nothing beside {switch}={environ[switch]}" for name in times if name]
    return sentences


def _set_name(variable: Variable, environ: Mapping[str, str]) -> str:
    """The name under which a variable is set; empty: it is not."""
    return next((name for name in variable.names if environ.get(name)), "")
