"""Several allreduces in place that end together: with little Python for each."""

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
    """Requests with a tensor each, which are waited for together. Its handle is the one of the last of them."""

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        super().__init__(_runtime.current(), next(_numbers), "gradients", [], finish_in_place, taken_name=None)
        self.gradients: list[Any] = []
        """The gradients of the requests, in their order."""

    def add(self, gradients: list[Any], tensors: Sequence[torch.Tensor], pending: object, *, sync: bool) -> None:
        """Submits more of them in their order, up to the first that is refused; never blocks.

        Those submitted are ``pending``. After an exception the others do not belong to it.

        Args:
            gradients: As ``pick`` has given them: nobody else uses their requests until this returns.
            tensors: Theirs, in the same order.
            pending: As for ``Caller.submit_each``.
            sync: As for ``pick``.

        Raises:
            HoroError: As ``start_allreduce``.
        """
        runtime, before = self._runtime, len(self.gradients)
        try:
            runtime.active_calls[self] = self._memory
            runtime.requests[self.number] = self  # an exception may have ended the first part
            self.label = gradients[-1].again[sync].label()
            runtime.admit_unnamed(self.label)
            self.gradients += gradients
            self._memory += tensors
            runtime.submit_each(gradients, sync, pending)
            self._handle = gradients[-1].handle
        except BaseException:
            submitted = before + sum(each.pending is pending for each in gradients)
            del self.gradients[submitted:], self._memory[submitted:]
            if not self.gradients:
                runtime.requests.pop(self.number, None)
            raise
        finally:
            runtime.active_calls.pop(self, None)

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
        runtime, gradients, errors, at = self._runtime, self.gradients, {}, 0
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
