"""Several allreduces in place that begin and end together: with little Python for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from horo.errors import HoroError
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.operation import count_change
from horo.torch.engine.request import Request
from horo.torch.engine.results import finish_in_place

__all__ = ["Bucket"]

_numbers = itertools.count(-(1 << 62))
"""Far below the handles of requests."""


class Bucket(Request):
    """Requests with a tensor each, in the place of the last of them. It keeps the memory from the beginning.

    Args:
        gradients: As ``pick`` has given them: nobody else uses their requests until ``start`` returns.
        tensors: Theirs, in the same order.
        sync: As for ``pick``.
    """

    __slots__ = ("_gradients", "_sync")

    def __init__(self, gradients: list[Any], tensors: Sequence[torch.Tensor], *, sync: bool) -> None:
        label = gradients[-1].again[sync].label()
        super().__init__(_runtime.current(), next(_numbers), label, tensors, finish_in_place, taken_name=None)
        self._gradients, self._sync = gradients, sync

    def start(self, pending: object) -> None:
        """Submits them in their order, up to the first that is refused; never blocks. Those submitted are ``pending``.

        Raises:
            HoroError: As ``start_allreduce``.
        """
        runtime = self._runtime
        try:
            runtime.active_calls[self] = self._memory
            runtime.admit_unnamed(self.label)
            runtime.submit_each(self._gradients, self._sync, pending)
            self._handle = self._gradients[-1].handle
        finally:
            runtime.active_calls.pop(self, None)
            if self._gradients[0].pending is not pending:
                runtime.requests.pop(self.number, None)

    def wait(self, *, keep: bool = False) -> dict[int, HoroError]:
        """Blocks until all are done. Call it once.

        Returns:
            The errors of those that have failed or are not submitted, by their place.

        Raises:
            AbortedError: The job has ended.
        """
        tensors = self._memory
        errors = self._runtime.inside(self.label, self._finish_each)
        count_change([tensor for at, tensor in enumerate(tensors) if at not in errors] if errors else tensors)
        self._runtime.requests.pop(self.number, None)
        return errors

    def _finish_each(self) -> dict[int, HoroError]:
        """As ``wait``; the caller is in ``active_calls``.

        Raises:
            BaseException: The exception of a signal handler.
        """
        runtime, gradients, errors, at = self._runtime, self._gradients, {}, 0
        while (at := runtime.finish_each(gradients, at)) < len(gradients):
            handle = gradients[at].handle
            try:
                runtime.core.finish(handle)
            except HoroError as error:
                if runtime.core.in_progress(handle):  # a signal handler's
                    raise
                errors[at] = error
            at += 1
        return errors
