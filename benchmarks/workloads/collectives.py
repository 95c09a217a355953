"""A reducescatter, alltoall, allgather or broadcast, under a fixed name where the library has names.

All write into memory that is there, but Horovod: it gives new memory for each result but that of a broadcast, and the
time of that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from contestant import Unsupported, Work
from libraries import Library

from workloads.allreduce import count_wrong, fill_pattern, pattern_factor

ROOT_FACTOR = 7
# Factors for an alltoall tell so many senders and receivers apart; small, so that 16 bits hold all values.
TOLD_APART = 4

Call = Callable[[], Any]


@dataclass(frozen=True)
class Job:
    """One operation on one rank: how much it gives and gets, and which values. ``count``: of the larger tensor."""

    operation: str
    rank: int
    size: int
    count: int

    @property
    def part(self) -> int:
        return self.count // self.size

    @property
    def given(self) -> int:
        """Elements that this rank gives."""
        return self.part if self.operation == "allgather" else self.count

    @property
    def received(self) -> int:
        """Elements of the result on this rank."""
        return self.part if self.operation == "reducescatter" else self.count

    def fill(self, tensor: Any) -> None:
        """Fills what is given, a tensor or an array, with values that tell who gave them for whom."""
        if self.operation == "alltoall":
            for to in range(self.size):
                fill_pattern(self._part_of(tensor, to), pair_factor(self.rank, to))
        elif self.operation == "broadcast":
            fill_pattern(tensor, ROOT_FACTOR if self.rank == 0 else 1)
        else:
            fill_pattern(tensor, pattern_factor(self.rank))

    def count_wrong(self, result: Any) -> int:
        """How many elements of the result are not what they must be."""
        if self.operation == "reducescatter":
            total = sum(pattern_factor(rank) for rank in range(self.size))
            return count_wrong(result, total, self.rank * self.part)
        if self.operation == "broadcast":
            return count_wrong(result, ROOT_FACTOR)
        factor = self._gathered_factor if self.operation == "allgather" else self._exchanged_factor
        return sum(count_wrong(self._part_of(result, rank), factor(rank)) for rank in range(self.size))

    def _part_of(self, tensor: Any, rank: int) -> Any:
        return tensor[rank * self.part : (rank + 1) * self.part]

    def _gathered_factor(self, rank: int) -> int:
        return pattern_factor(rank)

    def _exchanged_factor(self, rank: int) -> int:
        return pair_factor(rank, self.rank)


def pair_factor(origin: int, destination: int) -> int:
    """What ``origin`` multiplies the pattern with for ``destination``."""
    return origin % TOLD_APART * TOLD_APART + destination % TOLD_APART + 1


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: operation, dtype, count (elements of the larger tensor, a multiple of the ranks), name."""
    job = Job(parameters["operation"], library.rank, library.size, parameters["count"])
    dtype, name = parameters["dtype"], parameters["name"]
    tensor, call = mpi_call(library, job, dtype) if library.kind == "mpi" else torch_call(library, job, dtype, name)
    job.fill(tensor)

    def check() -> str:
        job.fill(tensor)
        result = call()
        wrong = job.count_wrong(result)
        return f"{wrong} of {job.received} elements" if wrong else ""

    return Work(call, check)


def torch_call(library: Library, job: Job, dtype_name: str, name: str) -> tuple[Any, Call]:
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


def gloo_call(module: Any, job: Job, tensor: Any, result: Any) -> Call:
    if job.operation == "broadcast":
        return returning(tensor, lambda: module.broadcast(tensor, 0))
    into = {
        "reducescatter": module.reduce_scatter_tensor,
        "alltoall": module.all_to_all_single,
        "allgather": module.all_gather_into_tensor,
    }[job.operation]
    return returning(result, lambda: into(result, tensor))


def mpi_call(library: Library, job: Job, dtype: str) -> tuple[Any, Call]:
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
