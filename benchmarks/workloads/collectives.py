"""A reducescatter, alltoall, allgather or broadcast, under a fixed name where the library has names.

All write into memory that is there, but Horovod: it gives new memory for each result but that of a broadcast, and the
time of that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from contestant import Unsupported, Work
from libraries import Library

from horo.bench.operations import Part

Call = Callable[[], Any]


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: operation, dtype, count (elements of the larger tensor, a multiple of the ranks), name."""
    job = Part(parameters["operation"], library.rank, library.size, parameters["count"])
    dtype, name = parameters["dtype"], parameters["name"]
    tensor, call = mpi_call(library, job, dtype) if library.kind == "mpi" else torch_call(library, job, dtype, name)
    job.fill(tensor)

    def check() -> str:
        job.fill(tensor)
        result = call()
        wrong = job.count_wrong(result)
        return f"{wrong} of {job.received} elements" if wrong else ""

    return Work(call, check)


def torch_call(library: Library, job: Part, dtype_name: str, name: str) -> tuple[Any, Call]:
    import torch  # noqa: PLC0415  (ranks of an MPI have none)

    dtype: torch.dtype = getattr(torch, dtype_name)
    if library.kind == "gloo":
        tensor, result = torch.zeros(job.given, dtype=dtype), torch.zeros(job.received, dtype=dtype)
        return tensor, gloo_call(library.module, job, tensor, result)
    if library.kind not in ("horo", "horovod"):
        raise Unsupported(f"the library '{library.kind}' has no {job.operation}")
    if library.kind == "horovod" and dtype_name == "bfloat16":
        raise Unsupported("Horovod has no bfloat16")
    module, tensor = library.module, torch.zeros(job.given, dtype=dtype)
    there = {"out": torch.zeros(job.received, dtype=dtype)} if library.kind == "horo" else {}
    calls: dict[str, Call] = {
        "reducescatter": lambda: module.reducescatter(tensor, op=module.Sum, name=name, **there),
        "alltoall": lambda: module.alltoall(tensor, name=name, **there),
        "allgather": lambda: module.allgather(tensor, name=name, **there),
        "broadcast": lambda: module.broadcast_(tensor, 0, name=name),
    }
    return tensor, calls[job.operation]


def gloo_call(module: Any, job: Part, tensor: Any, result: Any) -> Call:
    if job.operation == "broadcast":
        return returning(tensor, lambda: module.broadcast(tensor, 0))
    into = {
        "reducescatter": module.reduce_scatter_tensor,
        "alltoall": module.all_to_all_single,
        "allgather": module.all_gather_into_tensor,
    }[job.operation]
    return returning(result, lambda: into(result, tensor))


def mpi_call(library: Library, job: Part, dtype: str) -> tuple[Any, Call]:
    if dtype in ("bfloat16", "float16"):
        raise Unsupported(f"{dtype} is no type of MPI")
    world = library.module.COMM_WORLD
    array, result = np.zeros(job.given, dtype=dtype), np.zeros(job.received, dtype=dtype)
    if job.operation == "broadcast":
        return array, returning(array, lambda: world.Bcast(array, 0))
    into = {
        "reducescatter": world.Reduce_scatter_block,
        "alltoall": world.Alltoall,
        "allgather": world.Allgather,
    }[job.operation]
    return array, returning(result, lambda: into(array, result))


def returning(result: Any, act: Callable[[], object]) -> Call:
    """``act``, after which ``result`` holds what it made."""

    def call() -> Any:
        act()
        return result

    return call
