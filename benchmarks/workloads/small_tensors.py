"""Many small tensors summed in place: each by a call of its own that returns at once, or all by one call."""

from __future__ import annotations

import time
from typing import Any

import torch
from contestant import Unsupported, Work
from libraries import Library


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    """``parameters``: form ("single" or "grouped"), tensors (how many), count (elements of each)."""
    module, number, count = library.module, parameters["tensors"], parameters["count"]
    tensors = [torch.zeros(count) for _ in range(number)]
    submit_us: list[float] = []

    def single_horo() -> None:
        begin = time.perf_counter_ns()
        handles = [
            module.allreduce_async_(tensor, op=module.Sum, name=f"small{index}") for index, tensor in enumerate(tensors)
        ]
        submit_us.append((time.perf_counter_ns() - begin) / 1e3 / number)
        for handle in handles:
            module.synchronize(handle)

    def single_gloo() -> None:
        begin = time.perf_counter_ns()
        works = [module.all_reduce(tensor, async_op=True) for tensor in tensors]
        submit_us.append((time.perf_counter_ns() - begin) / 1e3 / number)
        for work in works:
            work.wait()

    def grouped() -> None:
        module.grouped_allreduce_(tensors, op=module.Sum, name="small")

    if library.kind == "gloo" and parameters["form"] == "grouped":
        raise Unsupported("gloo has no grouped allreduce")
    if library.kind not in ("horo", "horovod", "gloo"):
        raise Unsupported(f"the library '{library.kind}' is not asked for this")
    single = single_gloo if library.kind == "gloo" else single_horo
    call = grouped if parameters["form"] == "grouped" else single

    def check() -> str:
        for index, tensor in enumerate(tensors):
            tensor.fill_(index % 7 + library.rank)
        call()
        ranks = library.size * (library.size - 1) // 2
        wrong = sum(not bool((t == index % 7 * library.size + ranks).all()) for index, t in enumerate(tensors))
        for tensor in tensors:
            tensor.zero_()  # the timed calls reduce zeros, which stay zeros however often they are summed
        return f"{wrong} of {number} tensors" if wrong else ""

    def figures() -> dict[str, float]:
        mean = sum(submit_us) / len(submit_us) if submit_us else 0.0
        submit_us.clear()
        return {"submit_us": mean}

    return Work(call, check, figures, submit_us.clear)
