"""The results of requests, made from their memory and from the rows that the core has gathered.

An exception of a signal handler may end a wait anywhere, also when the core has finished the request. So all functions
here may be called again for a request, with 0 for its handle once that is released: what they return is the same. They
release the handle of a request that has not failed, last.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from horo.core import context
from horo.errors import UsageError
from horo.torch.engine.devices import finish_on, to_device
from horo.torch.engine.operation import Operation, StagedTensors, count_change, describe

__all__ = ["Gathered", "Gathering", "fill_out", "finish_in_place", "finish_output", "finish_staged", "gathered"]

_taking = threading.RLock()  # a signal handler may take another result
"""Held while a thread takes results, which another one may wait for, too. Nothing blocks there."""


class Gathered(NamedTuple):
    """One result of an allgather or alltoall: the rows from all ranks in rank order, and how many came from each."""

    tensor: torch.Tensor
    rows: list[int]

    def present(self, ranks: Sequence[int]) -> list[int]:
        """The ones of ``ranks`` that have given rows, where only ranks that have joined give none."""
        return [rank for rank, rows in zip(ranks, self.rows, strict=True) if rows]


class Gathering:
    """Makes the results of one request: a tuple of ``Gathered``."""

    def __init__(self) -> None:
        self._taken: list[context.TakenResult] = []
        self._results: list[Gathered] = []

    def __call__(self, core: context.Context, handle: int, staged: StagedTensors) -> tuple[Gathered, ...]:
        """The results, including those that an interrupted call has taken."""
        if handle:
            core.wait(handle)
            with _taking:
                for index, tensor in enumerate(staged.inputs):
                    if index == len(self._results):
                        self._results.append(self._take_one(core, handle, index, tensor))
            core.release(handle)
        return tuple(self._results)

    def _take_one(self, core: context.Context, handle: int, index: int, tensor: torch.Tensor) -> Gathered:
        if index == len(self._taken):
            self._taken.append(context.TakenResult(core.size))
        buffer, rows = core.take_result(handle, index, self._taken[index])
        return gathered(buffer, rows, tensor)


def gathered(buffer: Any, rows: list[int], tensor: torch.Tensor) -> Gathered:
    """One result, over the memory that the core has given; ``tensor``: the input of this rank."""
    shape = (sum(rows), *tensor.shape[1:])
    if len(buffer) == 0:
        return Gathered(to_device(torch.empty(shape, dtype=tensor.dtype, device="cpu"), tensor), rows)
    return Gathered(to_device(torch.frombuffer(buffer, dtype=tensor.dtype).view(shape), tensor), rows)


def fill_out(out: torch.Tensor | None, result: torch.Tensor, spec: Operation) -> torch.Tensor:
    """Copies a result to ``out`` and returns that; None: returns the result.

    Raises:
        UsageError: It has another shape. The operation is done by then, also on the other ranks.
    """
    if out is None or out is result:
        return result
    if out.shape != result.shape:
        shapes = f"out has the shape {list(out.shape)}, the result {list(result.shape)}"
        raise UsageError(f"{describe(spec.kind, spec.name)}: {shapes}")
    with torch.inference_mode():  # without it, memory that was made there cannot be written
        return out.copy_(result)


def finish_staged(core: context.Context, handle: int, staged: StagedTensors) -> tuple[torch.Tensor, ...]:
    """The results of an operation that is no gather."""
    if handle and staged.device is None:
        core.finish_or_keep(handle)
    elif handle and staged.device is not None:
        finish_on(staged.device, core, handle, staged.on_device())
    return staged.results()


def finish_in_place(core: context.Context, handle: int, tensor: torch.Tensor) -> torch.Tensor:
    """The result that is in the tensor itself, marked as changed for autograd."""
    if handle:
        core.finish_or_keep(handle)
    count_change((tensor,))
    return tensor


def finish_output(core: context.Context, handle: int, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The result that is in the second tensor."""
    if handle:
        core.finish_or_keep(handle)
    return pair[1]
