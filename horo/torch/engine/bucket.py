"""Several allreduces in place that begin and end together: with little Python for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from horo.core.buckets import new_handles
from horo.errors import HoroError
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.operation import count_change
from horo.torch.engine.request import Request
from horo.torch.engine.request_cache import CachedRequest
from horo.torch.engine.results import finish_in_place

__all__ = ["Bucket"]

_numbers = itertools.count(-(1 << 62))
"""Far below the handles of requests."""


class Bucket(Request):
    """Requests with a tensor each, in the place of the last of them. It keeps the memory from the beginning.

    Args:
        requests: Have the addresses of the tensors, and nobody else uses them until ``start`` returns.
        tensors: Theirs, in the same order.
    """

    __slots__ = ("_requests", "handles")

    def __init__(self, requests: Sequence[CachedRequest], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(
            _runtime.current(), next(_numbers), requests[-1].label(), tensors, finish_in_place, taken_name=None
        )
        self._requests = requests
        self.handles = new_handles(len(tensors))
        """The core's, in the same order; 0: it is not submitted."""

    def start(self) -> None:
        """Submits them in their order, up to the first that is refused; never blocks.

        Raises:
            HoroError: As ``start_allreduce``.
        """
        runtime = self._runtime
        try:
            runtime.active_calls[self] = self._memory
            runtime.admit_unnamed(self.label)
            runtime.core.submit_each([cached.buffer for cached in self._requests], self.handles)
            self._handle = self.handles[len(self._requests) - 1]
        finally:
            runtime.active_calls.pop(self, None)
            if not self.handles[0]:
                runtime.requests.pop(self.number, None)

    def wait(self, *, keep: bool = False) -> dict[int, HoroError]:
        """Blocks until all are done. Call it once.

        Returns:
            The errors of those that have failed or are not submitted, by their place.

        Raises:
            AbortedError: The job has ended.
        """
        runtime, tensors = self._runtime, self._memory
        errors: dict[int, HoroError] = runtime.inside(self.label, lambda: runtime.core.finish_each(self.handles))
        count_change([tensor for at, tensor in enumerate(tensors) if at not in errors] if errors else tensors)
        runtime.requests.pop(self.number, None)
        return errors
