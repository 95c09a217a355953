"""A sum over all ranks, in place, under a fixed name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from contestant import Unsupported, Work
from libraries import Library

from horo.bench.operations import count_wrong, fill_pattern, pattern_factor


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: dtype, count (elements), name."""
    dtype, count, name = parameters["dtype"], parameters["count"], parameters["name"]
    total = sum(map(pattern_factor, range(library.size)))
    if library.kind == "mpi":
        return work_with_numpy(library, dtype, count, total)
    return work_with_torch(library, dtype, count, name, total)


def work_with_torch(library: Library, dtype_name: str, count: int, name: str, total: int) -> Work:
    import torch  # noqa: PLC0415  (ranks of an MPI have none)

    dtype: torch.dtype = getattr(torch, dtype_name)
    tensor = torch.zeros(count, dtype=dtype)
    call = torch_call(library, tensor, name)

    def check() -> str:
        fill_pattern(tensor, pattern_factor(library.rank))
        call()
        wrong = count_wrong(tensor, total)
        tensor.zero_()  # the timed calls reduce zeros, which stay zeros however often they are summed
        return f"{wrong} of {count} elements" if wrong else ""

    return Work(call, check)


def torch_call(library: Library, tensor: Any, name: str) -> Callable[[], object]:
    module = library.module
    if library.kind == "gloo":
        return lambda: module.all_reduce(tensor)
    if library.kind == "horovod" and str(tensor.dtype) == "torch.bfloat16":
        raise Unsupported("Horovod has no bfloat16")
    if library.kind in ("horo", "horovod"):
        return lambda: module.allreduce_(tensor, op=module.Sum, name=name)
    raise Unsupported(f"the library '{library.kind}' has no allreduce")


def work_with_numpy(library: Library, dtype: str, count: int, total: int) -> Work:
    if dtype in ("bfloat16", "float16"):
        raise Unsupported(f"{dtype} is no type of MPI")
    array = np.zeros(count, dtype=dtype)
    world, in_place = library.module.COMM_WORLD, library.module.IN_PLACE

    def call() -> None:
        world.Allreduce(in_place, array)

    def check() -> str:
        fill_pattern(array, pattern_factor(library.rank))
        call()
        wrong = count_wrong(array, total)
        array.fill(0)
        return f"{wrong} of {count} elements" if wrong else ""

    return Work(call, check)
